"""``begin_step`` with torch operations. Nothing is read on the host, so that it may be recorded; every number is whole."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .words import DELTAS, IDS, ROWS, SEQ_LEN, SLOTS, SOURCE, StepWords


@dataclass(frozen=True)
class DecodeFields:
    """What ``begin_step`` writes, for up to ``stride`` rows.

    Attributes:
        wide: int64 ``[3 + maps, stride]``: ids, positions, table rows, then the slots of each map.
        seq_len: int32 ``[stride]``.
        place: int32 ``[max(stride, max_deltas)]``, 0, 1, 2, …
        padding: int32 ``[5 + maps, 1]``, what a row of padding has in each field of the step's words.
    """

    wide: torch.Tensor
    seq_len: torch.Tensor
    place: torch.Tensor
    padding: torch.Tensor

    @classmethod
    def make(cls, layout: StepWords, device: torch.device) -> DecodeFields:
        """Fields of padding: id 0 at position 0, length 1, table row 0, slot 0 of each map."""
        padding = torch.zeros((layout.num_fields, 1), dtype=torch.int32)
        padding[SOURCE], padding[SEQ_LEN] = -1, 1
        return cls(
            wide=torch.zeros((layout.num_fields - IDS, layout.stride), dtype=torch.int64, device=device),
            seq_len=torch.ones(layout.stride, dtype=torch.int32, device=device),
            place=torch.arange(max(layout.stride, layout.max_deltas), dtype=torch.int32, device=device),
            padding=padding.to(device),
        )


def begin_step(
    words: torch.Tensor, layout: StepWords, newest: torch.Tensor, table: torch.Tensor, to: DecodeFields, rows: int, deltas: int
) -> None:
    """Stores a step's table deltas and writes its rows, padded to ``rows``, into ``to``.

    How many of the rows and deltas are the step's own is in the head of the block. Deltas beyond them store page 0 in the table's first
    cell, the null page of the null slot, which holds it anyway. A slot of −1 ("writes nothing") becomes 0.

    Args:
        words: int32 ``[layout.total]``, the step's block.
        newest: int32 ``[m]``, tokens that the step before it drew, by its sampling rows.
        table: int32 ``[state slots, W]``, contiguous; changed in place.
        to: written in its first ``rows`` places, the others are left.
        rows: at least the step's rows; ``deltas``: at least its deltas, at most ``layout.max_deltas``. Plain numbers, fixed when a step is
            recorded.
    """
    if deltas:
        own = to.place[:deltas].unsqueeze(1) < words[DELTAS]
        cells = torch.where(own, layout.deltas(words)[:deltas], 0)
        flat = cells[:, 0].long() * table.shape[1] + cells[:, 1]
        table.view(-1).index_copy_(0, flat, cells[:, 2])
    known = torch.where(to.place[:rows] < words[ROWS], layout.fields(words)[:, :rows], to.padding)
    drawn = newest.index_select(0, known[SOURCE].clamp_min(0))
    to.seq_len[:rows].copy_(known[SEQ_LEN])
    to.wide[:, :rows].copy_(known[IDS:])
    to.wide[0, :rows].copy_(torch.where(known[SOURCE] >= 0, drawn, known[IDS]))
    to.wide[SLOTS - IDS :, :rows].clamp_min_(0)
