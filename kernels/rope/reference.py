"""Rotary position embedding (Su et al. 2021) in both layouts, and the ways to stretch it.

Channels that turn together are ``i`` and ``i + d/2`` (``apply_rope``) or the neighbours ``2 i`` and ``2 i + 1`` of a row's last channels
(``rotate_pairs``).

Angles are ``position * f_i`` with ``f_i = theta^(-2 i / d)``, ``i`` in ``0 … d/2 - 1``. Scalings:

- ``linear`` (position interpolation, Chen et al. 2023): ``f_i / factor``.
- ``dynamic`` (NTK-aware, "bloc97" 2023): beyond the trained length L, theta grows with the length n to
  ``theta * (factor * n / L - (factor - 1))^(d / (d - 2))``. Here n is the row's own length (position + 1), so that a
  row depends neither on its batch nor on later tokens.
- ``llama3`` (Llama 3.1 release): wavelengths above ``L / low_freq_factor`` are divided by ``factor``, those below
  ``L / high_freq_factor`` kept, the ones between blended linearly in ``L / wavelength``.
- ``yarn`` (Peng et al. 2023): per-dimension blend of ``f_i`` and ``f_i / factor`` by the number of rotations within L,
  and cos/sin multiplied by an attention factor, ``0.1 ln(factor) + 1`` unless given.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class RopeParameters:
    """What the angles depend on; lengths in tokens."""

    head_dim: int
    theta: float = 10000.0
    rope_type: str = "default"
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    frequency_factors: tuple[float, ...] | None = None
    """Divisors of ``f_i`` stored with a checkpoint (GGUF ``rope_freqs.weight``); used with ``default`` and ``linear``."""


def _yarn_mscale(scale: float, mscale: float = 1.0) -> float:
    return 1.0 if scale <= 1 else 0.1 * mscale * math.log(scale) + 1.0


def _plain_frequencies(p: RopeParameters) -> torch.Tensor:
    exponent = torch.arange(0, p.head_dim, 2, dtype=torch.int64).float() / p.head_dim
    return 1.0 / (p.theta**exponent)


def _llama3_frequencies(p: RopeParameters) -> torch.Tensor:
    plain = _plain_frequencies(p)
    wavelength = 2 * math.pi / plain
    blend = (p.original_max_position / wavelength - p.low_freq_factor) / (p.high_freq_factor - p.low_freq_factor)
    blended = (1 - blend) * plain / p.factor + blend * plain
    long_waves = wavelength > p.original_max_position / p.low_freq_factor
    short_waves = wavelength < p.original_max_position / p.high_freq_factor
    return torch.where(long_waves, plain / p.factor, torch.where(short_waves, plain, blended))


def yarn_band(p: RopeParameters) -> tuple[float, float]:
    """First and last pair of the blend: pairs below are kept, pairs above are divided by ``factor``."""

    def dimension_of(rotations: float) -> float:
        return p.head_dim * math.log(p.original_max_position / (rotations * 2 * math.pi)) / (2 * math.log(p.theta))

    low, high = dimension_of(p.beta_fast), dimension_of(p.beta_slow)
    if p.truncate:
        low, high = math.floor(low), math.ceil(high)
    return max(low, 0), min(high, p.head_dim - 1)


def _yarn_frequencies(p: RopeParameters) -> torch.Tensor:
    half = p.head_dim // 2
    low, high = yarn_band(p)
    if low == high:
        high += 0.001
    keep = 1 - ((torch.arange(half, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    power = p.theta ** (torch.arange(0, p.head_dim, 2).float() / p.head_dim)
    return 1.0 / (p.factor * power) * (1 - keep) + 1.0 / power * keep


class RopeTable:
    """Gives cos and sin for positions; built once per model and device.

    Raises ``ValueError`` for a ``rope_type`` not named in the module's note.
    """

    def __init__(self, parameters: RopeParameters, device: torch.device) -> None:
        p = parameters
        self.parameters = p
        self.scale = 1.0
        if p.rope_type in ("default", "dynamic"):
            frequencies = _plain_frequencies(p)
        elif p.rope_type == "linear":
            frequencies = _plain_frequencies(p) / p.factor
        elif p.rope_type == "llama3":
            frequencies = _llama3_frequencies(p)
        elif p.rope_type == "yarn":
            frequencies = _yarn_frequencies(p)
            if p.attention_factor is not None:
                self.scale = p.attention_factor
            elif p.mscale and p.mscale_all_dim:
                self.scale = _yarn_mscale(p.factor, p.mscale) / _yarn_mscale(p.factor, p.mscale_all_dim)
            else:
                self.scale = _yarn_mscale(p.factor)
        else:
            raise ValueError(f"rope_type {p.rope_type!r} is not one of default, linear, dynamic, llama3, yarn")
        if p.frequency_factors is not None:
            frequencies = frequencies / torch.tensor(p.frequency_factors, dtype=torch.float32)
        self.frequencies = frequencies.to(device)
        self._exponent = (torch.arange(0, p.head_dim, 2, dtype=torch.int64).float() / p.head_dim).to(device)

    def _row_frequencies(self, positions: torch.Tensor) -> torch.Tensor:
        p = self.parameters
        if p.rope_type != "dynamic":
            return self.frequencies
        length = (positions + 1).clamp_min(p.original_max_position).double()
        theta = p.theta * (p.factor * length / p.original_max_position - (p.factor - 1)) ** (p.head_dim / (p.head_dim - 2))
        return 1.0 / (theta[:, None].float() ** self._exponent)

    def cos_sin(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """For int64 ``positions`` ``[T]``: float32 ``cos`` and ``sin`` ``[T, 1, d]``.

        Both halves repeat; ``sin`` carries the sign of the rotation: minus in the first half. Elementwise in ``T``.
        """
        cos, sin = self.pair_cos_sin(positions)
        return torch.cat((cos, cos), -1).unsqueeze(1), torch.cat((-sin, sin), -1).unsqueeze(1)

    def pair_cos_sin(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """For int64 ``positions`` ``[T]``: float32 ``cos`` and ``sin`` ``[T, d / 2]`` for ``rotate_pairs``. Elementwise in ``T``."""
        angles = positions[:, None].float() * self._row_frequencies(positions)
        return angles.cos() * self.scale, angles.sin() * self.scale


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates ``x`` ``[T, heads, d]`` by ``cos``/``sin`` of ``RopeTable.cos_sin``; float32 ``[T, heads, d]``.

    ``out = x * cos + swap_halves(x) * sin``: separate elementwise operations, so no row is contracted differently.
    """
    x = x.float()
    swapped = torch.roll(x, x.shape[-1] // 2, -1)
    return (x * cos).add_(swapped.mul_(sin))


def rotate_pairs(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates the last ``r`` channels of ``x`` ``[T, ..., d]`` as neighbouring pairs by ``cos``/``sin`` ``[T, r / 2]`` of ``pair_cos_sin``.

    ``(a, b) → (a cos - b sin, a sin + b cos)`` in float32 with one cast to the dtype of ``x``; ``-sin`` turns back. The first
    ``d - r`` channels pass unchanged. Elementwise.
    """
    turned = 2 * cos.shape[-1]
    shape = (cos.shape[0], *([1] * (x.dim() - 2)), turned // 2)
    cos, sin = cos.view(shape), sin.view(shape)
    tail = x[..., x.shape[-1] - turned :].float().unflatten(-1, (-1, 2))
    even, odd = tail.unbind(-1)
    rotated = torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)
    return torch.cat((x[..., : x.shape[-1] - turned], rotated.to(x.dtype)), -1)
