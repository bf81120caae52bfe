"""Entries of long and overlapping windows against a plain loop, for every cut and for drafts taken back across a window's border."""

from __future__ import annotations

import itertools

import pytest
import torch

from deepinfer.kernels.compressor import PoolPlan, pool_windows
from ragged_kit import Work, schedules

WIDTH, BACK = 12, 6
STATE = (2, 5, 1)
SHAPES = [(4, True), (3, True), (8, False), (1, True)]


def raw(length: int, seed: int, overlap: bool) -> torch.Tensor:
    """``(c, z)`` rows with gates far apart, equal and huge."""
    rows = torch.randn(length, 2, WIDTH * (1 + overlap), generator=torch.Generator().manual_seed(seed))
    rows[::3, 1] *= 60
    rows[4:6] = 0
    return rows


def plainly(rows: torch.Tensor, ratio: int, overlap: bool) -> dict[int, torch.Tensor]:
    """Entry by the position of its window's last token, float64."""
    entries = {}
    for first in range(0, len(rows) - ratio + 1, ratio):
        group = rows[first : first + ratio].double()
        if overlap:
            group = torch.cat((rows[max(0, first - ratio) : first, :, :WIDTH].double(), group[:, :, WIDTH:]))
        entries[first + ratio - 1] = (torch.softmax(group[:, 1], 0) * group[:, 0]).sum(0)
    return entries


def places(ratio: int, overlap: bool) -> int:
    return ratio * (1 + overlap) - 1 + BACK


@pytest.mark.parametrize(("ratio", "overlap"), SHAPES)
def test_entries_do_not_depend_on_cuts_and_mates(ratio: int, overlap: bool, device: str) -> None:
    lengths, ring = [41, 7, 16], places(ratio, overlap)
    streams = [raw(length, length, overlap).to(device) for length in lengths]
    whole: dict[tuple[int, int], torch.Tensor] = {}
    for steps in schedules(lengths):
        pending = torch.full((6, ring, 2, streams[0].shape[-1]), torch.nan, device=device)
        for work in steps:
            plan, rows = PoolPlan(work.rows(STATE, device), ratio, overlap, ring), work.take(streams)
            out = pool_windows(rows[:, 0], rows[:, 1], plan, pending)
            expected = []
            row = 0
            for sequence, first, end in work.spans:
                entries = plainly(streams[sequence].cpu(), ratio, overlap)
                for position in range(first, end):
                    if position in entries:
                        number = len(expected)
                        expected.append(row)
                        assert int(plan.first[number]) == position - ratio + 1
                        torch.testing.assert_close(out[number].double().cpu(), entries[position], rtol=1e-5, atol=1e-6)
                        assert torch.equal(whole.setdefault((sequence, position), out[number]), out[number])
                    row += 1
            spare = [len(rows)] * (len(out) - len(expected))
            assert plan.row.tolist() == expected + spare
            marks = torch.arange(len(rows), device=device) + 1
            assert plan.at_ends(marks).tolist() == [row + 1 for row in expected] + [0] * len(spare)
        for sequence, slot in enumerate(STATE):
            for position in range(max(0, lengths[sequence] - ring), lengths[sequence]):
                assert torch.equal(pending[slot, position % ring], streams[sequence][position])


@pytest.mark.parametrize(("ratio", "overlap"), SHAPES[:3])
def test_drafts_taken_back_change_nothing(ratio: int, overlap: bool, device: str) -> None:
    """All counts of accepted rows (1 to 6 of 6), and what follows them, from beside a border and upon it."""
    ring, truth, wrong = places(ratio, overlap), raw(30, 9, overlap).to(device), raw(6, 10, overlap).to(device)
    whole = PoolPlan(Work(((0, 0, 30),)).rows((1,), device), ratio, overlap, ring)
    alone = pool_windows(truth[:, 0], truth[:, 1], whole, torch.zeros(2, ring, 2, truth.shape[-1], device=device))
    for begin, pattern in itertools.product((ratio, ratio + 1), itertools.product(range(1, 7), (1, 4, 6), (2, 5))):
        pending = torch.full((3, ring, 2, truth.shape[-1]), torch.nan, device=device)
        plan = PoolPlan(Work(((0, 0, begin),)).rows((2,), device), ratio, overlap, ring)
        pool_windows(truth[:begin, 0], truth[:begin, 1], plan, pending)
        at = begin
        for accepted in pattern:
            rows = torch.cat((truth[at : at + accepted], wrong[accepted:]))
            plan = PoolPlan(Work(((0, at, at + 6),)).rows((2,), device), ratio, overlap, ring)
            out = pool_windows(rows[:, 0], rows[:, 1], plan, pending)
            begun, ended = at // ratio, (at + accepted) // ratio
            assert torch.equal(out[: ended - begun], alone[begun:ended])
            at += accepted


def test_a_ring_too_short_is_refused(device: str) -> None:
    step = Work(((0, 0, 5),)).rows((1,), device)
    with pytest.raises(ValueError, match="rings of 6 rows cannot hold the 7 rows before a step"):
        PoolPlan(step, 4, True, 6)
