"""Rows stored as small floats with one scale per block: what cache records and quantised activations mean.

A row of ``width`` numbers becomes ``record_bytes(width)`` bytes: all elements first (e2m1 in pairs, the even one in the low
nibble), then one scale per block of ``block`` neighbours. With ``amax`` the largest size in a block, at least ``floor``:

- ``ue8m0`` scale: ``2^ceil(log2(amax / max))``, exact (see ``grids.ue8m0_of``);
- ``e4m3`` scale: ``amax / max`` in float32, at most 448, to nearest even; what exceeds ``448 * max`` saturates;
- element: ``x / scale`` in float32, clamped to ±max, to nearest even; value: element times scale in float32.

A block with a NaN or an infinity has a NaN scale: the whole block decodes to NaN and cannot pass unseen. Every value is
representable in bfloat16, so a bfloat16 tensor of ``fake_quantise`` and packed records of the same rows agree bit for bit.
Elementwise in the leading dimensions: the bits of a row depend on that row only, and no value is read by the host.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from .grids import (
    E2M1_MAX,
    E4M3_MAX,
    from_e2m1,
    from_ue8m0,
    pack_pairs,
    power_of_two_scale,
    to_e2m1,
    to_e4m3,
    ue8m0_of,
    unpack_pairs,
)


@dataclass(frozen=True)
class RowFormat:
    """One layout of rows; ``floor`` is the least ``amax`` a block is scaled by."""

    name: str
    element: Literal["e4m3", "e2m1"]
    scale: Literal["ue8m0", "e4m3"]
    block: int
    floor: float

    @property
    def element_max(self) -> float:
        """Largest element."""
        return E4M3_MAX if self.element == "e4m3" else E2M1_MAX

    def fits(self, width: int) -> bool:
        """Whether rows of ``width`` consist of whole blocks."""
        return width > 0 and width % self.block == 0

    def element_bytes(self, width: int) -> int:
        """Bytes of a row's elements."""
        return width if self.element == "e4m3" else width // 2

    def record_bytes(self, width: int) -> int:
        """Bytes of a row; ``ValueError`` unless ``fits(width)``."""
        if not self.fits(width):
            raise ValueError(f"{self.name} rows have a multiple of {self.block} numbers, not {width}")
        return self.element_bytes(width) + width // self.block


FP8_ROWS = RowFormat("FP8 (e4m3, ue8m0 per 32)", "e4m3", "ue8m0", 32, 1e-4)
"""Window keys, Engram rows and the activations of quantised products: 528 bytes for 512 numbers."""
FP4_ROWS = RowFormat("FP4 (e2m1, e4m3 per 16)", "e2m1", "e4m3", 16, 6 * 2.0**-9)
"""Compressed keys: 288 bytes for 512 numbers."""
MXFP4_ROWS = RowFormat("MXFP4 (e2m1, ue8m0 per 32)", "e2m1", "ue8m0", 32, 6 * 2.0**-126)
"""Index keys and index queries: 68 bytes for 128 numbers."""


def _scales(blocks: torch.Tensor, form: RowFormat) -> tuple[torch.Tensor, torch.Tensor]:
    """``blocks`` float32 ``[..., n, block]`` → scale bytes and float32 scales, both ``[..., n]``."""
    largest = blocks.abs().amax(-1).clamp_min(form.floor)
    if form.scale == "ue8m0":
        byte = ue8m0_of(largest, form.element_max)
        return byte, from_ue8m0(byte)
    # a tensor on the right, so that this is a division on every device: by a constant it may become a product
    quotient = largest / torch.full_like(largest, form.element_max)
    scale = to_e4m3(torch.where(largest.isfinite(), quotient, torch.nan))
    return scale.view(torch.uint8), scale.float()


def _quantise(x: torch.Tensor, form: RowFormat) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Elements ``[..., width]`` (float8 or codes), scale bytes and scales ``[..., width / block]``."""
    width = x.shape[-1]
    form.record_bytes(width)
    blocks = x.float().unflatten(-1, (width // form.block, form.block))
    byte, scale = _scales(blocks, form)
    scaled = blocks / scale[..., None]
    elements = to_e4m3(scaled) if form.element == "e4m3" else to_e2m1(scaled)
    return elements.flatten(-2), byte, scale


def _values(elements: torch.Tensor, scale: torch.Tensor, form: RowFormat) -> torch.Tensor:
    plain = elements.float() if form.element == "e4m3" else from_e2m1(elements)
    return (plain.unflatten(-1, (scale.shape[-1], form.block)) * scale[..., None]).flatten(-2)


def encode_rows(x: torch.Tensor, form: RowFormat) -> torch.Tensor:
    """``x`` ``[..., width]`` of any float dtype → uint8 ``[..., record_bytes(width)]``; ``ValueError`` for another width."""
    elements, byte, _ = _quantise(x, form)
    packed = elements.view(torch.uint8) if form.element == "e4m3" else pack_pairs(elements)
    return torch.cat((packed, byte), -1)


def decode_rows(records: torch.Tensor, form: RowFormat, width: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """uint8 ``[..., record_bytes(width)]`` → ``[..., width]`` in ``dtype`` (exact in float32 and bfloat16).

    ``ValueError`` if ``records`` is not uint8 or its rows are not as long as this format makes them.
    """
    wanted = form.record_bytes(width)
    if records.dtype != torch.uint8 or records.shape[-1] != wanted:
        raise ValueError(
            f"{form.name} rows of {width} numbers are uint8 [..., {wanted}], "
            f"found {str(records.dtype).removeprefix('torch.')} {list(records.shape)}"
        )
    packed, byte = records.split([form.element_bytes(width), width // form.block], -1)
    elements = packed.contiguous().view(torch.float8_e4m3fn) if form.element == "e4m3" else unpack_pairs(packed)
    scale = from_ue8m0(byte) if form.scale == "ue8m0" else byte.contiguous().view(torch.float8_e4m3fn).float()
    return _values(elements, scale, form).to(dtype)


def fake_quantise(x: torch.Tensor, form: RowFormat) -> torch.Tensor:
    """``decode_rows(encode_rows(x))`` in the dtype of ``x``, bit for bit, without the bytes."""
    if form.scale == "ue8m0" and form.element == "e4m3":
        # every product of quantised weights goes through here, so the scale is not taken apart to a byte and put together again
        blocks = x.float().unflatten(-1, (-1, form.block))
        scale = power_of_two_scale(blocks.abs().amax(-1, keepdim=True).clamp_min(form.floor), form.element_max)
        return (to_e4m3(blocks / scale).float() * scale).flatten(-2).to(x.dtype)
    elements, _, scale = _quantise(x, form)
    return _values(elements, scale, form).to(x.dtype)
