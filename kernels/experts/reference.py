"""Choosing experts: the best by gate scores, and the weights they get. Equal scores go to the lower expert."""

from __future__ import annotations

import torch

from ..activations import softplus
from ..linear import PackedLinear
from ..paged_attention import tree_sum
from ..top_k import top_k

_LEAST_SUM = 1e-20


def route(
    u: torch.Tensor,
    gate: PackedLinear,
    bias: torch.Tensor | None,
    chosen: int,
    normalise: bool,
    scale: float,
    temperature: float = 1.0,
    ids: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """DeepSeek-V4's routing: experts int64 ``[T, k]``, ascending, and their weights float32 ``[T, k]``, for ``u`` ``[T, d]``.

    Scores are ``sqrt(softplus(logits / temperature))`` with ``gate`` the product ``d → E`` in float32. ``bias`` float32 ``[E]`` or
    ``[T, E]`` (rows of images have one of their own) takes part in choosing, not in the weights. ``normalise``: weights are divided by
    their sum plus 1e-20 if ``chosen > 1``; all are multiplied by ``scale``. ``ids`` int64 ``[T, k]``, in any order, fixes the experts
    (tables by token).
    """
    scores = softplus(gate(u.float()) / temperature).sqrt_()
    if ids is None:
        ids = top_k(scores if bias is None else scores + bias, chosen)
    ids = ids.sort(-1).values
    weights = scores.gather(1, ids)
    if normalise and chosen > 1:
        weights = weights / (tree_sum(weights, 1).unsqueeze(-1) + _LEAST_SUM)
    return ids, weights * scale


def softmax_top_k(logits: torch.Tensor, k: int, renormalise: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """The ``k`` likeliest experts of a softmax over all (Shazeer et al. 2017), from ``logits`` ``[T, E]`` of any float dtype, ``k ≤ E``.

    Gives ``experts`` int64 ``[T, k]``, the likeliest first, and ``shares`` float32 ``[T, k]``: their softmax over all ``E``, divided by the
    sum of the ``k`` chosen if ``renormalise``. Additions are a fixed tree, so that a row does not depend on how many there are.
    """
    wide = logits.float()
    shares = wide.sub(wide.amax(-1, keepdim=True)).exp_()
    shares = shares.div_(tree_sum(shares, 1).unsqueeze(-1))
    experts = top_k(wide, k)
    shares = shares.gather(1, experts)
    if renormalise:
        shares = shares / tree_sum(shares, 1).unsqueeze(-1)
    return experts, shares
