"""DeepSeek-V4 by the plain reference against transformers' model with the same random weights, in float32."""

from __future__ import annotations

from functools import cache
from inspect import signature
from typing import Any

import pytest
import torch

from deepseek_v41 import v4_kit
from deepseek_v41.v4 import SequentialV4, V4Forward

pytest.importorskip("transformers.models.deepseek_v4", reason="needs transformers with deepseek_v4 (5.24)")

TOLERANCE = 1e-5
LENGTH = 100


def ids(length: int = LENGTH, seed: int = 1) -> torch.Tensor:
    return torch.randint(3, 512, (length,), generator=torch.Generator().manual_seed(seed))


@cache
def model(seed: int = 1) -> SequentialV4:
    plan = v4_kit.read_plan(v4_kit.config())
    return SequentialV4(plan, v4_kit.weights(plan, seed))


@cache
def theirs(seed: int = 1) -> Any:
    return v4_kit.transformers_model(v4_kit.config(), model(seed).weights)


@cache
def seen(seed: int = 1) -> V4Forward:
    return model(seed).forward(ids())


def test_logits_and_every_layer_agree() -> None:
    with torch.inference_mode():
        wanted = theirs()(ids()[None], output_hidden_states=True)
    assert float((seen().logits - wanted.logits[0]).abs().max()) <= TOLERANCE
    for layer in range(5):
        streams = wanted.hidden_states[layer][0]
        # streams are several times larger than logits
        assert float((seen().inputs[layer] - streams).abs().max()) <= 2e-6 * float(streams.abs().max()), layer


@pytest.mark.parametrize("chunks", [(37, 33, 30), (70, *[1] * 30)])
def test_logits_agree_fed_in_chunks(chunks: tuple[int, ...]) -> None:
    from transformers import DynamicCache

    past, parts, start = DynamicCache(config=theirs().config), [], 0
    # called `past_key_values` in 5.17, `cache` in 5.24; a name it does not know is ignored
    name = "cache" if "cache" in signature(theirs().forward).parameters else "past_key_values"
    with torch.inference_mode():
        for length in chunks:
            out = theirs()(ids()[None, start : start + length], use_cache=True, **{name: past})
            parts.append(out.logits[0])
            start += length
    assert float((seen().logits - torch.cat(parts)).abs().max()) <= TOLERANCE


@pytest.mark.oracle
@pytest.mark.parametrize("seed", range(2, 6))
@pytest.mark.parametrize("length", [1, 3, 4, 31, 33, 64, 257])
def test_logits_agree_at_other_lengths(seed: int, length: int) -> None:
    with torch.inference_mode():
        wanted = theirs(seed)(ids(length, seed)[None]).logits[0]
    assert float((model(seed).forward(ids(length, seed)).logits - wanted).abs().max()) <= TOLERANCE


@pytest.mark.parametrize("name", [
    "layers.0.attn.attn_sink", "layers.1.ffn.gate.tid2eid", "layers.2.attn.compressor.ape", "layers.2.attn.indexer.compressor.ape",
    "layers.3.attn.compressor.ape", "layers.3.ffn.gate.bias", "layers.4.attn.indexer.compressor.wgate.weight", "layers.4.hc_ffn_base",
    "hc_head_base",
])  # fmt: skip
def test_no_weight_is_without_effect(name: str) -> None:
    """Weights that transformers starts at zero: each moves logits by far more than the tolerance."""
    changed = {**model().weights, name: torch.zeros_like(model().weights[name])}
    other = SequentialV4(model().topology, changed).forward(ids()).logits
    assert float((other - seen().logits).abs().max()) > 1e-2


def test_every_kind_of_layer_has_work() -> None:
    assert [entries is None for entries in seen().entries] == [True, True, False, False, False]
    csa, hca = seen().selections[2], seen().selections[3]
    assert csa is not None and hca is not None
    # more entries than are selected, and several long windows
    assert seen().entries[2].shape[0] == 25 and csa.shape[1] == 8 and int((csa[-1] >= 0).sum()) == 8  # type: ignore[union-attr]
    assert hca.shape[1] == 3 and hca[-1].tolist() == [0, 1, 2] and hca[32].tolist() == [0, -1, -1]
    assert all(experts.unique().numel() == 8 for experts in seen().experts)


def test_weights_follow_the_list_of_names() -> None:
    plan = v4_kit.read_plan(v4_kit.config())
    assert {name: tuple(value.shape) for name, value in model().weights.items()} == dict(v4_kit.tensors(plan))
