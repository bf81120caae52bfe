"""Manifold-constrained hyper-connections of DeepSeek-V4 and V4.1: ``s`` residual streams instead of one.

With ``f`` the flattened streams and ``m = (f fnᵀ) * rsqrt(mean(f²) + eps)``, split into ``s``, ``s`` and ``s * s`` columns, each part
scaled and shifted: ``pre = sigmoid + mix_eps``, ``post = 2 sigmoid``, and ``comb`` a softmax over each row plus ``mix_eps``, then
(Sinkhorn) divided by its column sums, row sums, column sums, …, ending on columns; ``mix_eps`` is added to every divisor.
All of it float32. In V4.1's single-pass form a site's ``pre`` collapses the streams for the *next* site; in V4 it does for the site itself,
and the head has a ``pre`` of its own.

Sums over streams are additions of whole tensors: their order is the same for any number of rows on any device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..activations import sigmoid
from ..linear import PackedLinear


def _sum(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Of the tensors, in a fixed tree."""
    while len(parts) > 1:
        pairs = [left + right for left, right in zip(parts[::2], parts[1::2], strict=False)]
        parts = pairs if len(parts) % 2 == 0 else [*pairs, parts[-1]]
    return parts[0]


def _mixed(x: torch.Tensor, fn: PackedLinear, eps: float) -> torch.Tensor:
    """``m`` of the module's note, ``[columns, T]``: rows innermost, so that every further step works on whole vectors."""
    flat = x.flatten(1).float()
    return (fn(flat) * torch.rsqrt(flat.square().mean(-1, keepdim=True).add_(eps))).t().contiguous()


def mix_coefficients(
    x: torch.Tensor, fn: PackedLinear, base: torch.Tensor, scale: torch.Tensor, eps: float, iterations: int, mix_eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Coefficients of one sublayer from the streams before it, ``x`` ``[T, s, d]`` of any float dtype.

    ``fn`` is the float32 product ``[(2 + s) s, s d]``, ``base`` float32 ``[(2 + s) s]``, ``scale`` float32 ``[3]`` (pre, post, comb).
    Gives float32 ``pre`` ``[T, s]``, ``post`` ``[T, s]`` and ``comb`` ``[T, s, s]``, source stream first.
    ``iterations`` counts the softmax with its column step as one.
    """
    rows, streams, _ = x.shape
    parts = _mixed(x, fn, eps)
    shift = base[:, None]
    pre = sigmoid(parts[:streams] * scale[0] + shift[:streams]).add_(mix_eps)
    post = sigmoid(parts[streams : 2 * streams] * scale[1] + shift[streams : 2 * streams]).mul_(2.0)
    comb = (parts[2 * streams :] * scale[2] + shift[2 * streams :]).view(streams, streams, rows)
    comb = comb.sub_(comb.amax(1, keepdim=True)).exp_()
    sources, targets = comb.unbind(0), comb.unbind(1)  # views: they follow the divisions below
    comb.div_(_sum(targets).unsqueeze(1)).add_(mix_eps)
    comb.div_(_sum(sources).add_(mix_eps))
    for _ in range(iterations - 1):
        comb.div_(_sum(targets).add_(mix_eps).unsqueeze(1))
        comb.div_(_sum(sources).add_(mix_eps))
    return pre.t().contiguous(), post.t().contiguous(), comb.permute(2, 0, 1).contiguous()


def head_coefficients(
    x: torch.Tensor, fn: PackedLinear, base: torch.Tensor, scale: torch.Tensor, eps: float, mix_eps: float
) -> torch.Tensor:
    """``pre`` float32 ``[T, s]`` with which V4's head collapses the last streams ``x`` ``[T, s, d]``.

    ``fn`` is the float32 product ``[s, s d]``, ``base`` float32 ``[s]``, ``scale`` float32 ``[1]``.
    """
    return sigmoid(_mixed(x, fn, eps) * scale + base[:, None]).add_(mix_eps).t().contiguous()


def collapse(x: torch.Tensor, pre: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``sum_i pre_i x_i``: ``x`` ``[T, s, d]``, ``pre`` float32 ``[T, s]`` → ``[T, d]`` in ``dtype``; summed in float32, one cast."""
    total = x[:, 0].float() * pre[:, :1]
    for stream in range(1, x.shape[1]):
        total += x[:, stream].float() * pre[:, stream : stream + 1]
    return total.to(dtype)


def expand(y: torch.Tensor, x: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
    """``x'_k = post_k y + sum_j comb_jk x_j``: streams after a sublayer that gave ``y`` ``[T, d]``; ``[T, s, d]`` in the dtype of ``x``.

    ``comb`` ``[T, s, s]`` has the source stream first. Float32: the sublayer's part, then the streams in order; one cast.
    """
    total = y.float().unsqueeze(1) * post.unsqueeze(-1)
    for stream in range(x.shape[1]):
        total += x[:, stream].float().unsqueeze(1) * comb[:, stream].unsqueeze(-1)
    return total.to(x.dtype)
