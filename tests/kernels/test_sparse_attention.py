"""Two-source attention against a float64 softmax per row and head; bits under every cut, batch, page and kind of row."""

from __future__ import annotations

import pytest
import torch

from deepinfer.kernels.block_formats import FP4_ROWS, FP8_ROWS
from deepinfer.kernels.cache_rows import PagedRows, RowKind, StepRows
from deepinfer.kernels.sparse_attention import full_attention, two_source_attention
from deepinfer.kernels.window_rows import WindowPlan, WindowRows
from ragged_kit import Pages, Work, schedules

HEADS, WIDTH, WINDOW, RING, PICKS = 6, 32, 8, 14, 5
STATE = (2, 4, 1)


def random_rows(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def kinds(storage: str) -> tuple[RowKind, RowKind]:
    """Window rows and entries."""
    if storage == "plain":
        return RowKind(WIDTH, None, False, torch.float32), RowKind(WIDTH, None, False, torch.float32)
    packed = storage == "packed"
    dtype = torch.uint8 if packed else torch.bfloat16
    return RowKind(WIDTH, FP8_ROWS, packed, dtype), RowKind(WIDTH, FP4_ROWS, packed, dtype)


def picks_of(length: int, ratio: int, seed: int) -> torch.Tensor:
    """Some visible entries for each position, ascending, −1 behind."""
    g = torch.Generator().manual_seed(seed)
    out = torch.full((length, PICKS), -1, dtype=torch.int32)
    for position in range(length):
        visible = (position + 1) // ratio
        chosen = torch.randperm(visible, generator=g)[: min(PICKS, visible)].sort().values
        out[position, : len(chosen)] = chosen.int()
    return out


def plainly(q: torch.Tensor, rows: torch.Tensor, sink: torch.Tensor, scale: float) -> torch.Tensor:
    """One row: ``q`` ``[H, D]`` over ``rows`` ``[n, D]``, in float64."""
    scores = q.double() @ rows.double().T * scale
    weights = torch.softmax(torch.cat((scores, sink.double()[:, None]), 1), 1)[:, :-1]
    return weights @ rows.double()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("storage", ["plain", "packed"])
def test_rows_do_not_depend_on_cuts_mates_and_pages(storage: str, dtype: torch.dtype, device: str) -> None:
    lengths, ratio, scale = [50, 5, 21], 2, WIDTH**-0.5
    window_kind, entry_kind = kinds(storage)
    q = [random_rows(n, HEADS, WIDTH, seed=n).to(device=device, dtype=dtype) for n in lengths]
    own = [window_kind.store(random_rows(n, WIDTH, seed=n + 1).to(device)) for n in lengths]
    raw = [random_rows(n // ratio, WIDTH, seed=n + 2) for n in lengths]
    picks = [picks_of(n, ratio, n).to(device) for n in lengths]
    sink = random_rows(HEADS, seed=9).to(device)
    seen: dict[tuple[int, int], torch.Tensor] = {}
    for number, steps in enumerate(schedules(lengths)):
        pages = Pages(entry_kind, raw, (32, 4, 1)[number % 3], device, seed=number)
        ring = torch.full((6, RING, *window_kind.shape), 255, dtype=torch.uint8, device=device)
        if not window_kind.packed:
            ring = torch.full(ring.shape, torch.nan, dtype=window_kind.dtype, device=device)
        for work in steps:
            step = work.rows(STATE, device)
            layer = WindowRows(WindowPlan(step, WINDOW, RING), ring, work.take(own), window_kind)
            paged = pages.of([sequence for sequence, _, _ in work.spans])
            out = two_source_attention(work.take(q), layer, paged, work.take(picks), sink, scale)
            layer.store()
            row = 0
            for sequence, first, end in work.spans:
                for position in range(first, end):
                    if (sequence, position) not in seen:
                        chosen = picks[sequence][position].cpu()
                        entries = entry_kind.load(entry_kind.store(raw[sequence]))[chosen[chosen >= 0].long()]
                        rows = torch.cat((window_kind.load(own[sequence][max(0, position - WINDOW + 1) : position + 1]).cpu(), entries))
                        exact = plainly(q[sequence][position].cpu(), rows, sink.cpu(), scale)
                        torch.testing.assert_close(out[row].double().cpu(), exact, rtol=1e-4, atol=1e-5)
                        seen[sequence, position] = out[row]
                    assert torch.equal(seen[sequence, position], out[row])
                    row += 1


def test_all_entries_are_seen_whatever_the_bound(device: str) -> None:
    """Up to three tiles of entries; rows do not notice cuts, mates, pages and how many tiles there might be."""
    lengths, ratio, scale = [150, 5, 41], 1, WIDTH**-0.5
    kind = RowKind(WIDTH, None, False, torch.bfloat16)
    q = [random_rows(n, HEADS, WIDTH, seed=n).to(device) for n in lengths]
    own = [kind.store(random_rows(n, WIDTH, seed=n + 1).to(device)) for n in lengths]
    raw = [random_rows(n, WIDTH, seed=n + 2) for n in lengths]
    sink = random_rows(HEADS, seed=9).to(device)
    seen: dict[tuple[int, int], torch.Tensor] = {}
    for number, steps in enumerate(schedules(lengths)):
        if number == 1:  # one row at a time takes long
            continue
        pages = Pages(kind, raw, (32, 4, 1)[number % 3], device, seed=number)
        ring = torch.full((6, RING, WIDTH), torch.nan, dtype=kind.dtype, device=device)
        for work in steps:
            layer = WindowRows(WindowPlan(work.rows(STATE, device), WINDOW, RING), ring, work.take(own), kind)
            paged = pages.of([sequence for sequence, _, _ in work.spans])
            bound = max(end for _, _, end in work.spans) // ratio + 70 * (number % 2)
            out = full_attention(work.take(q), layer, paged, ratio, bound, sink, scale)
            layer.store()
            row = 0
            for sequence, first, end in work.spans:
                for position in range(first, end):
                    if (sequence, position) not in seen:
                        rows = torch.cat(
                            (own[sequence][max(0, position - WINDOW + 1) : position + 1].cpu(), kind.store(raw[sequence])[: position + 1])
                        )
                        exact = plainly(q[sequence][position].cpu(), rows, sink.cpu(), scale)
                        torch.testing.assert_close(out[row].double().cpu(), exact, rtol=1e-4, atol=1e-5)
                        seen[sequence, position] = out[row]
                    assert torch.equal(seen[sequence, position], out[row])
                    row += 1


def test_before_the_first_entry_only_the_window_counts(device: str) -> None:
    kind = kinds("plain")[0]
    step = Work(((0, 0, 12),)).rows([1], device)
    rows, q = random_rows(12, WIDTH).to(device), random_rows(12, HEADS, WIDTH, seed=1).to(device)
    dirty = PagedRows(torch.full((3, 4, WIDTH), torch.nan, device=device), torch.ones(1, 1, dtype=torch.int32, device=device), kind)
    layer = WindowRows(WindowPlan(step, WINDOW, RING), torch.zeros(2, RING, WIDTH, device=device), rows, kind)
    sink = random_rows(HEADS, seed=2).to(device)
    out = full_attention(q, layer, dirty, 32, 1, sink, 0.3)
    torch.testing.assert_close(out, two_source_attention(q, layer, None, None, sink, 0.3))


def test_packed_and_bfloat16_rows_give_the_same_bits(device: str) -> None:
    raw, entries = random_rows(40, WIDTH), random_rows(20, WIDTH, seed=1)
    q, sink, picks = random_rows(40, HEADS, WIDTH, seed=2).to(device), random_rows(HEADS, seed=3).to(device), picks_of(40, 2, 4).to(device)
    found = []
    for storage in ("packed", "bfloat16"):
        window_kind, entry_kind = kinds(storage)
        step = Work(((0, 0, 40),)).rows([1], device)
        ring = torch.zeros(2, RING, *window_kind.shape, dtype=window_kind.dtype, device=device)
        layer = WindowRows(WindowPlan(step, WINDOW, RING), ring, window_kind.store(raw.to(device)), window_kind)
        found.append(two_source_attention(q, layer, Pages(entry_kind, [entries], 8, device).of([0]), picks, sink, 0.2))
    assert torch.equal(*found)


def test_window_alone_and_nothing_to_see(device: str) -> None:
    """Without entries only the window counts; a row whose window is floored away gives 0 with any sink, also one of −inf."""
    kind = kinds("plain")[0]
    step = Work(((0, 0, 12),)).rows([1], device)
    rows, q = random_rows(12, WIDTH).to(device), random_rows(12, HEADS, WIDTH, seed=1).to(device)
    floor = torch.tensor([0] * 6 + [100] * 6, device=device)
    layer = WindowRows(WindowPlan(step, WINDOW, RING, floor), torch.zeros(2, RING, WIDTH, device=device), rows, kind)
    for sink in (torch.zeros(HEADS), torch.full((HEADS,), -torch.inf), torch.full((HEADS,), 80.0)):
        out = two_source_attention(q, layer, None, None, sink.to(device), 0.3)
        assert not out[6:].any()
        for row in range(6):
            exact = plainly(q[row].cpu(), rows[: row + 1].cpu(), sink, 0.3)
            torch.testing.assert_close(out[row].double().cpu(), exact, rtol=1e-5, atol=1e-6)


def test_entries_that_do_not_exist_may_hold_anything(device: str) -> None:
    """The first tokens of a sequence have no entry: its pages are as the last owner left them."""
    kind = kinds("plain")[0]
    step = Work(((0, 0, 6),)).rows([1], device)
    rows, q = random_rows(6, WIDTH).to(device), random_rows(6, HEADS, WIDTH, seed=1).to(device)
    layer = WindowRows(WindowPlan(step, WINDOW, RING), torch.zeros(2, RING, WIDTH, device=device), rows, kind)
    dirty = PagedRows(torch.full((3, 4, WIDTH), torch.nan, device=device), torch.ones(1, 1, dtype=torch.int32, device=device), kind)
    nothing = torch.full((6, PICKS), -1, dtype=torch.int32, device=device)
    sink = random_rows(HEADS, seed=2).to(device)
    out = two_source_attention(q, layer, dirty, nothing, sink, 0.3)
    torch.testing.assert_close(out, two_source_attention(q, layer, None, None, sink, 0.3))


def test_draft_rows_see_the_ring_and_their_whole_block(device: str) -> None:
    """A block of five rows per sequence attends, both ways, as pages of one block each."""
    kind = kinds("bfloat16")[0]
    history, block = random_rows(2, 20, WIDTH).to(device), random_rows(2, 5, WIDTH, seed=1).to(device)
    ring = torch.zeros(4, RING, WIDTH, dtype=torch.bfloat16, device=device)
    stored, last = kind.store(history), (19, 3)
    for sequence, slot in enumerate((3, 1)):
        for position in range(max(0, last[sequence] + 1 - RING), last[sequence] + 1):
            ring[slot, position % RING] = stored[sequence, position]
    pos = torch.tensor([19] * 5 + [3] * 5, device=device)
    row_seq = torch.tensor([0] * 5 + [1] * 5, device=device)
    step = StepRows(pos, row_seq, torch.tensor([0, 5, 10], device=device), torch.tensor([3, 1], device=device))
    window = WindowRows(WindowPlan(step, WINDOW, RING, own=False), ring, None, kind)
    entries = PagedRows(kind.store(block), torch.arange(2, device=device)[:, None], kind)
    all_five = torch.arange(5, dtype=torch.int32, device=device).expand(10, 5)
    q, sink = random_rows(10, HEADS, WIDTH, seed=2).to(device), random_rows(HEADS, seed=3).to(device)
    out = two_source_attention(q, window, entries, all_five, sink, 0.25)
    for row in range(10):
        sequence = row // 5
        seen = stored[sequence, max(0, last[sequence] - WINDOW + 1) : last[sequence] + 1].float()
        exact = plainly(q[row].cpu(), torch.cat((seen, kind.store(block)[sequence].float())).cpu(), sink.cpu(), 0.25)
        torch.testing.assert_close(out[row].double().cpu(), exact, rtol=1e-4, atol=1e-5)


def test_a_step_without_rows(device: str) -> None:
    """Most chunks of a prompt leave no row to the decoder when prefill is truncated; its rings stay as they are."""
    kind = kinds("packed")[0]
    step = Work(((0, 5, 5), (1, 9, 9))).rows([1, 2], device)
    ring = torch.ones(3, RING, *kind.shape, dtype=torch.uint8, device=device)
    window = WindowRows(WindowPlan(step, WINDOW, RING), ring, kind.store(torch.zeros(0, WIDTH, device=device)), kind)
    out = two_source_attention(torch.zeros(0, HEADS, WIDTH, device=device), window, None, None, torch.zeros(HEADS, device=device), 0.1)
    window.store()
    assert out.shape == (0, HEADS, WIDTH) and bool((ring == 1).all())
