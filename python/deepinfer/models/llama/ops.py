"""Tensor functions of the Llama family: tensors in, tensors out, no parameters kept."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ...kernels.rms_norm import rms_norm
from ...kernels.rope import apply_rope


def pad_step(ids: torch.Tensor, pos: torch.Tensor, slots: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Token ids, positions and KV slots (int64 ``[T]``) padded to ``rows``; padding and −1 write to the null page."""
    missing = rows - ids.shape[0]
    if missing:
        ids, pos, slots = F.pad(ids, (0, missing)), F.pad(pos, (0, missing)), F.pad(slots, (0, missing))
    return ids, pos, slots.clamp_min(0)


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
