"""Block formats: every rounding against a plain search of the grid, the packed layout, and what is refused."""

from __future__ import annotations

from bisect import bisect
from fractions import Fraction
from math import ceil, log2

import numpy as np
import pytest
import torch

from deepinfer.errors import CheckpointError
from deepinfer.kernels.block_formats import (
    FP4_ROWS,
    FP8_ROWS,
    MXFP4_ROWS,
    RowFormat,
    decode_fp8_weight,
    decode_mxfp4_weight,
    decode_rows,
    encode_fp8_weight,
    encode_mxfp4_weight,
    encode_rows,
    fake_quantise,
    fp8_scale_shape,
)
from deepinfer.kernels.block_formats.grids import from_e2m1, from_ue8m0, to_e2m1, ue8m0_of

FORMS = (FP8_ROWS, FP4_ROWS, MXFP4_ROWS)
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
E4M3 = [float(value) for value in torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()]


def rows_of_every_kind(width: int, device: str = "cpu") -> torch.Tensor:
    """Rows as trained models have them: plain, with outliers, zero, tiny, huge, on ties and one element only."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(14, width, generator=generator)
    x[1, ::37] *= 1000
    x[2] = 0
    x[3] = -0.0
    x[4] *= 1e-7
    x[5] *= 2.0**-130
    x[6] *= 1e30
    x[7, 1:] = 0
    x[8] = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]).repeat(width // 8)
    x[9] = -x[8]
    x[10] = 448.0
    x[11] = torch.nextafter(torch.tensor(448.0), torch.tensor(500.0))
    x[12] = torch.nextafter(torch.tensor(6.0), torch.tensor(0.0))
    x[13] = 1e-10
    return x.to(device)


def nearest(value: Fraction, grid: list[float]) -> float:
    """Nearest of ``grid``; of two equally near the one of even code."""
    size = abs(value)
    above = bisect(grid, float(size))
    best = min(range(max(above - 2, 0), min(above + 1, len(grid))), key=lambda code: (abs(Fraction(grid[code]) - size), code % 2))
    return -grid[best] if value < 0 else grid[best]


def plainly(row: list[float], form: RowFormat) -> list[float]:
    """The format's rule in exact arithmetic, rounded to float32 only where the rule says so."""
    grid = E4M3 if form.element == "e4m3" else E2M1
    result: list[float] = []
    for start in range(0, len(row), form.block):
        block = row[start : start + form.block]
        largest = max(max(abs(value) for value in block), float(np.float32(form.floor)))
        if form.scale == "ue8m0":
            exponent = ceil(log2(largest / grid[-1])) - 1
            while Fraction(largest) > Fraction(grid[-1]) * Fraction(2) ** exponent:
                exponent += 1
            scale = 2.0**exponent
        else:
            quotient = float(np.float32(largest) / np.float32(grid[-1]))
            scale = nearest(min(Fraction(quotient), Fraction(448)), E4M3)
        for value in block:
            scaled = Fraction(float(np.float32(value) / np.float32(scale)))
            limit = Fraction(grid[-1])
            result.append(float(np.float32(nearest(min(max(scaled, -limit), limit), grid)) * np.float32(scale)))
    return result


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_values_follow_the_rule(form: RowFormat) -> None:
    x = rows_of_every_kind(64)
    found = decode_rows(encode_rows(x, form), form, 64)
    for row, got in zip(x.tolist(), found.tolist(), strict=True):
        assert got == plainly(row, form)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_equals_packing_and_unpacking(form: RowFormat, dtype: torch.dtype, device: str) -> None:
    x = rows_of_every_kind(512, device).to(dtype)
    rounded = fake_quantise(x, form)
    unpacked = decode_rows(encode_rows(x, form), form, 512, dtype)
    assert rounded.dtype == dtype
    kind = torch.int32 if dtype == torch.float32 else torch.int16
    assert torch.equal(rounded.view(kind), unpacked.view(kind))


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_bfloat16_keeps_every_value(form: RowFormat) -> None:
    x = rows_of_every_kind(512)
    exact = fake_quantise(x, form)
    assert torch.equal(exact.bfloat16().float(), exact)
    assert torch.equal(encode_rows(exact.bfloat16(), form), encode_rows(exact, form))


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_rows_do_not_depend_on_each_other(form: RowFormat) -> None:
    x = rows_of_every_kind(128)
    whole = encode_rows(x, form)
    assert all(torch.equal(encode_rows(row, form), record) for row, record in zip(x, whole, strict=True))
    assert torch.equal(encode_rows(x.view(2, 7, 128), form), whole.view(2, 7, -1))


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_no_value_is_read_by_the_host(form: RowFormat) -> None:
    """A meta tensor has no values: whatever asks for one fails."""
    x = torch.empty(3, 5, 512, dtype=torch.bfloat16, device="meta")
    record = encode_rows(x, form)
    assert record.shape == (3, 5, form.record_bytes(512))
    assert decode_rows(record, form, 512, torch.bfloat16).shape == fake_quantise(x, form).shape == x.shape


def test_record_sizes_are_the_published_ones() -> None:
    assert FP8_ROWS.record_bytes(512) == 528
    assert FP4_ROWS.record_bytes(512) == 288
    assert MXFP4_ROWS.record_bytes(128) == 68
    assert FP8_ROWS.record_bytes(256) == 264


def test_layout_is_elements_then_scales_with_the_even_element_low() -> None:
    x = torch.zeros(1, 32)
    x[0, :4] = torch.tensor([6.0, -0.5, 3.0, 1.0])
    assert encode_rows(x, MXFP4_ROWS)[0].tolist() == [0x97, 0x25, *[0] * 14, 127]
    # the second block of 16 is zero: its scale is the least e4m3, 2^-9
    assert encode_rows(x, FP4_ROWS)[0].tolist() == [0x97, 0x25, *[0] * 14, 0x38, 0x01]
    x[0, :4] = torch.tensor([448.0, -448.0, 1.0, 0.0])
    assert encode_rows(x, FP8_ROWS)[0].tolist() == [0x7E, 0xFE, 0x38, *[0] * 29, 127]


def test_floors_of_zero_rows() -> None:
    zero = torch.zeros(1, 32)
    assert encode_rows(zero, FP8_ROWS)[0, -1] == 105  # 2^ceil(log2(1e-4 / 448)) = 2^-22
    assert encode_rows(zero, MXFP4_ROWS)[0, -1] == 1  # 2^-126
    assert encode_rows(zero, FP4_ROWS)[0, -1] == 1  # e4m3 2^-9
    for form in FORMS:
        assert torch.equal(fake_quantise(zero, form), zero)
        assert torch.equal(torch.signbit(fake_quantise(-zero, form)), torch.ones(1, 32, dtype=torch.bool))


def test_an_outlier_past_the_scales_range_saturates() -> None:
    x = torch.full((1, 16), 1.0)
    x[0, 0] = 1e6
    assert fake_quantise(x, FP4_ROWS)[0, 0] == 6 * 448.0
    assert fake_quantise(x, FP4_ROWS)[0, 1] == 0


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_number_that_is_none_spoils_its_block_visibly(form: RowFormat, bad: float) -> None:
    x = torch.ones(1, 64)
    x[0, 3] = bad
    found = decode_rows(encode_rows(x, form), form, 64)[0]
    assert found[: form.block].isnan().all()
    assert torch.equal(found[form.block :], fake_quantise(torch.ones(64 - form.block), form))
    assert torch.equal(fake_quantise(x, form)[0].isnan(), found.isnan())


def test_every_tie_of_e2m1() -> None:
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    below, above = torch.nextafter(ties, torch.zeros(7)), torch.nextafter(ties, torch.full((7,), 9.0))
    assert from_e2m1(to_e2m1(ties)).tolist() == [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]
    assert from_e2m1(to_e2m1(below)).tolist() == E2M1[:7]
    assert from_e2m1(to_e2m1(above)).tolist() == E2M1[1:]
    assert from_e2m1(to_e2m1(-ties)).tolist() == [-0.0, -1.0, -1.0, -2.0, -2.0, -4.0, -4.0]


def test_every_scale_byte() -> None:
    byte = torch.arange(256, dtype=torch.uint8)
    found = from_ue8m0(byte)
    assert found[:255].tolist() == [2.0 ** (value - 127) for value in range(255)]
    assert found[255].isnan()
    assert torch.equal(ue8m0_of(found[1:247] * 448, 448.0), byte[1:247])
    assert torch.equal(ue8m0_of(torch.nextafter(found[1:247] * 448, torch.tensor(float("inf"))), 448.0), byte[2:248])


def test_wrong_records_are_refused() -> None:
    record = encode_rows(torch.ones(3, 512), FP8_ROWS)
    with pytest.raises(ValueError, match=r"uint8 \[\.\.\., 288\], found uint8 \[3, 528\]"):
        decode_rows(record, FP4_ROWS, 512)
    with pytest.raises(ValueError, match="found int8"):
        decode_rows(record.view(torch.int8), FP8_ROWS, 512)
    with pytest.raises(ValueError, match="multiple of 32 numbers, not 40"):
        encode_rows(torch.ones(1, 40), FP8_ROWS)


def test_fp8_weight_golden_bytes() -> None:
    stored = torch.zeros(32, 32, dtype=torch.uint8)
    stored[0, :8] = torch.tensor([0xD8, 0x71, 0xF2, 0x79, 0x70, 0x69, 0xF0, 0xE5], dtype=torch.uint8)
    scale = torch.full((1, 1), 0x73, dtype=torch.uint8)
    for form in (scale, scale.view(torch.float8_e8m0fnu)):
        found = decode_fp8_weight(stored.view(torch.float8_e4m3fn), form, (32, 32))
        assert found[0, :8].tolist() == [-0.00390625, 0.03515625, -0.0390625, 0.0703125, 0.03125, 0.017578125, -0.03125, -0.0126953125]


@pytest.mark.parametrize("shape", [(64, 96), (40, 72), (1, 5376), (32, 33)])
def test_fp8_weights_come_back(shape: tuple[int, int]) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    weight[0, 0] *= 1e4
    values, scale = encode_fp8_weight(weight)
    assert values.shape == shape and tuple(scale.shape) == fp8_scale_shape(shape)
    found = decode_fp8_weight(values, scale, shape)
    # the scale may halve when the largest rounds down to half of the range; the values may not move
    assert torch.equal(decode_fp8_weight(*encode_fp8_weight(found), shape), found)
    for row in range(0, shape[0], 32):
        for column in range(0, shape[1], 32):
            block, got = weight[row : row + 32, column : column + 32], found[row : row + 32, column : column + 32]
            # at most half of the last bit of three, or half of the smallest step where numbers are far below the largest
            step = block.abs().max() / 448 * 2 * 2.0**-9
            assert ((got - block).abs() <= torch.maximum(block.abs() / 16, step / 2)).all()


def test_mxfp4_weights_come_back() -> None:
    weight = torch.randn(8, 96, generator=torch.Generator().manual_seed(2))
    weight[3] = 0
    weight[4] *= 1e-30
    packed, scale = encode_mxfp4_weight(weight)
    assert packed.dtype == torch.int8 and packed.shape == (8, 48) and scale.shape == (8, 3)
    found = decode_mxfp4_weight(packed, scale, (8, 96))
    assert torch.equal(found, fake_quantise(weight, MXFP4_ROWS))
    assert torch.equal(decode_mxfp4_weight(*encode_mxfp4_weight(found), (8, 96)), found)


def test_weights_of_another_packing_are_refused() -> None:
    weight = torch.randn(64, 128, generator=torch.Generator().manual_seed(3))
    values, scale = encode_fp8_weight(weight)
    packed, scales = encode_mxfp4_weight(weight)
    with pytest.raises(CheckpointError, match=r"values of 'w1' must be float8_e4m3fn \[64, 128\], found int8 \[64, 64\]"):
        decode_fp8_weight(packed, scales, (64, 128), name="w1")
    with pytest.raises(CheckpointError, match=r"bytes of 'w1' must be int8 or uint8 \[64, 64\], found float8_e4m3fn"):
        decode_mxfp4_weight(values, scale, (64, 128), name="w1")
    # FP4 bytes seen as FP8 have half the columns, whatever their dtype says
    with pytest.raises(CheckpointError, match="another format"):
        decode_fp8_weight(packed.view(torch.float8_e4m3fn), scales, (64, 128))
    with pytest.raises(CheckpointError, match=r"scales of 'weight' must be .* \[2, 4\], found float8_e8m0fnu \[64, 4\]"):
        decode_fp8_weight(values, scales, (64, 128))
    with pytest.raises(CheckpointError, match="found float32"):
        decode_fp8_weight(values, scale.float(), (64, 128))


def test_nan_in_scales_or_values_is_refused() -> None:
    weight = torch.randn(64, 64, generator=torch.Generator().manual_seed(4))
    values, scale = encode_fp8_weight(weight)
    packed, scales = encode_mxfp4_weight(weight)
    for broken in (scale, scales):
        broken.view(torch.uint8)[1, 1] = 255
    with pytest.raises(CheckpointError, match="scales of 'a' hold NaN"):
        decode_fp8_weight(values, scale, (64, 64), name="a")
    with pytest.raises(CheckpointError, match="scales of 'b' hold NaN"):
        decode_mxfp4_weight(packed, scales, (64, 64), name="b")
    scale.view(torch.uint8)[1, 1] = 120
    values.view(torch.uint8)[5, 5] = 0x7F
    with pytest.raises(CheckpointError, match="values of 'a' hold NaN"):
        decode_fp8_weight(values, scale, (64, 64), name="a")
