"""Random numbers as a function of (seed, position, draw), in 64-bit integer arithmetic: nothing is consumed, nothing is stored."""

from __future__ import annotations

import torch

TOKEN, ACCEPT, RESIDUAL, DRAFT = range(4)
"""Draw ids: a token from its distribution; whether a draft is kept; a token from what is left of the distribution. A drafter that
draws uses ids from ``DRAFT`` on, so that its draws are independent of the target's."""


def _signed(x: int) -> int:
    return x - (1 << 64) if x >> 63 else x


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_MUL1 = _signed(0xBF58476D1CE4E5B9)
_MUL2 = _signed(0x94D049BB133111EB)


def _shift_right(x: torch.Tensor, n: int) -> torch.Tensor:
    """Logical shift of int64 bits."""
    return (x >> n) & ((1 << (64 - n)) - 1)


def _mix(x: torch.Tensor) -> torch.Tensor:
    """SplitMix64's finaliser (Steele, Lea, Flood 2014) on int64 tensors; products wrap modulo 2**64."""
    x = (x ^ _shift_right(x, 30)) * _MUL1
    x = (x ^ _shift_right(x, 27)) * _MUL2
    return x ^ _shift_right(x, 31)


def random_bits(seed: torch.Tensor, position: torch.Tensor, draw: int) -> torch.Tensor:
    """64 random bits per row, int64: a function of its arguments alone.

    ``mix(mix(mix(seed + G) + position * G) + draw * G)`` modulo 2**64, ``G = 0x9E3779B97F4A7C15``; ``mix`` is a bijection, so
    distinct positions of one seed never repeat a value.

    Args:
        seed: int64 ``[m]``.
        position: int64 ``[m]``, position in the sequence of the token to be drawn.
        draw: which of several draws for one token.
    """
    offset = _signed((draw * 0x9E3779B97F4A7C15) & ((1 << 64) - 1))
    return _mix(_mix(_mix(seed + _GOLDEN) + position * _GOLDEN) + offset)


def uniform(bits: torch.Tensor) -> torch.Tensor:
    """float64 in [0, 1) from the upper 53 bits."""
    return _shift_right(bits, 11).to(torch.float64) * 2.0**-53
