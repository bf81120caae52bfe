"""Windows over rows of which the newest are in the step and the older ones in a ring addressed by ``position mod R``.

Place ``c`` of a row at position ``t`` is position ``t - W + 1 + c``. It is read from the step's own rows of that sequence if it is among
them, else from the ring; positions below 0 or below the row's floor do not exist: they read zeros and are masked. Where a
row is read from does not change its value, so neither does the cut into chunks.

Where everything lies depends on positions only: one ``WindowPlan`` serves every layer of a step.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from ..cache_rows import RowKind, StepRows


class WindowPlan:
    """Places of every row's window; integers on the device, made once a step.

    Args:
        step: the rows.
        window: ``W``, positions a row sees, its own included.
        ring: ``R``, places of the ring, at least ``W`` (``W - 1`` are enough if ``own``).
        floor: int64 ``[T]``, first position that exists for the row (a restart without older rows, a truncated prefill); None = 0.
        own: False if windows come from the ring alone. Then the rows of a sequence share one position, their windows' last.
    """

    def __init__(self, step: StepRows, window: int, ring: int, floor: torch.Tensor | None = None, own: bool = True) -> None:
        reach = window - 1 if own else window  # rows before the step that its first row may see
        if window < 1 or ring < reach:
            raise ValueError(f"a ring of {ring} rows cannot hold the {reach} rows before a step that windows of {window} rows read")
        self.step, self.window, self.ring, self.reach, self.own = step, window, ring, reach, own
        device = step.pos.device
        rows, sequences = step.rows if own else 0, step.sequences
        start = step.start if own else step.start + 1
        back = torch.arange(reach, device=device) - reach
        self._history_place = (start[:, None] + back) % ring
        position = step.pos[:, None] + (torch.arange(window, device=device) - (window - 1))
        row_start = start.index_select(0, step.row_seq)[:, None]
        past = position - row_start  # ≥ 0: among the step's rows
        first = step.first_row.index_select(0, step.row_seq)[:, None]
        history = rows + step.row_seq[:, None] * reach + (past + reach).clamp(0, max(reach - 1, 0))
        index = torch.where(past >= 0, (first + past).clamp_max(max(rows - 1, 0)), history) if own else history
        exists = position >= 0
        if floor is not None:
            exists &= position >= floor[:, None]
        self.mask = exists
        """bool ``[T, W]``: whether the position exists."""
        self.index = torch.where(exists, index, rows + sequences * reach)
        """int64 ``[T, W]``: row of ``assemble``."""

    def assemble(self, ring: torch.Tensor, rows: torch.Tensor | None, kind: RowKind | None = None) -> torch.Tensor:
        """Every row a window of this step may read: the step's, then ``reach`` older ones of each sequence, then one of zeros.

        ``ring`` ``[slots, R, ...]`` (any strides) and ``rows`` ``[T, ...]`` (None unless ``own``) of one dtype; loaded by ``kind``, or
        kept as they are. ``[T + n * reach + 1, ...]``.
        """
        older = ring[self.step.state_row[:, None], self._history_place].flatten(0, 1)
        parts = [older] if rows is None else [rows, older]
        values = torch.cat(parts) if kind is None else torch.cat([kind.load(part) for part in parts])
        return torch.cat((values, values.new_zeros((1, *values.shape[1:]))))

    @cached_property
    def _targets(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.step.ring_places(self.ring)

    def store(self, ring: torch.Tensor, rows: torch.Tensor) -> None:
        """Writes the newest ``R`` rows of every sequence to ``ring`` ``[slots, R, ...]``; ``rows`` ``[T, ...]`` of its dtype."""
        ring[self._targets] = rows


@dataclass(frozen=True)
class WindowRows:
    """One layer's window rows: the step's (stored form, ``[T, *kind.shape]``) and those of the ring ``[slots, R, *kind.shape]``."""

    plan: WindowPlan
    ring: torch.Tensor
    rows: torch.Tensor | None
    """None if windows come from the ring alone."""
    kind: RowKind

    @cached_property
    def _values(self) -> torch.Tensor:
        return self.plan.assemble(self.ring, self.rows, self.kind)

    def gather(self, first: int, last: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Windows of rows ``first … last - 1``: float32 ``[last - first, W, width]`` and which exist, bool ``[last - first, W]``.

        Positions that do not exist are zeros. Read before ``store``: afterwards the ring holds newer rows.
        """
        index = self.plan.index[first:last]
        values = self._values.index_select(0, index.flatten()).view(*index.shape, self.kind.width)
        return values, self.plan.mask[first:last]

    def store(self) -> None:
        """Keeps the step's newest rows of each sequence in the ring."""
        if self.rows is None:
            raise ValueError("there are no rows of the step to store")
        self._values  # noqa: B018 (windows are of the time before)
        self.plan.store(self.ring, self.rows)
