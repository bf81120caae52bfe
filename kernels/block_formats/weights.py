"""Weights as checkpoints store them: FP8 in square blocks, MXFP4 along the input.

- FP8: e4m3 ``[N, K]`` with ue8m0 scales ``[ceil(N / 32), ceil(K / 32)]``; edge blocks may be smaller.
- MXFP4: bytes ``[N, K / 2]``, two e2m1 each (even input in the low nibble), with ue8m0 scales ``[N, K / 32]``.

Scales are float8_e8m0fnu or its raw bytes (uint8). Reading FP4 as FP8 gives plausible nonsense, so dtype and shape of both
tensors are compared with the weight's logical shape before anything is decoded, and a NaN scale is refused by name.
``name`` is what messages call the weight. These run at load time and may wait for the device.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F

from deepinfer.errors import CheckpointError

from .grids import E2M1_MAX, E4M3_MAX, UE8M0_NAN, from_e2m1, from_ue8m0, pack_pairs, to_e2m1, to_e4m3, ue8m0_of, unpack_pairs

WEIGHT_BLOCK = 32
_SMALLEST = 2.0**-126
"""Blocks whose largest value is below ``_SMALLEST`` times the element's maximum are scaled as if it were that."""


def fp8_scale_shape(shape: tuple[int, int]) -> tuple[int, int]:
    """Shape of the scales of an FP8 weight ``[N, K]``."""
    return -(-shape[0] // WEIGHT_BLOCK), -(-shape[1] // WEIGHT_BLOCK)


def mxfp4_shapes(shape: tuple[int, int]) -> tuple[tuple[int, int], tuple[int, int]]:
    """Shapes of bytes and scales of an MXFP4 weight ``[N, K]``; ``ValueError`` unless K is a multiple of 32."""
    if shape[1] % WEIGHT_BLOCK:
        raise ValueError(f"MXFP4 weights have a multiple of {WEIGHT_BLOCK} inputs, not {shape[1]}")
    return (shape[0], shape[1] // 2), (shape[0], shape[1] // WEIGHT_BLOCK)


def _word(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _expect(name: str, what: str, tensor: torch.Tensor, dtypes: tuple[torch.dtype, ...], shape: tuple[int, int]) -> None:
    if tensor.dtype not in dtypes or tuple(tensor.shape) != shape:
        kinds = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise CheckpointError(f"{what} of {name!r} must be {kinds} {list(shape)}, found {_word(tensor)}: is it packed in another format?")


def _scale_bytes(name: str, scale: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    _expect(name, "scales", scale, (torch.float8_e8m0fnu, torch.uint8), shape)
    byte = scale.view(torch.uint8)
    if bool((byte == UE8M0_NAN).any()):
        raise CheckpointError(f"scales of {name!r} hold NaN (byte 255): the checkpoint is damaged or not in ue8m0")
    return byte


@cache
def _e4m3_values(device: torch.device) -> torch.Tensor:
    """float32 ``[256]``: the number of every code."""
    return torch.arange(256, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn).float()


@cache
def _e2m1_pairs(device: torch.device) -> torch.Tensor:
    """int64 ``[256]``: the two float32 numbers of every byte, as one item to be looked up."""
    codes = torch.arange(256, dtype=torch.uint8, device=device)[:, None]
    return from_e2m1(unpack_pairs(codes)).contiguous().view(torch.int64).view(-1)


def _look_up(table: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """Items of ``table`` in the order of ``codes`` uint8, flat: several times faster than taking numbers apart on a CPU."""
    return table.index_select(0, codes.reshape(-1).to(torch.int32))


def decode_fp8_weight(
    values: torch.Tensor, scale: torch.Tensor, shape: tuple[int, int], dtype: torch.dtype = torch.float32, name: str = "weight"
) -> torch.Tensor:
    """The weight ``[N, K] = shape`` in ``dtype``; ``CheckpointError`` for other packing or NaN in scales or values."""
    _expect(name, "values", values, (torch.float8_e4m3fn,), shape)
    spread = from_ue8m0(_scale_bytes(name, scale, fp8_scale_shape(shape)))
    codes = values.view(torch.uint8)
    # the one NaN of either sign has all other bits set; products of numbers and scales are none
    if bool(((codes & 0x7F) == 0x7F).any()):
        raise CheckpointError(f"values of {name!r} hold NaN: the checkpoint is damaged or not in e4m3")
    plain = _look_up(_e4m3_values(values.device), codes).view(shape)
    wide = spread.repeat_interleave(WEIGHT_BLOCK, 1)[:, : shape[1]]
    whole = shape[0] // WEIGHT_BLOCK
    plain[: whole * WEIGHT_BLOCK].view(whole, WEIGHT_BLOCK, shape[1]).mul_(wide[:whole, None])
    plain[whole * WEIGHT_BLOCK :].mul_(wide[whole:])
    return plain.to(dtype)


def encode_fp8_weight(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``[N, K]`` → e4m3 ``[N, K]`` and float8_e8m0fnu scales."""
    rows, columns = weight.shape
    down, across = fp8_scale_shape((rows, columns))
    padded = F.pad(weight.float(), (0, across * WEIGHT_BLOCK - columns, 0, down * WEIGHT_BLOCK - rows))
    blocks = padded.view(down, WEIGHT_BLOCK, across, WEIGHT_BLOCK)
    byte = ue8m0_of(blocks.abs().amax((1, 3)).clamp_min(E4M3_MAX * _SMALLEST), E4M3_MAX)
    values = to_e4m3(blocks / from_ue8m0(byte)[:, None, :, None]).view(padded.shape)
    return values[:rows, :columns].contiguous(), byte.view(torch.float8_e8m0fnu)


def decode_mxfp4_weight(
    packed: torch.Tensor, scale: torch.Tensor, shape: tuple[int, int], dtype: torch.dtype = torch.float32, name: str = "weight"
) -> torch.Tensor:
    """The weight ``[N, K] = shape`` in ``dtype`` from int8 or uint8 bytes; ``CheckpointError`` for other packing or NaN scales."""
    byte_shape, scale_shape = mxfp4_shapes(shape)
    _expect(name, "bytes", packed, (torch.int8, torch.uint8), byte_shape)
    scales = from_ue8m0(_scale_bytes(name, scale, scale_shape))
    plain = _look_up(_e2m1_pairs(packed.device), packed.view(torch.uint8)).view(torch.float32)
    plain.view(*scale_shape, WEIGHT_BLOCK).mul_(scales[..., None])
    return plain.view(shape).to(dtype)


def encode_mxfp4_weight(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``[N, K]`` → int8 bytes ``[N, K / 2]`` and float8_e8m0fnu scales ``[N, K / 32]``; ``ValueError`` for another K."""
    _, (rows, across) = mxfp4_shapes((weight.shape[0], weight.shape[1]))
    blocks = weight.float().view(rows, across, WEIGHT_BLOCK)
    byte = ue8m0_of(blocks.abs().amax(-1).clamp_min(E2M1_MAX * _SMALLEST), E2M1_MAX)
    codes = to_e2m1(blocks / from_ue8m0(byte)[..., None]).flatten(1)
    return pack_pairs(codes).view(torch.int8), byte.view(torch.float8_e8m0fnu)
