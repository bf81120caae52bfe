"""The products around attention: queries over a low rank, one latent that is key and value, the output in groups."""

from __future__ import annotations

import torch

from ...kernels.rms_norm import rms_norm
from ...kernels.rope import rotate_pairs
from .containers import AttentionParameters
from .packed import PackedAttention
from .step import Angles
from .topology import AttentionSizes


class Heads:
    """Of one layer or draft stage, in runtime layout. ``normed``: every query head is normed before it turns (DeepSeek-V4)."""

    def __init__(
        self, p: AttentionParameters, sizes: AttentionSizes, eps: float, quantised: bool, dtype: torch.dtype, normed: bool = False
    ) -> None:
        self._w, self._sizes, self._eps, self._dtype, self._normed = PackedAttention.pack(p, quantised), sizes, eps, dtype, normed
        self.sink, self.scale = self._w.sink, sizes.head_dim**-0.5

    def turned(self, latent: torch.Tensor, angles: Angles) -> torch.Tensor:
        """Window rows ``[T, D]`` of ``latent`` ``[T, D]``, not yet stored."""
        return rotate_pairs(rms_norm(latent, self._w.kv_norm, self._eps, self._dtype), *angles)

    def enter(self, u: torch.Tensor, angles: Angles) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """``u`` ``[T, d]`` → queries ``[T, H, D]``, the low rank ``[T, q_rank]`` they come from, and window rows ``[T, D]``."""
        w, sizes = self._w, self._sizes
        low, latent = w.down(u).split((sizes.q_rank, sizes.head_dim), -1)
        low = rms_norm(low, w.q_norm, self._eps, self._dtype)
        q = w.up(low).view(-1, sizes.heads, sizes.head_dim)
        if self._normed:
            q = rms_norm(q, None, self._eps)
        return rotate_pairs(q, *angles), low, self.turned(latent, angles)

    def leave(self, attended: torch.Tensor, angles: Angles) -> torch.Tensor:
        """Heads float32 ``[T, H, D]`` turned back, joined in groups, ``[T, d]``."""
        cos, sin = angles
        heads = rotate_pairs(attended, cos, -sin).to(self._dtype)
        groups = heads.view(heads.shape[0], self._sizes.o_groups, -1).transpose(0, 1).contiguous()
        return self._w.out(torch.cat([product(x) for product, x in zip(self._w.groups, groups, strict=True)], -1))
