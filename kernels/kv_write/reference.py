"""Writes rows into the entries named by their slots."""

from __future__ import annotations

import torch

from ..fp8_cache import FP8, encode


def kv_write(cache: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor, scale: float = 1.0) -> None:
    """``cache`` ``[pages, entries, *shape]`` at flat entry ``slots[i]`` becomes ``rows[i]`` (``[T, *shape]``).

    ``slots`` is int64 ``[T]``, ``page * entries + offset``; callers map −1 ("writes nothing") to entry 0 with
    ``clamp_min(0)``: entry 0 lies on the null page, which no sequence reads, so nothing has to be compacted and the host
    never waits. Slots other than 0 must be distinct. Rows are converted to ``cache.dtype``;
    of a cache in ``FP8``, ``scale`` is that of its numbers (``fp8_cache``).
    """
    flat = cache.view(-1, *cache.shape[2:])
    if cache.dtype == FP8:
        flat.view(torch.uint8).index_copy_(0, slots, encode(rows, scale).view(torch.uint8))
        return
    flat.index_copy_(0, slots, rows.to(cache.dtype))
