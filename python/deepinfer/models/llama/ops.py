"""Tensor functions of the Llama family: tensors in, tensors out, no parameters kept."""

from __future__ import annotations

import torch

from ...kernels.rms_norm import rms_norm
from ...kernels.rope import apply_rope


def split_heads(
    qkv: torch.Tensor, heads: int, kv_heads: int, head_dim: int, norm: torch.Tensor | None, eps: float, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``qkv`` ``[R, (heads + 2 kv_heads) * head_dim]`` → rotated q and k (float32) and v, each ``[R, heads, head_dim]``.

    ``norm`` float32 ``[heads + kv_heads, head_dim]``: per-head RMS norm of q and k before the rotation, None = none.
    """
    rows = qkv.shape[0]
    split = heads + kv_heads
    both = (
        qkv[:, : split * head_dim].view(rows, split, head_dim)
        if norm is None
        else qkv[:, : split * head_dim].reshape(rows, split, head_dim)
    )
    if norm is not None:
        both = rms_norm(both, norm, eps)
    rotated = apply_rope(both, cos, sin)
    values = qkv[:, split * head_dim :].view(rows, kv_heads, head_dim)
    return rotated[:, :heads], rotated[:, heads:], values
