"""The copy of a sequence's state at each boundary is that of a run which stopped there, whatever was drafted around it."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from deepinfer.models.deepseek_v41.forward import DeepseekV41Model
from deepseek_v41.forward_kit import Bench, make_model
from deepseek_v41.weights_kit import RandomWeights, plan, random_ids

CUT, DRAFTS = 32, 5


@cache
def model(device: str) -> DeepseekV41Model:
    topology = plan("tiny")
    return make_model(topology, RandomWeights(topology, 3, released=True), torch.float32, device)


def tokens(length: int) -> torch.Tensor:
    """The first tokens of one text."""
    return random_ids(plan("tiny"), 4 * CUT, 3)[:length]


@cache
def undrafted(length: int, device: str) -> dict[str, torch.Tensor]:
    """The replica of a run that decodes token by token up to the boundary ``length``, as bytes."""
    bench = Bench(model(device), block=CUT)
    run = bench.start(tokens(length))
    bench.step([(run, length - 9)])
    for _ in range(9):
        bench.step([(run, 1)])
    return as_bytes(bench.replica(run))


def as_bytes(fields: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: rows.contiguous().view(torch.uint8).cpu() for name, rows in fields.items()}


def same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> list[str]:
    return [name for name, rows in theirs.items() if not torch.equal(ours[name], rows)]


def test_what_is_kept_at_a_boundary(device: str) -> None:
    m = model(device)
    kept = undrafted(2 * CUT, device)
    assert set(kept) == {f"layers.{i}.window" for i in range(10)} | {f"mtp.{i}.window" for i in range(3)} | {
        "token_ids", "layers.2.pending", "layers.4.pending",
    }  # fmt: skip
    rows = kept["layers.3.window"].view(m.caches.ring, -1)
    held = {position % m.caches.ring for position in range(2 * CUT - 16, 2 * CUT)}
    assert [bool(row.any()) for row in rows] == [place in held for place in range(m.caches.ring)]
    assert not kept["layers.2.pending"].any()
    ids = tokens(2 * CUT)
    assert kept["token_ids"].view(torch.int64)[[(2 * CUT - 1 - back) % 9 for back in range(3)]].tolist() == ids[-3:].flip(0).tolist()


@pytest.mark.parametrize("start", range(2 * CUT - DRAFTS - 1, 2 * CUT))
def test_every_pattern_of_drafts_across_a_boundary(start: int, device: str) -> None:
    """``start`` positions are settled, a step of one token and five drafts follows, of which any number is taken back."""
    ids = tokens(2 * CUT + 12)
    taken_back = range(DRAFTS + 1)
    bench = Bench(model(device), block=CUT)
    runs = [bench.start(ids) for _ in taken_back]
    bench.step([(run, start) for run in runs])
    for wrong, run in zip(taken_back, runs, strict=True):
        end = start + DRAFTS + 1
        run.tokens[end - wrong : end] = [(token + 5) % 2000 for token in run.tokens[end - wrong : end]]
    bench.step([(run, DRAFTS + 1) for run in runs], list(taken_back))
    crossed = [run.done >= 2 * CUT for run in runs]
    assert crossed == [start + DRAFTS + 1 - wrong >= 2 * CUT for wrong in taken_back]
    for run, passed in zip(runs, crossed, strict=True):
        assert (not same(as_bytes(bench.replica(run)), undrafted(2 * CUT, device))) is passed
        run.tokens = ids.tolist()
    for _ in range(6):  # those that were taken back pass the boundary later, those beyond it leave the copy alone
        bench.step([(run, 1) for run in runs])
    for run in runs:
        assert not same(as_bytes(bench.replica(run)), undrafted(2 * CUT, device)), run.done


@pytest.mark.parametrize("tail", [0, 1, 5, 6])
def test_a_chunk_may_pass_a_boundary_by_what_a_ring_holds(tail: int, device: str) -> None:
    bench = Bench(model(device), block=CUT)
    run = bench.start(tokens(2 * CUT + tail))
    bench.step([(run, 23)])
    bench.step([(run, 2 * CUT + tail - 23)])
    assert not same(as_bytes(bench.replica(run)), undrafted(2 * CUT, device))


def test_a_longer_chunk_leaves_the_last_copy_alone(device: str) -> None:
    bench = Bench(model(device), block=CUT)
    run = bench.start(tokens(3 * CUT))
    bench.step([(run, CUT)])
    first = as_bytes(bench.replica(run))
    bench.step([(run, CUT + 7)])
    assert not same(as_bytes(bench.replica(run)), first)
    assert not same(first, undrafted(CUT, device))
