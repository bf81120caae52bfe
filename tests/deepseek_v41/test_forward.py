"""The paged forward against the plain reference, and against itself in every other cut of the same rows.

Against the reference: 1e-5 in float32 without rounding (sums are added in another order; logits are about 3). With rounding on, a last
bit may move a value to the neighbouring one, so layers are compared one by one on the same inputs. Everything else is bit for bit.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from deepinfer.models.base import ModelOptions
from deepinfer.models.deepseek_v41.forward import DeepseekV41Model
from deepinfer.models.deepseek_v41.layer import Layer, Streams
from deepseek_v41.forward_kit import Bench, Running, make_model, play
from deepseek_v41.sequential import Forward, Run, Sequential, Shared
from deepseek_v41.weights_kit import RandomWeights, plan, random_ids

LENGTHS = (90, 23, 41)
SEED = 3


@cache
def exact_plan() -> Any:
    """Plain weights, nothing is rounded."""
    return plan("tiny", x_cache_quant="none", quantization_config=None)


@cache
def model(released: bool, dtype: torch.dtype, device: str) -> DeepseekV41Model:
    topology = plan("tiny") if released else exact_plan()
    return make_model(topology, RandomWeights(topology, SEED, released=released), dtype, device)


@cache
def reference(length: int) -> Forward:
    return Sequential(exact_plan(), RandomWeights(exact_plan(), SEED), Run(caches=False)).forward(random_ids(exact_plan(), length, SEED))


@cache
def whole(length: int, released: bool, dtype: torch.dtype, device: str) -> torch.Tensor:
    """Logits of every position, one sequence in one step."""
    return Bench(model(released, dtype, device)).prefill(random_ids(exact_plan(), length, SEED))[1]


class Seen:
    """A layer that notes what enters and leaves it."""

    def __init__(self, layer: Layer, inputs: list[Streams], outputs: list[Streams]) -> None:
        self._layer, self._inputs, self._outputs = layer, inputs, outputs
        self.plan, self.fill, self.add_engram = layer.plan, layer.fill, layer.add_engram

    def __call__(self, streams: Streams, *rest: Any) -> Streams:
        self._inputs.append(streams)
        self._outputs.append(self._layer(streams, *rest))
        return self._outputs[-1]


def watch(m: DeepseekV41Model, monkeypatch: pytest.MonkeyPatch) -> tuple[list[Streams], list[Streams]]:
    inputs: list[Streams] = []
    outputs: list[Streams] = []
    monkeypatch.setattr(m, "layers", [Seen(layer, inputs, outputs) for layer in m.layers])
    return inputs, outputs


@pytest.mark.parametrize("length", [1, 90])
def test_logits_are_those_of_the_reference(length: int, device: str) -> None:
    ours = whole(length, False, torch.float32, device)
    assert (ours.cpu() - reference(length).logits).abs().max() < 1e-5


def test_every_depth_agrees_with_the_reference(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plainly = Sequential(exact_plan(), RandomWeights(exact_plan(), SEED), Run(caches=False))
    m = model(False, torch.float32, device)
    _, outputs = watch(m, monkeypatch)
    Bench(m).prefill(random_ids(exact_plan(), 90, SEED))
    theirs = reference(90)
    for depth, ((x, pre), (y, mix)) in enumerate(zip(outputs, theirs.inputs[1:], strict=True), 1):
        assert (plainly.head(x[:90].cpu(), pre[:90].cpu()) - plainly.head(y, mix)).abs().max() < 1e-5, depth
    assert m.taps is not None and m.taps.rows is None
    assert (m.taps.values[:90].cpu() - theirs.taps).abs().max() < 1e-5 * theirs.taps.abs().max()


def stored_rows(bench: Bench, run: Running, length: int) -> Shared:
    """What a forward has written, as the reference shares it; windows of the last rows only."""
    caches, kv, shared = bench.model.caches, bench.kv.tensors, Shared()
    for layer, per_page in caches.sources:
        count = length * per_page // caches.page_tokens
        for name, kind, target in (("kv", caches.entry, shared.entries), ("index", caches.index_key, shared.index_keys)):
            pages = kv[f"layers.{layer}.{name}"][torch.tensor(run.pages, device=bench.device)]
            target[layer] = kind.load(pages.flatten(0, 1)[:count]).cpu()
    return shared


def test_rounded_layers_agree_one_by_one(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    topology, length = plan("tiny"), 90
    # what is forced upon a layer has been through its Engram already
    plainly = Sequential(topology, RandomWeights(topology, SEED, released=True), Run(caches=True, activations=True, engram=False))
    m = model(True, torch.float32, device)
    inputs, outputs = watch(m, monkeypatch)
    bench, ids = Bench(m), random_ids(topology, length, SEED)
    run, _ = bench.prefill(ids)
    rows = [(x[:length].cpu(), pre[:length].cpu()) for x, pre in inputs]
    shared = stored_rows(bench, run, length)
    made = plainly.forward(ids, forced=dict(enumerate(rows)))
    for layer, entries in shared.entries.items():  # a rounded number moves at most to its neighbour, and seldom
        for mine, theirs in ((entries, made.shared.entries[layer]), (shared.index_keys[layer], made.shared.index_keys[layer])):
            assert (mine != theirs).float().mean() < 2e-3, layer
            assert ((mine - theirs).abs() <= 0.5 * theirs.abs().amax(-1, keepdim=True)).all(), layer
    for index, (x, pre) in enumerate(outputs):
        out = plainly.layer(index, *rows[index], shared)
        off = (x[:length].cpu() - out.streams).abs()
        assert off.quantile(0.99) < 1e-4 and off.mean() < 1e-3, (index, float(off.mean()), float(off.max()))
        assert (pre[:length].cpu() - out.pre).abs().quantile(0.99) < 1e-3, index


@pytest.mark.parametrize(
    ("released", "dtype", "drafts"),
    [(False, torch.float32, False), (True, torch.float32, True), (True, torch.bfloat16, True)],
)
def test_cuts_mates_and_drafts_do_not_change_bits(released: bool, dtype: torch.dtype, drafts: bool, device: str) -> None:
    bench = Bench(model(released, dtype, device), shuffle=5)
    ids = [random_ids(exact_plan(), length, SEED) for length in LENGTHS]
    for k, logits in enumerate(play(bench, ids, 7 + drafts, drafts=drafts)):
        assert torch.equal(logits, whole(LENGTHS[k], released, dtype, device)), k


@pytest.mark.parametrize("form", ["bfloat16", "float32"])
def test_forms_of_storage_hold_the_same_values(form: Any, device: str) -> None:
    m = model(True, torch.float32, device)
    m.configure(ModelOptions(cache_form=form))
    try:
        _, logits = Bench(m).prefill(random_ids(exact_plan(), 90, SEED), chunk=31)
    finally:
        m.configure(ModelOptions())
    assert torch.equal(logits, whole(90, True, torch.float32, device))


def test_pages_of_any_size_give_the_same_bits(device: str) -> None:
    for block in (32, 128):
        _, logits = Bench(model(True, torch.float32, device), block=block).prefill(random_ids(exact_plan(), 90, SEED), chunk=50)
        assert torch.equal(logits, whole(90, True, torch.float32, device)), block


def test_a_position_sees_only_earlier_ones(device: str) -> None:
    ids = random_ids(exact_plan(), 90, SEED)
    ids[60:] = (ids[60:] + 7) % 2000
    _, logits = Bench(model(True, torch.float32, device)).prefill(ids)
    seen = whole(90, True, torch.float32, device)
    assert torch.equal(logits[:60], seen[:60]) and (logits[60:] != seen[60:]).any(1).all()


@pytest.mark.parametrize("layers", [[1, 3], [0, 3]])
def test_rows_computed_again_behind_a_hit_are_exact_from_the_bound_on(layers: list[int], device: str) -> None:
    """Ten layers with windows of 4 reach back 30 rows; n-grams of a first row reach three ids further, even in the first layer."""
    changes = {"sliding_window": 4, "engram_layer_ids": layers, "x_cache_quant": "none", "quantization_config": None}
    topology = plan("tiny", **changes)
    bench = Bench(make_model(topology, RandomWeights(topology, SEED), torch.float32, device))
    ids = random_ids(topology, 112, SEED)
    first, whole_logits = bench.prefill(ids)
    written = bench.written(first)
    assert topology.exact_tokens == 31
    for start, exact in ((112 - 32, True), (112 - 16, False)):
        again = bench.resume(first, start, 96)
        logits = torch.cat([bench.step([(again, 7)])[0], bench.step([(again, 112 - start - 7)])[0]])
        assert torch.equal(logits[-1], whole_logits[-1]) is exact
        made = bench.written(again)
        for name, rows in written.items():
            kept = 96 * rows.shape[0] // 112
            assert torch.equal(made[name][:kept], rows[:kept]), name
        bench.slots.append(again.slot)
