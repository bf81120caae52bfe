"""Tensor functions of the family: tensors in, tensors out, no parameters kept."""

import torch

from deepinfer.kernels.rope import apply_rope


def split_heads(
    qkv: torch.Tensor, heads: int, kv_heads: int, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``qkv`` ``[R, (heads + 2 kv_heads) * d]`` → rotated q and k (float32) and v, each ``[R, its heads, d]``."""
    parts = qkv.view(qkv.shape[0], heads + 2 * kv_heads, -1)
    rotated = apply_rope(parts[:, : heads + kv_heads], cos, sin)
    return rotated[:, :heads], rotated[:, heads:], parts[:, heads + kv_heads :]
