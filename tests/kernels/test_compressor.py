"""Pooled entries against a plain loop, for every cut and every way drafts are taken back across a group's border."""

from __future__ import annotations

import itertools

import pytest
import torch

from deepinfer.kernels.compressor import compress
from deepinfer.kernels.window_rows import WindowPlan
from ragged_kit import Work, schedules

PLACES, WIDTH = 8, 24
STATE = (2, 5, 1)


def raw(length: int, seed: int) -> torch.Tensor:
    """``(c, z)`` rows with gates far apart, equal and huge."""
    rows = torch.randn(length, 2, WIDTH, generator=torch.Generator().manual_seed(seed))
    rows[::3, 1] *= 60
    rows[4:6] = 0
    return rows


def plainly(rows: torch.Tensor, ratio: int) -> dict[int, torch.Tensor]:
    """Entry by the position of its group's last token, float64."""
    entries = {}
    for first in range(0, len(rows) - ratio + 1, ratio):
        group = rows[first : first + ratio].double()
        weight = torch.softmax(group[:, 1], 0)
        entries[first + ratio - 1] = (weight * group[:, 0]).sum(0)
    return entries


@pytest.mark.parametrize("ratio", [1, 2, 4])
def test_entries_do_not_depend_on_cuts_and_mates(ratio: int, device: str) -> None:
    streams = [raw(length, length).to(device) for length in (41, 7, 16)]
    whole: dict[tuple[int, int], torch.Tensor] = {}
    for steps in schedules([41, 7, 16]):
        pending = torch.full((6, PLACES, 2, WIDTH), torch.nan, device=device)
        for work in steps:
            step = work.rows(STATE, device)
            rows = work.take(streams)
            out = compress(rows[:, 0], rows[:, 1], WindowPlan(step, ratio, PLACES), pending)
            row = 0
            for sequence, first, end in work.spans:
                expected = plainly(streams[sequence].cpu(), ratio)
                for position in range(first, end):
                    if position in expected:
                        torch.testing.assert_close(out[row].double().cpu(), expected[position], rtol=1e-5, atol=1e-6)
                    else:
                        assert not out[row].any()
                    assert torch.equal(whole.setdefault((sequence, position), out[row]), out[row])
                    row += 1
        for sequence, slot in enumerate(STATE):
            length = len(streams[sequence])
            for position in range(max(0, length - PLACES), length):
                assert torch.equal(pending[slot, position % PLACES], streams[sequence][position])


def test_drafts_taken_back_across_a_border_change_nothing(device: str) -> None:
    """Every pattern of accepted rows (1 to 6 of 6) in three steps, from an even and an odd position."""
    truth = raw(30, 9).to(device)
    wrong = raw(6, 10).to(device)
    alone = compress(
        truth[:, 0],
        truth[:, 1],
        WindowPlan(Work(((0, 0, 30),)).rows((1,), device), 2, PLACES),
        torch.zeros(2, PLACES, 2, WIDTH, device=device),
    )
    for begin, pattern in itertools.product((4, 5), itertools.product(range(1, 7), repeat=3)):
        pending = torch.full((3, PLACES, 2, WIDTH), torch.nan, device=device)
        step = Work(((0, 0, begin),)).rows((2,), device)
        compress(truth[:begin, 0], truth[:begin, 1], WindowPlan(step, 2, PLACES), pending)
        at = begin
        for accepted in pattern:
            rows = torch.cat((truth[at : at + accepted], wrong[accepted:]))
            out = compress(rows[:, 0], rows[:, 1], WindowPlan(Work(((0, at, at + 6),)).rows((2,), device), 2, PLACES), pending)
            assert torch.equal(out[:accepted], alone[at : at + accepted])
            at += accepted
