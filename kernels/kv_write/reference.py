"""Writes rows into the entries named by their slots."""

from __future__ import annotations

import torch


def kv_write(cache: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor) -> None:
    """``cache`` ``[pages, entries, *shape]`` at flat entry ``slots[i]`` becomes ``rows[i]`` (``[T, *shape]``).

    ``slots`` is int64 ``[T]``, ``page * entries + offset``; callers map −1 ("writes nothing") to entry 0 with
    ``clamp_min(0)``: entry 0 lies on the null page, which no sequence reads, so nothing has to be compacted and the host
    never waits. Slots other than 0 must be distinct. Rows are converted to ``cache.dtype``.
    """
    flat = cache.view(-1, *cache.shape[2:])
    flat.index_copy_(0, slots, rows.to(cache.dtype))
