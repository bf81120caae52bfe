"""Lightning indexer of DeepSeek-V4.1: ``I(t, j) = sum_h w_h relu(q_h · k_j)`` over the entries a row may see, and selections by it.

A row at position ``t`` sees entries ``j < (t + 1) // ratio``. Scores are float32; a higher score comes first and equal ones (the relu makes
exact zeros) go to the lower entry. Two levels: one layer also picks the best blocks of neighbouring entries for every row, and
later layers select within them.

Rows of a sequence are computed in tiles of up to 16 that share the keys they read; which tile belongs to which sequence is
found on the device. A score is a product of fixed depth and a sum over heads in a fixed tree, so no tile changes its bits
(``census`` checks what that takes of the library).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..cache_rows import PagedRows, StepRows
from ..paged_attention import row_quantum, tree_sum
from ..ragged_tiles import ragged_tiles
from ..top_k import top_k
from .census import ROW_TILE, row_tile

_SELECT_AT_ONCE = 1 << 24  # scores of whole rows held at once


def _sizes(device: torch.device) -> tuple[int, int]:
    """Keys read at once, and scores per head computed at once: both bound memory, on a CPU to what its cache holds."""
    return (512, 1 << 20) if device.type == "cpu" else (4096, 1 << 27)


def _row_tiles(step: StepRows, most: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tiles of rows of one sequence: rows int64 ``[m, r]`` (``T`` where the tile has none) and the sequence ``[m]``.

    ``r ≤ most``; ``m`` is a bound from host sizes; tiles beyond the needed ones are empty.
    """
    total, sequences, device = step.rows, step.sequences, step.pos.device
    size = 1
    while size < most and 2 * size * sequences <= total:
        size *= 2
    if size == 1:
        return torch.arange(total, device=device)[:, None], step.row_seq
    row, real, sequence = ragged_tiles(step.first_row, step.end_row, size, total // size + sequences)
    return torch.where(real, row, total), sequence


def _tile_scores(q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """``q`` ``[m, r, h, di]``, ``weights`` ``[m, r, h]``, ``keys`` ``[m, E, di]`` → ``[m, r, E]``."""
    m, r, h, depth = q.shape
    quantum = row_quantum(q.device)
    left = q.reshape(m, r * h, depth)
    left = F.pad(left, (0, 0, 0, -(r * h) % quantum))
    dots = torch.bmm(left, keys.transpose(1, 2))[:, : r * h].relu_().view(m, r, h, -1)
    return tree_sum(dots.mul_(weights.unsqueeze(-1)), 2)


def visible_entries(step: StepRows, ratio: int) -> torch.Tensor:
    """int64 ``[T]``: entries that each row may see."""
    return torch.div(step.pos + 1, ratio, rounding_mode="floor")


def index_scores(q: torch.Tensor, weights: torch.Tensor, keys: PagedRows, step: StepRows, ratio: int, bound: int) -> torch.Tensor:
    """Scores float32 ``[T, bound]`` of entries ``0 … bound - 1`` of each row's sequence, −inf for those it may not see.

    ``q`` ``[T, h, di]`` and ``weights`` ``[T, h]`` of any float dtype (rotated, rounded and scaled by the caller), ``keys`` of width
    ``di``, ``bound`` at least the largest number of visible entries. Memory grows with ``T * bound``: see ``select_entries``.
    """
    rows, sequence = _row_tiles(step, row_tile(q.device, *q.shape[1:]))
    out = q.new_full((step.rows + 1, bound), -torch.inf, dtype=torch.float32)  # the last row takes what tiles lack
    q, weights = q.float(), weights.float()
    most_keys, most_scores = _sizes(q.device)
    entry_tile = min(most_keys, -(-bound // 64) * 64)
    at_once = max(1, most_scores // (entry_tile * q.shape[1] * rows.shape[1]))
    for first in range(0, rows.shape[0], at_once):
        tile, owner = rows[first : first + at_once], sequence[first : first + at_once, None]
        source = tile.clamp_max(step.rows - 1).flatten()
        tile_q = q.index_select(0, source).unflatten(0, tile.shape)
        tile_w = weights.index_select(0, source).unflatten(0, tile.shape)
        for begin in range(0, bound, entry_tile):
            entry = torch.arange(begin, begin + entry_tile, device=q.device).expand(tile.shape[0], -1)
            scores = _tile_scores(tile_q, tile_w, keys.gather(owner, entry)).flatten(0, 1)
            part = out[:, begin : begin + entry_tile]
            part.index_copy_(0, tile.flatten(), scores[:, : part.shape[1]])
    hidden = torch.arange(bound, device=q.device) >= visible_entries(step, ratio)[:, None]
    return out[: step.rows].masked_fill_(hidden, -torch.inf)


def candidate_blocks(scores: torch.Tensor, step: StepRows, ratio: int, block: int, keep: int) -> torch.Tensor:
    """The ``keep`` blocks of ``block`` entries with the highest best score: bool ``[T, ⌈n / block⌉]`` for ``scores`` ``[T, n]``.

    The block of a row's newest entry is always in, blocks without a visible entry never; equal scores: the lower block.
    """
    blocks = -(-scores.shape[1] // block)
    best = F.pad(scores, (0, blocks * block - scores.shape[1]), value=-torch.inf).unflatten(1, (blocks, block)).amax(-1)
    visible = visible_entries(step, ratio)[:, None]
    number = torch.arange(blocks, device=scores.device)
    newest = torch.div(visible - 1, block, rounding_mode="floor")
    best = torch.where((number == newest) & (visible > 0), torch.inf, best)
    chosen = best > -torch.inf
    if blocks <= keep:
        return chosen
    return torch.zeros_like(chosen).scatter_(1, top_k(best, keep), True) & chosen


def _spread(blocks: torch.Tensor, block: int, entries: int) -> torch.Tensor:
    """bool ``[T, m]`` of blocks → ``[T, entries]`` of their entries."""
    return blocks.repeat_interleave(block, 1)[:, :entries]


def _listed(place: torch.Tensor, entries: int, k: int) -> torch.Tensor:
    """Places below ``entries``, ascending, then −1: int32 ``[T, k]``."""
    place = place.sort(-1).values
    return F.pad(torch.where(place < entries, place, -1).to(torch.int32), (0, k - place.shape[1]), value=-1)


def select_top(scores: torch.Tensor, k: int, blocks: torch.Tensor | None = None, block: int = 1) -> torch.Tensor:
    """Entries with the ``k`` highest scores of each row: int32 ``[T, k]``, ascending, −1 behind; equal scores: the lower entry.

    Entries of −inf are never selected, nor those outside ``blocks`` (bool ``[T, m]``, of ``block`` entries each) if given.
    """
    entries = scores.shape[1]
    if blocks is not None:
        scores = scores.masked_fill(~_spread(blocks, block, entries), -torch.inf)
    place = top_k(scores, min(k, entries))
    return _listed(place.masked_fill_(scores.gather(1, place) == -torch.inf, entries), entries, k)


def select_entries(
    q: torch.Tensor,
    weights: torch.Tensor,
    keys: PagedRows,
    step: StepRows,
    ratio: int,
    bound: int,
    k: int,
    block: int = 1,
    keep: int | None = None,
    blocks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Scores, candidate blocks and selection of a step, some rows at a time so that memory is bounded.

    With ``keep`` the ``candidate_blocks`` of every row are given, too, of ``block`` entries each; with ``blocks`` the selection is
    restricted to them. Other arguments as for ``index_scores`` and ``select_top``; ``bound ≥ 1``. Gives (int32 ``[T, k]``, blocks or None).

    As long as there are no more than ``k`` entries every visible one is selected, and no score is computed; likewise blocks.
    """
    columns = -(-bound // block)
    if bound <= k and (keep is None or columns <= keep):
        visible = visible_entries(step, ratio)[:, None]
        entry = torch.arange(bound, device=q.device)
        seen = entry < visible
        if blocks is not None:
            seen &= _spread(blocks, block, bound)
        pool = None if keep is None else torch.arange(0, columns * block, block, device=q.device) < visible
        return _listed(torch.where(seen, entry, bound), bound, k), pool
    selected, pools = [], []
    at_once = max(ROW_TILE, _SELECT_AT_ONCE // bound)
    for first in range(0, max(step.rows, 1), at_once):
        part = step.part(first, min(first + at_once, step.rows))
        rows = slice(first, first + part.rows)
        scores = index_scores(q[rows], weights[rows], keys, part, ratio, bound)
        if keep is not None:
            pools.append(candidate_blocks(scores, part, ratio, block, keep))
        selected.append(select_top(scores, k, None if blocks is None else blocks[rows], block))
    return torch.cat(selected), torch.cat(pools) if pools else None
