"""Windows of a step against windows of the whole sequence, for every cut, kind of row, floor and rejected draft."""

from __future__ import annotations

import pytest
import torch

from deepinfer.kernels.block_formats import FP8_ROWS, decode_rows, encode_rows
from deepinfer.kernels.cache_rows import RowKind, StepRows
from deepinfer.kernels.window_rows import WindowPlan, WindowRows
from ragged_kit import Work, schedules

WINDOW, RING, WIDTH = 8, 14, 32
STATE = (3, 1, 4)
KINDS = {
    "packed": RowKind(WIDTH, FP8_ROWS, True, torch.uint8),
    "bfloat16": RowKind(WIDTH, FP8_ROWS, False, torch.bfloat16),
    "float32": RowKind(WIDTH, FP8_ROWS, False, torch.float32),
    "plain": RowKind(WIDTH, None, False, torch.float32),
}


def rows_of(length: int, seed: int) -> torch.Tensor:
    rows = torch.randn(length, WIDTH, generator=torch.Generator().manual_seed(seed))
    rows[::5] = 0
    return rows * torch.logspace(-8, 4, length)[:, None]


def plain_window(values: torch.Tensor, position: int, floor: int) -> tuple[torch.Tensor, list[bool]]:
    out, seen = torch.zeros(WINDOW, WIDTH), []
    for place in range(WINDOW):
        source = position - WINDOW + 1 + place
        seen.append(source >= max(floor, 0))
        if seen[-1]:
            out[place] = values[source]
    return out, seen


def dirty_ring(kind: RowKind, device: str) -> torch.Tensor:
    """A ring inside a wider state row, full of NaN, as memory of another sequence may leave it."""
    wide = torch.full((6, RING + 3, *kind.shape), 255, dtype=torch.uint8, device=device)
    return wide[:, 2 : 2 + RING] if kind.packed else torch.full(wide.shape, torch.nan, dtype=kind.dtype, device=device)[:, 2 : 2 + RING]


@pytest.mark.parametrize("name", KINDS)
def test_windows_do_not_depend_on_cuts_and_mates(name: str, device: str) -> None:
    kind = KINDS[name]
    raw = [rows_of(length, length) for length in (33, 5, 20)]
    stored = [kind.store(rows.to(device)) for rows in raw]
    values = [kind.load(rows).cpu() for rows in stored]
    if kind.form is not None:
        assert all(torch.equal(v, decode_rows(encode_rows(rows, FP8_ROWS), FP8_ROWS, WIDTH)) for v, rows in zip(values, raw, strict=True))
    for steps in schedules([33, 5, 20]):
        ring = dirty_ring(kind, device)
        for work in steps:
            step = work.rows(STATE, device)
            layer = WindowRows(WindowPlan(step, WINDOW, RING), ring, work.take(stored), kind)
            got, mask = layer.gather(0, step.rows)
            middle = layer.gather(step.rows // 2, step.rows)
            assert torch.equal(middle[0].nan_to_num(), got[step.rows // 2 :].nan_to_num()) and torch.equal(
                middle[1], mask[step.rows // 2 :]
            )
            layer.store()
            row = 0
            for sequence, first, end in work.spans:
                for position in range(first, end):
                    window, seen = plain_window(values[sequence], position, 0)
                    assert torch.equal(got[row].cpu(), window) and mask[row].tolist() == seen
                    row += 1
        for sequence, slot in enumerate(STATE):
            for position in range(max(0, len(raw[sequence]) - RING), len(raw[sequence])):
                assert torch.equal(ring[slot, position % RING], stored[sequence][position])
        assert torch.isnan(kind.load(ring[[2, 5]])).all()  # slots of others


def test_a_floor_hides_older_rows_of_its_rows_only(device: str) -> None:
    kind = KINDS["plain"]
    values = rows_of(30, 1)
    for cut in (3, 7, 15, 16, 29):
        ring = dirty_ring(kind, device)
        for first, end in ((0, cut), (cut, 30)):
            step = Work(((0, first, end),)).rows((2,), device)
            floor = torch.where(step.pos >= 12, 12, 4)
            layer = WindowRows(WindowPlan(step, WINDOW, RING, floor), ring, values[first:end].to(device), kind)
            got, mask = layer.gather(0, step.rows)
            layer.store()
            for row, position in enumerate(range(first, end)):
                window, seen = plain_window(values, position, 12 if position >= 12 else 4)
                assert torch.equal(got[row].cpu(), window) and mask[row].tolist() == seen


def test_rejected_drafts_leave_windows_as_they_were(device: str) -> None:
    """Six rows a step of which one to six are accepted: places of rejected rows are older than any later window."""
    kind = KINDS["bfloat16"]
    values = rows_of(60, 2)
    truth = kind.store(values.to(device))
    wrong = kind.store(torch.full((6, WIDTH), 7.0, device=device))
    ring, at, number = dirty_ring(kind, device), 0, 0
    while at + 6 <= 60:
        accepted = number % 6 + 1
        number += 1
        step = Work(((0, at, at + 6),)).rows((1,), device)
        rows = torch.cat((truth[at : at + accepted], wrong[accepted:]))
        layer = WindowRows(WindowPlan(step, WINDOW, RING), ring, rows, kind)
        got, _ = layer.gather(0, accepted)
        layer.store()
        for row in range(accepted):
            assert torch.equal(got[row].cpu(), plain_window(kind.load(truth).cpu(), at + row, 0)[0])
        at += accepted


def test_windows_from_the_ring_alone(device: str) -> None:
    """Draft rows all see the window that ends at the last verified position, and are not in it."""
    kind = KINDS["float32"]
    values = kind.store(rows_of(40, 3))
    ring = dirty_ring(kind, device)
    for position in range(3):
        ring[2, position] = values[position].to(device)
    for position in range(40 - RING, 40):
        ring[4, position % RING] = values[position].to(device)
    pos = torch.tensor([2] * 5 + [39] * 5, device=device)
    step = StepRows(
        pos, torch.tensor([0] * 5 + [1] * 5, device=device), torch.tensor([0, 5, 10], device=device), torch.tensor([2, 4], device=device)
    )
    got, mask = WindowRows(WindowPlan(step, WINDOW, RING, own=False), ring, None, kind).gather(0, 10)
    for row, position in enumerate(pos.tolist()):
        window, seen = plain_window(values, position, 0)
        assert torch.equal(got[row].cpu(), window) and mask[row].tolist() == seen


def test_long_chunks_keep_their_newest_rows(device: str) -> None:
    """Each place is written once, so that no order of writes decides: older rows go to the null slot."""
    kind = KINDS["plain"]
    values = rows_of(200, 4).to(device)
    ring = dirty_ring(kind, device)
    step = Work(((0, 0, 200),), padding=4).rows((5,), device)
    WindowPlan(step, WINDOW, RING).store(ring, torch.cat((values, values[:4])))
    for position in range(200 - RING, 200):
        assert torch.equal(ring[5, position % RING], values[position])
    assert ring[0].isfinite().all() and ring[1:5].isnan().all()


def test_a_ring_that_is_too_short_is_refused() -> None:
    step = Work(((0, 0, 3),)).rows((1,), "cpu")
    with pytest.raises(ValueError, match="a ring of 6 rows cannot hold the 7 rows"):
        WindowPlan(step, 8, 6)
    with pytest.raises(ValueError, match="8 rows before a step"):
        WindowPlan(step, 8, 7, own=False)
