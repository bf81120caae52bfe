"""Choosing experts (Shazeer et al. 2017): the ``k`` likeliest ones of a softmax over all."""

from __future__ import annotations

import torch


def softmax_top_k(logits: torch.Tensor, k: int, renormalise: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """Experts of each row and their shares, from router ``logits`` ``[T, E]`` (any float dtype), ``1 ≤ k ≤ E``.

    Gives ``experts`` int64 ``[T, k]``, the likeliest first and of equals the lower number, and ``shares`` float32 ``[T, k]``: their
    softmax over all ``E``, divided by the sum of the ``k`` chosen if ``renormalise``. A row is reduced by itself.
    """
    shares, experts = logits.float().softmax(-1).sort(dim=-1, descending=True, stable=True)
    shares, experts = shares[:, :k], experts[:, :k]
    if renormalise:
        # k additions in the order of the places: a library's sum may choose its own by the number of rows
        total = shares[:, 0]
        for place in range(1, k):
            total = total + shares[:, place]
        shares = shares / total[:, None]
    return experts, shares
