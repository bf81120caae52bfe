"""Sigmoid, SiLU and softplus written with ``exp`` and ``log1p``.

torch's own forms on a CPU compute most numbers in vectors and the last few of a piece one by one, with another rounding: which ones
those are depends on the number of rows and threads. ``exp`` and ``log1p`` do not differ so. float32 in and out.
"""

from __future__ import annotations

import torch


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """``1 / (1 + e^-x)``."""
    return x.neg().exp_().add_(1.0).reciprocal_()


def silu(x: torch.Tensor) -> torch.Tensor:
    """``x / (1 + e^-x)``; −0 where ``e^-x`` overflows."""
    return x / x.neg().exp_().add_(1.0)


def softplus(x: torch.Tensor) -> torch.Tensor:
    """``log(1 + e^x)``, ``x`` itself above 20 (torch's rule)."""
    return torch.where(x > 20.0, x, torch.log1p(x.exp()))
