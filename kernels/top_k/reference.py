"""Top-k whose answer is a function of the values: equal ones go by their place, where a library's order is an accident."""

from __future__ import annotations

import torch


def top_k(scores: torch.Tensor, k: int) -> torch.Tensor:
    """Places of the ``k`` largest of each row of ``scores`` float32 ``[T, n]``, ``k ≤ n``: int64 ``[T, k]``, largest first.

    Equal scores: the lower place first; −0 equals 0. One integer orders both: the score's bits, made monotonic, above the place.
    """
    bits = (scores + 0.0).view(torch.int32)  # + 0 turns −0 into 0
    order = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()
    places = torch.arange(scores.shape[-1], device=scores.device)
    key = (order << 32) + (0xFFFFFFFF - places)
    return 0xFFFFFFFF - (key.topk(k, dim=-1).values & 0xFFFFFFFF)
