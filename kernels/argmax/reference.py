"""The index of each row's largest value: the lowest one where several are equal."""

from __future__ import annotations

import torch


def argmax(x: torch.Tensor) -> torch.Tensor:
    """Indices int32 ``[R]`` of the largest values of ``x`` ``[R, V]``, in bfloat16, float16 or float32.

    0 and −0 are equal. NaN is larger than every number, so that a row with one gives the first of them. A row of nothing but −∞ gives 0.
    Widening does not change the order of values: narrow logits have the index of the same logits in float32.
    """
    return torch.argmax(x, dim=-1).to(torch.int32)
