"""Pooling of long or overlapping windows, computed for the windows that end in a step alone (DeepSeek-V4's compressors).

Window ``j`` has the tokens ``j r … j r + r - 1``. Its entry is ``sum_t softmax_t(z_t) c_t`` per channel, float32, over these tokens, or,
where windows overlap, over twice as many: then ``c`` and ``z`` have two halves, and an entry pools the second halves of its own tokens
and the first halves of those of window ``j - 1`` (the first window has none before it).

How many windows end in a step is known on the device only. There are at most ``T // r + n`` of them: so many are computed, and those
there are not go nowhere.
"""

from __future__ import annotations

from functools import cached_property

import torch

from ..cache_rows import StepRows
from ..paged_attention import tree_sum


class PoolPlan:
    """The windows that end in a step, and where the rows they pool lie; made once for all layers of one ``ratio``.

    Args:
        step: the rows.
        ratio: ``r``, tokens of a window.
        overlap: whether an entry pools the window before it, too.
        places: of the rings that raw rows are kept in, at least the pooled rows less one. A step may write as many rows that are taken
            back later as there are places beyond that.
    """

    def __init__(self, step: StepRows, ratio: int, overlap: bool, places: int) -> None:
        pooled = 2 * ratio if overlap else ratio
        if ratio < 1 or places < pooled - 1:
            raise ValueError(f"rings of {places} rows cannot hold the {pooled - 1} rows before a step that entries of {pooled} rows pool")
        self.step, self.ratio, self.overlap, self.places = step, ratio, overlap, places
        device, most = step.pos.device, step.rows // ratio + step.sequences
        begun = torch.div(step.start, ratio, rounding_mode="floor")  # windows that ended before the step
        ended = torch.div(step.start + step.end_row - step.first_row, ratio, rounding_mode="floor")
        until = (ended - begun).cumsum(0)
        number = torch.arange(most, device=device)
        sequence = torch.searchsorted(until, number, right=True).clamp_max(step.sequences - 1)
        nth = number - (until - (ended - begun)).index_select(0, sequence)
        self.first = (begun.index_select(0, sequence) + nth) * ratio
        """int64 ``[m]``: position of each window's first token."""
        start, first_row = step.start.index_select(0, sequence), step.first_row.index_select(0, sequence)
        self.row = torch.where(number < until[-1], first_row + self.first + ratio - 1 - start, step.rows)
        """int64 ``[m]``: row of its last token; ``T`` = there is no such window."""
        position = self.first[:, None] + torch.arange(ratio - pooled, ratio, device=device)
        past = position - start[:, None]
        self._own, self._exists = past >= 0, position >= 0
        self._row = (first_row[:, None] + past).clamp(0, max(step.rows - 1, 0))
        self._slot, self._place = step.state_row.index_select(0, sequence)[:, None], position % places

    def at_ends(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` ``[T]`` in the rows of the windows' last tokens, ``[m]``; 0 for windows that there are not."""
        return torch.cat((x, x.new_zeros(1))).index_select(0, self.row)

    def rows_of(self, raw: torch.Tensor, pending: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Values and gates ``[m, pooled, ...]`` of every window's rows, from ``raw`` ``[T, 2, ...]`` or ``pending`` ``[slots, P, 2, ...]``.

        Rows before a sequence's first token have value 0 and gate −inf.
        """
        own = self._own.view(*self._own.shape, 1, 1)
        exists = self._exists.unsqueeze(-1)
        values, gates = torch.where(own, raw[self._row], pending[self._slot, self._place]).unbind(2)
        return torch.where(exists, values, 0.0), torch.where(exists, gates, -torch.inf)

    @cached_property
    def _targets(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.step.ring_places(self.places)

    def store(self, pending: torch.Tensor, raw: torch.Tensor) -> None:
        """Writes the newest ``P`` rows of every sequence."""
        pending[self._targets] = raw


def pool_windows(c: torch.Tensor, z: torch.Tensor, plan: PoolPlan, pending: torch.Tensor) -> torch.Tensor:
    """Values ``c`` and gates ``z``, float32 ``[T, D]`` (``[T, 2 D]`` with overlap), ``T ≥ 1`` → an entry a window, float32 ``[m, D]``.

    Rows of earlier steps come from ``pending`` float32 ``[slots, P, 2, D or 2 D]`` (place ``position % P``), whose places of the newest
    ``P`` rows of every sequence then become those of this step. Windows that there are not may have any value.
    """
    raw = torch.stack((c, z), 1)
    values, gates = plan.rows_of(raw, pending)
    plan.store(pending, raw)
    if plan.overlap:
        width, before = c.shape[1] // 2, plan.ratio
        values = torch.cat((values[:, :before, :width], values[:, before:, width:]), 1)
        gates = torch.cat((gates[:, :before, :width], gates[:, before:, width:]), 1)
    weights = gates.sub_(gates.amax(1, keepdim=True)).exp_()
    return tree_sum(values.mul_(weights), 1).div_(tree_sum(weights, 1))
