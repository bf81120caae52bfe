"""Keys and values in 8-bit floats (e4m3: four bits of exponent, three of fraction, no infinity), with a scale a tensor.

Stored is ``e4m3(x / scale)``; what stands for ``x`` is ``e4m3 * scale``. Whoever reads takes the stored number, which every wider float
holds exactly, and brings the scale in where it costs nothing: that of keys in the factor of the scores, that of values in the answer. So
attention over such a cache is attention over one of the run dtype that holds the stored numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

FP8 = torch.float8_e4m3fn
"""The type of the cache."""

LARGEST = 448.0
"""Largest number of the type; what is beyond is stored as this."""


@dataclass(frozen=True)
class CacheScales:
    """Scales of one layer's keys and values, above 0."""

    key: float = 1.0
    value: float = 1.0


def encode(rows: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """``rows`` of any float dtype as ``FP8``: times the float32 reciprocal of ``scale``, clamped to ±448, rounded to nearest, ties to even.

    A finite number or an infinity never becomes NaN; a NaN stays one.
    """
    return (rows.float() * (1.0 / scale)).clamp_(-LARGEST, LARGEST).to(FP8)


def decode(stored: torch.Tensor) -> torch.Tensor:
    """``stored`` (``FP8``, or its bytes as uint8) as the float32 numbers it holds, without a scale."""
    if stored.device.type != "cpu":
        return stored.view(FP8).float()
    found = _numbers().index_select(0, stored.view(torch.uint8).flatten().int())  # five times as fast there as converting
    return found.view(stored.shape)


@cache
def _numbers() -> torch.Tensor:
    return torch.arange(256, dtype=torch.uint8).view(FP8).float()
