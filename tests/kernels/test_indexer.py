"""Index scores, candidate blocks and selections against plain loops; ties, needles, and bits under every cut, batch and page."""

from __future__ import annotations

import pytest
import torch

from deepinfer.kernels.block_formats import MXFP4_ROWS
from deepinfer.kernels.cache_rows import RowKind
from deepinfer.kernels.indexer import candidate_blocks, index_scores, safe_row_tile, select_entries, select_top
from deepinfer.kernels.top_k import top_k
from ragged_kit import Pages, Work, schedules

HEADS, WIDTH = 16, 32
KINDS = {
    "packed": RowKind(WIDTH, MXFP4_ROWS, True, torch.uint8),
    "bfloat16": RowKind(WIDTH, MXFP4_ROWS, False, torch.bfloat16),
    "plain": RowKind(WIDTH, None, False, torch.float32),
}


def random_rows(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def plain_selection(scores: list[float], k: int) -> list[int]:
    """Best first by score, equal ones by place; ascending, padded."""
    best = sorted((place for place, score in enumerate(scores) if score > float("-inf")), key=lambda place: (-scores[place], place))[:k]
    return sorted(best) + [-1] * (k - len(best))


def plain_blocks(scores: list[float], visible: int, block: int, keep: int) -> list[bool]:
    blocks = -(-len(scores) // block)
    best = [max(scores[b * block : (b + 1) * block]) for b in range(blocks)]
    if visible:
        best[(visible - 1) // block] = float("inf")
    kept = [place for place in plain_selection(best, keep) if place >= 0]
    return [b in kept for b in range(blocks)]


def test_equal_numbers_go_by_their_place(device: str) -> None:
    row = [0.0, 2.0, -0.0, 2.0, float("-inf"), 0.0, 3.5, -1e-40, 1e-40, float("inf"), -3.0]
    scores = torch.tensor([row, row[::-1]], device=device)
    for k in range(1, 12):
        found = top_k(scores, k).tolist()
        for number, values in enumerate((row, row[::-1])):
            assert found[number] == sorted(range(11), key=lambda place: (-values[place], place))[:k]


@pytest.mark.parametrize("ratio", [1, 2])
@pytest.mark.parametrize("name", KINDS)
def test_scores_and_selections_do_not_depend_on_cuts_mates_and_pages(name: str, ratio: int, device: str) -> None:
    """Values against float64 loops once, then bits of every way to run them against the first."""
    kind, lengths, k, block, keep = KINDS[name], [90, 9, 41], 6, 4, 5
    rounded = RowKind(WIDTH, kind.form, False, torch.float32)
    dtype = kind.dtype if name == "bfloat16" else torch.float32
    q = [rounded.store(random_rows(n, HEADS, WIDTH, seed=n)).to(device=device, dtype=dtype) for n in lengths]
    w = [random_rows(n, HEADS, seed=n + 1).to(device) for n in lengths]
    raw = [random_rows(n // ratio, WIDTH, seed=n + 2) for n in lengths]
    keys = [kind.load(kind.store(rows)).to(device) for rows in raw]
    seen: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}
    for number, steps in enumerate(schedules(lengths)):
        pages = Pages(kind, raw, (64 // ratio, 8, 1, 3)[number % 4], device, seed=number)
        for work in steps:
            step = work.rows([1, 2, 3], device)
            bound = max(max((end for _, _, end in work.spans)) // ratio, 1) + number % 3 * 50
            paged = pages.of([sequence for sequence, _, _ in work.spans])
            step_q, step_w = work.take(q), work.take(w)
            scores = index_scores(step_q, step_w, paged, step, ratio, bound)
            selected, pool = select_entries(step_q, step_w, paged, step, ratio, bound, k, block, keep)
            within, none = select_entries(step_q, step_w, paged, step, ratio, bound, k, block, blocks=pool)
            assert pool is not None and none is None
            row = 0
            for sequence, first, end in work.spans:
                for position in range(first, end):
                    visible = (position + 1) // ratio
                    assert (scores[row, visible:] == -torch.inf).all()
                    got = (scores[row, :visible], selected[row], within[row])
                    if (sequence, position) not in seen:
                        dots = torch.einsum("hd,nd->hn", q[sequence][position].double(), keys[sequence][:visible].double()).relu()
                        exact = (w[sequence][position].double()[:, None] * dots).sum(0)
                        torch.testing.assert_close(got[0].double(), exact, rtol=1e-4, atol=1e-4)
                        values = got[0].tolist()
                        kept = plain_blocks(values, visible, block, keep)
                        assert pool[row].tolist() == kept + [False] * (pool.shape[1] - len(kept))
                        assert got[1].tolist() == plain_selection(values, k)
                        inside = [v if kept[place // block] else float("-inf") for place, v in enumerate(values)]
                        assert got[2].tolist() == plain_selection(inside, k)
                        seen[sequence, position] = got
                    assert all(torch.equal(a, b) for a, b in zip(seen[sequence, position], got, strict=True))
                    row += 1


def test_exact_ties_go_to_the_lower_entry(device: str) -> None:
    """Keys against every head score exactly 0: among those the first are selected, after the few that are above."""
    keys = -torch.ones(300, WIDTH)
    keys[[37, 200]] = 1.0
    pages = Pages(KINDS["packed"], [keys], 16, device)
    step = Work(((0, 250, 300),)).rows([1], device)
    q = torch.ones(50, HEADS, WIDTH, device=device)
    scores = index_scores(q, torch.ones(50, HEADS, device=device), pages.of([0]), step, 1, 300)
    for row, found in enumerate(select_top(scores, 5).tolist()):
        assert scores[row, :251].unique().tolist() == [0.0, HEADS * WIDTH]
        assert found == [0, 1, 2, 37, 200]
    negative = index_scores(q, -torch.ones(50, HEADS, device=device), pages.of([0]), step, 1, 300)
    assert select_top(negative, 5).tolist() == [[0, 1, 2, 3, 4]] * 50  # −0 is no less than 0, and the two below are last
    assert candidate_blocks(scores, step, 1, 4, 3)[0].nonzero().flatten().tolist() == [9, 50, 62]
    tied = torch.zeros(1, 300, device=device)
    last = Work(((0, 299, 300),)).rows([1], device)
    assert candidate_blocks(tied, last, 1, 4, 3)[0].nonzero().flatten().tolist() == [0, 1, 74]


def test_few_entries_are_all_selected_without_scores(device: str) -> None:
    """The short cut gives what scores would."""
    pages = Pages(KINDS["plain"], [random_rows(20, WIDTH)], 4, device)
    q, w = random_rows(20, HEADS, WIDTH, seed=1).to(device), random_rows(20, HEADS, seed=2).to(device)
    step = Work(((0, 0, 20),)).rows([1], device)
    slow, slow_pool = select_entries(q, w, pages.of([0]), step, 1, 26, 24, 4, 100)
    fast, fast_pool = select_entries(q, w, pages.of([0]), step, 1, 20, 24, 4, 100)
    assert torch.equal(slow, fast) and slow_pool is not None and fast_pool is not None
    assert torch.equal(slow_pool[:, :5], fast_pool) and not slow_pool[:, 5:].any()
    some = fast_pool.clone()
    some[:, 1] = False
    slow, _ = select_entries(q, w, pages.of([0]), step, 1, 26, 24, 4, blocks=torch.nn.functional.pad(some, (0, 2)))
    fast, _ = select_entries(q, w, pages.of([0]), step, 1, 20, 24, 4, blocks=some)
    assert torch.equal(slow, fast) and fast[19].tolist() == [0, 1, 2, 3, *range(8, 20)] + [-1] * 8


def test_tiles_shrink_where_a_library_mixes_bits(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """A product that computes many rows in another order is found by the census; the tiles it leaves keep the bits."""
    from deepinfer.kernels.indexer import census

    where, real = torch.device(device), torch.bmm
    assert safe_row_tile(where, HEADS, WIDTH) == 16
    quantum = census.row_quantum(where)

    def moody(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        out = real(a, b)
        return out * (1 + 1e-6) if a.shape[1] > 4 * max(HEADS, quantum) else out

    monkeypatch.setattr(census, "_found", {})
    monkeypatch.setattr(torch, "bmm", moody)
    found = safe_row_tile(where, HEADS, WIDTH)
    assert found == 4 * max(HEADS, quantum) // HEADS
    pages = Pages(KINDS["plain"], [random_rows(64, WIDTH)], 16, device)
    q, w = random_rows(64, HEADS, WIDTH, seed=1).to(device), random_rows(64, HEADS, seed=2).to(device)
    step = Work(((0, 0, 64),)).rows([1], device)
    tiled = index_scores(q, w, pages.of([0]), step, 1, 64)
    assert torch.equal(tiled[63:], index_scores(q[63:], w[63:], pages.of([0]), step.part(63, 64), 1, 64))


def test_a_step_without_rows_selects_nothing(device: str) -> None:
    """Most chunks of a prompt leave no row to the decoder when prefill is truncated."""
    pages = Pages(KINDS["plain"], [random_rows(64, WIDTH)], 16, device)
    step = Work(((0, 5, 5),)).rows([1], device)
    q, w = torch.zeros(0, HEADS, WIDTH, device=device), torch.zeros(0, HEADS, device=device)
    selected, pool = select_entries(q, w, pages.of([0]), step, 1, 64, 5, 4, 6)
    assert selected.shape == (0, 5) and pool is not None and pool.shape == (0, 16)
