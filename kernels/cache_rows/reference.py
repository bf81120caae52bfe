"""Rows of a step, rows of a cache, and how the second are read for the first.

A row is made in its stored form once (``RowKind.store``) and kept so in the step, in rings and on pages: rounding an already
rounded row again may move it (scales at their least value), reading it never does.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch

from ..block_formats import RowFormat, decode_rows, encode_rows, fake_quantise


@dataclass(frozen=True)
class RowKind:
    """Rows of one width: their rounding (None = none) and how they are kept."""

    width: int
    form: RowFormat | None
    packed: bool
    dtype: torch.dtype
    """uint8 records when packed."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one row in the cache."""
        return (self.form.record_bytes(self.width),) if self.packed and self.form is not None else (self.width,)

    @property
    def nbytes(self) -> int:
        """Of one row."""
        return prod(self.shape) * self.dtype.itemsize

    def store(self, x: torch.Tensor) -> torch.Tensor:
        """``[..., width]`` of any float dtype → ``[..., *shape]`` in ``dtype``, rounded to ``form`` once."""
        if self.form is None:
            return x.to(self.dtype)
        return encode_rows(x, self.form) if self.packed else fake_quantise(x, self.form).to(self.dtype)

    def load(self, rows: torch.Tensor) -> torch.Tensor:
        """``[..., *shape]`` → float32 ``[..., width]``; the same numbers from packed, bfloat16 and float32 rows."""
        if self.packed and self.form is not None:
            return decode_rows(rows, self.form, self.width)
        return rows.float()


@dataclass(frozen=True)
class StepRows:
    """``T`` rows of ``n`` sequences: rows ``cu_q[i] … cu_q[i + 1] - 1`` belong to sequence ``i``, at successive positions.

    Rows from ``cu_q[n]`` on are padding: what is computed for them is not read, and they are not stored.
    """

    pos: torch.Tensor
    """int64 ``[T]``: position in the sequence."""
    row_seq: torch.Tensor
    """int64 ``[T]``: the sequence, in ``0 … n - 1`` also for padding."""
    cu_q: torch.Tensor
    """integer ``[n + 1]``."""
    state_row: torch.Tensor
    """int64 ``[n]``: the sequence's state slot; slot 0 is null and may be written with anything."""

    @property
    def rows(self) -> int:
        """``T``."""
        return self.pos.shape[0]

    @property
    def sequences(self) -> int:
        """``n``."""
        return self.state_row.shape[0]

    @cached_property
    def first_row(self) -> torch.Tensor:
        """int64 ``[n]``: a sequence's first row in the step."""
        return self.cu_q[:-1].long()

    @cached_property
    def end_row(self) -> torch.Tensor:
        """int64 ``[n]``: the row after a sequence's last one."""
        return self.cu_q[1:].long()

    @cached_property
    def start(self) -> torch.Tensor:
        """int64 ``[n]``: position of a sequence's first row; without rows anything."""
        return self.pos.index_select(0, self.first_row.clamp_max(max(self.rows - 1, 0))) if self.rows else torch.zeros_like(self.state_row)

    @cached_property
    def newest(self) -> torch.Tensor:
        """int64 ``[T]``: how many rows of its sequence follow a row; negative for padding."""
        row = torch.arange(self.rows, device=self.pos.device)
        behind = self.end_row.index_select(0, self.row_seq) - 1 - row
        return torch.where(row < self.end_row[-1], behind, -1)

    def ring_places(self, places: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Slot and place of every row in rings of ``places`` rows, int64 ``[T]``; rows that newer ones overwrite go to the null slot."""
        kept = (self.newest >= 0) & (self.newest < places)
        return torch.where(kept, self.state_row.index_select(0, self.row_seq), 0), self.pos % places

    def part(self, first: int, end: int) -> StepRows:
        """Rows ``first … end - 1`` alone, for operators that work on some rows at a time."""
        cu_q = (self.cu_q.long() - first).clamp(0, end - first)
        return StepRows(self.pos[first:end], self.row_seq[first:end], cu_q, self.state_row)


@dataclass(frozen=True)
class PagedRows:
    """Entries of the step's sequences on pages: ``tensor`` ``[pages, e, *kind.shape]``, ``block_table`` integer ``[n, W]``."""

    tensor: torch.Tensor
    block_table: torch.Tensor
    kind: RowKind

    def gather(self, sequence: torch.Tensor, entry: torch.Tensor) -> torch.Tensor:
        """float32 ``[..., width]`` of entries ``entry`` (int64, any shape) of ``sequence`` (broadcast against it).

        Entries that do not exist may be asked for: they read some row of the tensor, whose values mean nothing.
        """
        pages, per_page = self.tensor.shape[:2]
        table = self.block_table
        page_column = torch.div(entry, per_page, rounding_mode="floor").clamp(0, table.shape[1] - 1)
        place = (sequence * table.shape[1] + page_column).flatten()
        page = table.reshape(-1).index_select(0, place).long().clamp(0, pages - 1)
        flat = page * per_page + entry.flatten() % per_page
        rows = self.tensor.reshape(pages * per_page, -1).index_select(0, flat)
        return self.kind.load(rows).view(*entry.shape, self.kind.width)
