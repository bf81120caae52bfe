"""RMSNorm (Zhang & Sennrich 2019): ``x / sqrt(mean(x²) + eps) * weight``."""

from __future__ import annotations

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float, out_dtype: torch.dtype | None = None) -> torch.Tensor:
    """Normalises the last dimension of ``x`` ``[..., d]``.

    Statistics and the product with ``weight`` (shape broadcast to ``x``, kept in float32 by the caller; None = 1) are float32; the
    answer has ``out_dtype`` (default ``x.dtype``). A row is reduced by itself, in an order fixed by ``d``.
    """
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True).add_(eps))
    normed = wide * scale
    return (normed if weight is None else normed.mul_(weight)).to(out_dtype or x.dtype)
