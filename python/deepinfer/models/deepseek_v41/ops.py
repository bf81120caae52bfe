"""Tensor functions of DeepSeek-V4.1 that are no operators: tensors in, tensors out, no parameters."""

from __future__ import annotations

import torch


def begin_streams(embedded: torch.Tensor, streams: int) -> tuple[torch.Tensor, torch.Tensor]:
    """``[T, d]`` → equal streams ``[T, s, d]``, and the mix float32 ``[T, s]`` with which the first layer collapses them: the first one."""
    x = embedded.unsqueeze(1).expand(-1, streams, -1).contiguous()
    mix = torch.zeros(x.shape[:2], dtype=torch.float32, device=x.device)
    mix[:, 0] = 1.0
    return x, mix


def mean_stream(x: torch.Tensor) -> torch.Tensor:
    """Mean over the streams of ``[T, s, d]``, added in order in float32, in the dtype of ``x``."""
    total = x[:, 0].float()
    for stream in range(1, x.shape[1]):
        total = total + x[:, stream].float()
    return (total / x.shape[1]).to(x.dtype)
