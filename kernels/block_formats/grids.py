"""Number grids of block formats: elements e4m3 and e2m1, scales ue8m0 and e4m3. Elementwise on any shape and device.

- e4m3: sign, 4 exponent and 3 fraction bits, largest 448, one NaN; rounding to nearest, ties to even.
- e2m1: sign and one of 0, 0.5, 1, 1.5, 2, 3, 4, 6; to nearest, ties to the even code: 0.25, 1.25, 2.5 and 5 go down,
  0.75, 1.75 and 3.5 go up. No NaN: a NaN lives in the scale.
- ue8m0: a byte ``b`` is ``2^(b - 127)``, 255 is NaN.

Negative zero keeps its sign in every grid, so decoding what was encoded gives the same bits on every path.
"""

from __future__ import annotations

import struct
from math import frexp

import torch

E4M3_MAX = 448.0
E2M1_MAX = 6.0
UE8M0_BIAS = 127
UE8M0_NAN = 255


def to_e4m3(x: torch.Tensor) -> torch.Tensor:
    """float32 → float8_e4m3fn, saturating at ±448; NaN stays NaN."""
    # torch releases differ in what they do beyond 448, so nothing beyond it reaches the cast
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def to_e2m1(x: torch.Tensor) -> torch.Tensor:
    """float32 → uint8 codes 0 … 15 (bit 3 is the sign), saturating at ±6."""
    size = x.abs()
    code = (size > 0.25).to(torch.uint8)
    code += size >= 0.75
    code += size > 1.25
    code += size >= 1.75
    code += size > 2.5
    code += size >= 3.5
    code += size > 5.0
    return code | (torch.signbit(x).to(torch.uint8) << 3)


def from_e2m1(codes: torch.Tensor) -> torch.Tensor:
    """uint8 codes 0 … 15 → float32."""
    # assembled from bits: a table would have to be copied to the device by every call
    wide = codes.to(torch.int32)
    exponent, fraction = wide >> 1 & 3, wide & 1
    bits = torch.where(exponent > 0, (exponent + 126 << 23) | (fraction << 22), fraction * (126 << 23))
    return (bits | (wide >> 3 << 31)).view(torch.float32)


def pack_pairs(codes: torch.Tensor) -> torch.Tensor:
    """uint8 codes ``[..., 2 n]`` → bytes ``[..., n]``; the even element is the low nibble."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_pairs(packed: torch.Tensor) -> torch.Tensor:
    """Bytes ``[..., n]`` → uint8 codes ``[..., 2 n]``."""
    return torch.stack((packed & 15, packed >> 4), -1).flatten(-2)


def ue8m0_of(largest: torch.Tensor, element_max: float) -> torch.Tensor:
    """Bytes of the smallest ``2^e`` with ``largest <= element_max * 2^e``: ``ceil(log2(largest / element_max))``, exactly.

    ``largest`` float32, positive; NaN or infinity gives 255. Splitting off exponents needs neither a division nor a
    logarithm, whose last bit differs between devices.
    """
    fraction, exponent = torch.frexp(largest)
    top_fraction, top_exponent = frexp(element_max)
    byte = exponent - top_exponent + (fraction > top_fraction) + UE8M0_BIAS
    return torch.where(largest.isfinite(), byte.clamp(0, UE8M0_NAN - 1), UE8M0_NAN).to(torch.uint8)


def from_ue8m0(byte: torch.Tensor) -> torch.Tensor:
    """uint8 → float32 scale, exact for every byte (0 is the subnormal ``2^-127``), 255 → NaN."""
    # 1 to 254 are the exponent field of float32 as it stands; the two ends need a pattern of their own
    bits = byte.to(torch.int32) << 23
    bits = torch.where(byte == 0, 1 << 22, torch.where(byte == UE8M0_NAN, 0x7FC00000, bits))
    return bits.to(torch.int32).view(torch.float32)


def power_of_two_scale(largest: torch.Tensor, element_max: float) -> torch.Tensor:
    """``from_ue8m0(ue8m0_of(largest, element_max))`` in fewer operations, for ``largest`` of at least ``element_max * 2^-126``.

    On the bits of float32: a fraction above that of ``element_max`` carries into the exponent, from which the exponent of
    ``element_max`` is taken.
    """
    top = struct.unpack("<i", struct.pack("<f", element_max))[0]
    bits = largest.view(torch.int32)
    carried = (bits + ((1 << 23) - 1 - (top & 0x7FFFFF))) & 0x7F800000
    scale = (carried - ((top & 0x7F800000) - (127 << 23))).view(torch.float32)
    return torch.where(bits >= 0x7F800000, torch.nan, scale)
