"""Engram's gate in DeepSeek-V4.1 (without the convolution of the first design).

For stream ``i``: ``dot_i = <x_i * q_i * k_i, key_i> * rsqrt(mean x_i² + eps) * rsqrt(mean key_i² + eps) / sqrt(d)``,
``gate_i = sigmoid(sign(dot_i) sqrt(max(|dot_i|, 1e-6)))``, ``x_i + gate_i * value``. The sign of 0 is plus. Float32, one cast.
"""

from __future__ import annotations

import torch

from ..activations import sigmoid

_LEAST_DOT = 1e-6


def engram_gate(
    x: torch.Tensor, key_value: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor, eps: float, dead: torch.Tensor | None = None
) -> torch.Tensor:
    """``x`` ``[T, s, d]`` → ``[T, s, d]`` in its dtype.

    ``key_value`` ``[T, (s + 1) d]`` holds a key for each stream, then the value they share; ``q_weight`` and ``k_weight`` are float32
    ``[s, d]``. Rows of ``dead`` (bool ``[T]``: part of an image) pass unchanged, whatever their ``key_value``.
    """
    streams, width = x.shape[1:]
    wide = x.float()
    parts = key_value.float().unflatten(-1, (streams + 1, width))
    key, value = parts[:, :streams], parts[:, streams:]
    dot = (wide * (q_weight * k_weight) * key).sum(-1, keepdim=True)
    dot *= torch.rsqrt(wide.square().mean(-1, keepdim=True).add_(eps))
    dot *= torch.rsqrt(key.square().mean(-1, keepdim=True).add_(eps))
    dot *= width**-0.5
    gate = sigmoid(torch.copysign(dot.abs().clamp_min_(_LEAST_DOT).sqrt_(), dot))
    added = gate * value
    if dead is not None:
        added = torch.where(dead[:, None, None], 0.0, added)
    return (wide + added).to(x.dtype)
