"""The reference against mlx-lm with the same random weights: text, no Engram.

Without roundings both compute the same in float32, so logits agree to float32 noise at every depth. With them a last-bit difference
may flip a rounding or a choice, and from there on the two are different models: layers are then compared one by one with
mlx-lm's inputs and shared values.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import pytest
import torch

from deepseek_v41 import arithmetic
from deepseek_v41.compare import check_shared
from deepseek_v41.sequential import Run, Sequential
from deepseek_v41.weights_kit import HARSH_TOKENS, RandomWeights, config, plan, random_ids

if TYPE_CHECKING:
    from deepseek_v41.mlx_lm_kit import Oracle

pytestmark = pytest.mark.oracle

TOLERANCE = 1e-5
"""Float32 noise of ten layers at logits of size 4; measured: see the assertion's message."""
LENGTH = {"tiny": 90, "tiny128": 300}
SEEDS = (1, 2)


@cache
def reference(name: str, seed: int, caches: bool) -> Sequential:
    topology = plan(name, engram_layer_ids=[])
    return Sequential(topology, RandomWeights(topology, seed), Run(caches=caches))


@cache
def oracle(name: str, seed: int, quantised: bool) -> Oracle:
    pytest.importorskip("mlx.core", reason="needs mlx, which `make oracle` installs")
    pytest.importorskip("mlx_lm.models.deepseek_v41", reason="needs mlx-lm 0.32, which `make oracle` installs")
    from deepseek_v41.mlx_lm_kit import Oracle

    return Oracle(config(name, engram_layer_ids=[]), reference(name, seed, False).weights, quantised)


def _ids(name: str, seed: int) -> torch.Tensor:
    return random_ids(reference(name, seed, False).topology, LENGTH[name], seed)


CHUNKS = {"tiny": [37, 20, *[1] * 33], "tiny128": [130, 7, 128, *[1] * 35]}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", ["tiny", "tiny128"])
@pytest.mark.parametrize("chunked", [False, True], ids=["full", "chunks and single tokens"])
def test_logits_agree_at_every_depth(name: str, seed: int, chunked: bool) -> None:
    model, ids, theirs = reference(name, seed, False), _ids(name, seed), oracle(name, seed, False)
    ours = model.forward(ids)
    logits, _ = theirs.run(ids, CHUNKS[name] if chunked else None)
    errors = [float((model.head(*ours.inputs[depth]) - theirs.logits_at(depth)).abs().max()) for depth in range(1, theirs.layers + 1)]
    assert torch.equal(theirs.logits_at(theirs.layers), logits)
    assert max(errors) <= TOLERANCE, errors


def test_a_wrong_reference_is_noticed() -> None:
    """The comparison above sees a term that is missing: each of these changes logits beyond the tolerance."""
    model, ids = reference("tiny", 1, False), _ids("tiny", 1)
    logits, _ = oracle("tiny", 1, False).run(ids)

    def off(**changed: torch.Tensor) -> float:
        weights = {**model.weights, **changed}
        return float((Sequential(model.topology, weights, model.run).forward(ids).logits - logits).abs().max())

    for layer, name in ((0, "attn.attn_sink"), (4, "hc_attn_base"), (5, "ffn.gate.bias"), (2, "attn.compressor.wgate.weight"),
                        (9, "attn.indexer.weights_proj.weight"), (5, "attn.indexer.k_norm.weight")):  # fmt: skip
        key = f"layers.{layer}.{name}"
        assert off(**{key: torch.zeros_like(model.weights[key]) if "proj" not in name else -model.weights[key]}) > 1e-3, key


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", ["tiny", "tiny128"])
def test_roundings_agree_bit_for_bit(name: str, seed: int) -> None:
    _, record = oracle(name, seed, True).run(_ids(name, seed))
    ours: dict[str, Any] = {"window": arithmetic.round_fp8, "entries": arithmetic.round_fp4, "index": arithmetic.round_mxfp4}
    seen = dict.fromkeys(ours, 0)
    for layer in range(len(record.inputs)):
        for form, function in ours.items():
            for before, after in record.rounded(layer, form):
                assert torch.equal(function(before), after), (layer, form)
                seen[form] += 1
    # window rows of every layer, entries of three sources, index keys of those and queries of five
    assert seen == {"window": 10, "entries": 3, "index": 8}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", ["tiny", "tiny128"])
def test_layers_agree_given_the_same_input(name: str, seed: int) -> None:
    model, ids = reference(name, seed, True), _ids(name, seed)
    _, record = oracle(name, seed, True).run(ids)
    theirs, source = record.shared_values(model.topology), model.topology.shared.candidate_source
    for layer in range(len(record.inputs)):
        streams, pre = record.layer_input(layer)
        wanted, wanted_pre = record.layer_output(layer)
        out = model.layer(layer, streams, pre, theirs.copy())
        assert float((out.streams - wanted).abs().max()) <= TOLERANCE, layer
        assert float((out.pre - wanted_pre).abs().max()) <= TOLERANCE, layer
        made = theirs.without(layer, source)
        model.layer(layer, streams, pre, made)
        check_shared(made, theirs, layer, layer == source)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", ["tiny", "tiny128"])
def test_trained_looking_weights_and_empty_rows(name: str, seed: int) -> None:
    """Outliers of 300, outputs and embeddings that are zero, blocks of least scale: in float32 both stay equal, and finite."""
    changed: dict[str, Any] = {"engram_layer_ids": []}
    topology = plan(name, **changed)
    weights, ids = RandomWeights(topology, seed, released=True, harsh=True), random_ids(topology, LENGTH[name], seed)
    zero, tiny, outliers = HARSH_TOKENS
    ids[[0, 1, 9, 10, 11, 40]] = torch.tensor([zero, zero, tiny, tiny, outliers, zero])
    oracle(name, seed, False)  # skips where there is none
    from deepseek_v41.mlx_lm_kit import Oracle

    model, theirs = Sequential(topology, weights, Run(caches=False)), Oracle(config(name, **changed), weights, quantised=False)
    ours = model.forward(ids)
    theirs.run(ids)
    size = max(float(streams.abs().max()) for streams, _ in ours.inputs)
    assert size > 250 and bool(ours.logits.isfinite().all())
    for depth in range(1, theirs.layers + 1):
        assert float((model.head(*ours.inputs[depth]) - theirs.logits_at(depth)).abs().max()) <= 3e-6 * size, depth
    rounding, theirs = Sequential(topology, weights), Oracle(config(name, **changed), weights, quantised=True)
    _, record = theirs.run(ids)
    shared = record.shared_values(topology)
    for layer in range(theirs.layers):
        out, (wanted, _) = rounding.layer(layer, *record.layer_input(layer), shared.copy()), record.layer_output(layer)
        assert float((out.streams - wanted).abs().max()) <= 1e-6 * size, layer
