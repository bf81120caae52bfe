"""What the host did not know when it planned a step, filled in on the device from the preceding step's result.

A step may be planned while the one before it runs. A sequence that draws its newest token there has `prev_seq[i] ≥ 0`, its first id
is a placeholder (negative) for the token of its last sampling row there, and its positions are those it reaches if every one of its
rows there is accepted. With drafts fewer may be: `short` rows were not, so that positions fall by `short`, the id is the token `short`
rows earlier, and KV slots are computed anew. Tensor operations only, nothing is read on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class SlotMap:
    """One slot array: ``entries`` of a page of ``page_tokens`` tokens, pages in the block table from ``column`` on."""

    column: int
    page_tokens: int
    entries: int


@dataclass(frozen=True)
class StepTokens:
    """What a step leaves on the device for the next one.

    ``tokens`` int32 ``[r]`` by sampling row. With draft rows also ``sample_off`` int32 ``[n + 1]`` and ``accepted`` int32 ``[n]``;
    without, every sampling row produced its token and both are ``None``.
    """

    tokens: torch.Tensor
    sample_off: torch.Tensor | None = None
    accepted: torch.Tensor | None = None


@dataclass
class StepRows:
    """A step's rows on the device, as planned; :func:`resolve` replaces what was not known.

    ``ids`` int32 or int64 ``[T]``; ``pos`` int64 ``[T]``; ``slots`` one int64 ``[T]`` per slot map; ``seq_len`` int32 ``[n]``;
    ``rng_pos`` int64 ``[R]``; ``table`` int32 ``[n, W]``, the sequences' rows of the block table with this step's deltas applied.
    """

    ids: torch.Tensor
    pos: torch.Tensor
    slots: list[torch.Tensor]
    seq_len: torch.Tensor
    rng_pos: torch.Tensor
    table: torch.Tensor


def kv_slots(pos: torch.Tensor, table: torch.Tensor, row: torch.Tensor, of: SlotMap) -> torch.Tensor:
    """KV slot int64 ``[T]`` of positions int64 ``[T]`` of table rows int64 ``[T]``; −1 where a position completes no entry."""
    ratio = of.page_tokens // of.entries
    page = table[row, of.column + pos // of.page_tokens].long()
    slot = page * of.entries + pos % of.page_tokens // ratio
    return torch.where((pos + 1) % ratio == 0, slot, -1)


def resolve(
    rows: StepRows,
    before: StepTokens | None,
    prev_seq: torch.Tensor,
    source: torch.Tensor,
    cu_q: torch.Tensor,
    sample_off: torch.Tensor,
    maps: Sequence[SlotMap],
    in_order: bool = False,
) -> None:
    """Replaces placeholders, and shifts positions where drafts of the preceding step were rejected.

    Args:
        rows: changed in place.
        before: the preceding step's result; ``None`` when it failed: ids become 0, and what depends on them has ended.
        prev_seq: int32 ``[n]``, index of each sequence in the preceding step, −1 = nothing to resolve.
        source: int32 ``[n]``, last sampling row of each sequence in the preceding step; not read where ``prev_seq`` is −1.
        cu_q: int32 ``[n + 1]``; ``sample_off`` int32 ``[n + 1]``.
        maps: one per entry of ``rows.slots``.
        in_order: each sequence has one row, all are unresolved and ``source`` is 0, 1, 2, …: the usual step while all decode. Without
            drafts before it what was drawn is then taken as it is, which costs no operation.
    """
    if before is None or not before.tokens.numel():
        rows.ids = rows.ids.clamp(min=0)
        return
    if before.accepted is None or before.sample_off is None:
        if in_order:
            rows.ids = before.tokens[: len(rows.ids)]
            return
        _fill_ids(rows, before.tokens, prev_seq, source, cu_q)
        return
    offsets = before.sample_off
    rejected = offsets[1:] - offsets[:-1] - before.accepted
    short = torch.where(prev_seq >= 0, rejected[prev_seq.long().clamp(min=0)], 0).clamp(min=0)
    _fill_ids(rows, before.tokens, prev_seq, source - short, cu_q)
    rows.seq_len = rows.seq_len - short
    short = short.long()
    row = owner(cu_q, rows.ids.shape[0])
    fall = short[row]
    rows.pos = rows.pos - fall
    rows.rng_pos = rows.rng_pos - short[owner(sample_off, rows.rng_pos.shape[0])]
    rows.slots = [torch.where(fall > 0, kv_slots(rows.pos, rows.table, row, of), slots) for slots, of in zip(rows.slots, maps, strict=True)]


def _fill_ids(rows: StepRows, tokens: torch.Tensor, prev_seq: torch.Tensor, source: torch.Tensor, cu_q: torch.Tensor) -> None:
    drawn = tokens.index_select(0, source.clamp(0, len(tokens) - 1)).to(rows.ids.dtype)
    if len(prev_seq) == len(rows.ids):  # one row each: the sequences are the rows
        rows.ids = torch.where(prev_seq >= 0, drawn, rows.ids)
        return
    first = cu_q[:-1].long()
    rows.ids = rows.ids.index_copy(0, first, torch.where(prev_seq >= 0, drawn, rows.ids[first]))


def owner(offsets: torch.Tensor, count: int) -> torch.Tensor:
    """Index int64 ``[count]`` of the sequence that each row belongs to."""
    return torch.searchsorted(offsets[1:], torch.arange(count, dtype=offsets.dtype, device=offsets.device), right=True)
