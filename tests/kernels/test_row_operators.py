"""Linear, norm, activation, rotation and KV writes: right values, and bits that do not depend on the batch."""

from __future__ import annotations

import math

import pytest
import torch

from deepinfer.kernels.kv_write import kv_write
from deepinfer.kernels.linear import linear, pack_linear, row_bucket, row_classes
from deepinfer.kernels.rms_norm import rms_norm
from deepinfer.kernels.rope import RopeParameters, RopeTable, apply_rope, rotate_pairs
from deepinfer.kernels.swiglu import swiglu
from invariance_kit import depends_on_batch

DTYPES = (torch.float32, torch.bfloat16)


def random(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device=device, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(64, 96), (576, 960), (1536, 576), (48, 1000)])
def test_linear_rows_do_not_depend_on_the_batch(dtype: torch.dtype, shape: tuple[int, int], device: str) -> None:
    width, out = shape
    weight, bias = random(out, width, dtype=dtype, device=device), random(out, dtype=dtype, device=device, seed=1)
    x = random(256, width, dtype=dtype, device=device, seed=2)
    packed = pack_linear(weight, bias)
    assert depends_on_batch(packed, x) == []
    exact = x.double() @ weight.double().T + bias.double()
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(packed(x).double(), exact, rtol=tolerance, atol=tolerance * width**0.5)


def test_linear_reference_equals_the_packed_form_in_float32() -> None:
    weight, x = random(96, 64), random(100, 64, seed=1)
    packed = pack_linear(weight)
    assert torch.equal(linear(x, weight, classes=packed.classes), packed(x))


def test_the_checker_finds_a_batch_dependent_operator() -> None:
    """Negative control: were the checker blind, the tests above would prove nothing."""

    def centred(x: torch.Tensor) -> torch.Tensor:
        return x - x.mean(0, keepdim=True) * 1e-3

    assert depends_on_batch(centred, random(256, 64))


def test_row_counts_with_other_bits_are_not_used() -> None:
    """A library that computes some row counts in another order is caught by the census, and those counts are avoided."""
    weight = random(32, 64)

    def moody(x: torch.Tensor) -> torch.Tensor:
        out = x @ weight.T
        return out + 1e-6 if x.shape[0] in (32, 64) else out

    assert row_classes(moody, 64, torch.float32, torch.device("cpu"), 128) == (128, 16, 8)


def test_row_buckets_are_few_and_hold_their_rows() -> None:
    buckets = [row_bucket(n) for n in range(1, 300)]
    assert sorted(set(buckets)) == [8, 16, 32, 64, 128, 192, 256, 320]
    assert all(bucket >= n for n, bucket in enumerate(buckets, 1))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm(dtype: torch.dtype, device: str) -> None:
    x, weight = random(256, 576, dtype=dtype, device=device), random(576, device=device, seed=1)
    # rows come padded on the way through a model: that is part of how a GPU keeps the bits
    assert depends_on_batch(lambda rows: rms_norm(rows, weight, 1e-5), x, (8, 16, 32, 64, 128) if device == "cpu" else (32, 64, 128)) == []
    wide = x.double()
    exact = wide / torch.sqrt(wide.square().mean(-1, keepdim=True) + 1e-5) * weight.double()
    torch.testing.assert_close(rms_norm(x, weight, 1e-5, torch.float32).double(), exact, rtol=1e-5, atol=1e-5)
    assert rms_norm(x, weight, 1e-5).dtype == dtype


@pytest.mark.parametrize("dtype", DTYPES)
def test_swiglu(dtype: torch.dtype, device: str) -> None:
    x = random(256, 128, dtype=dtype, device=device)
    assert depends_on_batch(swiglu, x) == []
    gate, up = x.double().chunk(2, -1)
    tolerance = 1e-6 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(swiglu(x).double(), gate * torch.sigmoid(gate) * up, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("threads", [2, 3, 5])
@pytest.mark.parametrize("dtype", DTYPES)
def test_swiglu_gives_a_number_the_same_bits_in_every_threads_piece(dtype: torch.dtype, threads: int, device: str) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for width in (1000, 1530, 4864):
            assert depends_on_batch(swiglu, random(64, 2 * width, dtype=dtype, device=device), (1, 3, 8, 32)) == [], width
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("kind", ["default", "dynamic", "yarn"])
def test_rotation_depends_on_the_position_only(kind: str, device: str) -> None:
    table = RopeTable(RopeParameters(64, rope_type=kind, factor=4.0, original_max_position=128), torch.device(device))
    positions = torch.randperm(256, generator=torch.Generator().manual_seed(0)).to(device)

    def op(rows: torch.Tensor) -> torch.Tensor:
        cos, sin = table.cos_sin(rows)
        ones = torch.linspace(-1, 1, 64, device=device).expand(rows.shape[0], 3, 64).contiguous()
        return apply_rope(ones, cos, sin)

    assert depends_on_batch(op, positions) == []


def test_rotation_keeps_lengths_and_relative_angles() -> None:
    table = RopeTable(RopeParameters(32), torch.device("cpu"))
    q, k = random(1, 1, 32), random(1, 1, 32, seed=1)

    def at(x: torch.Tensor, position: int) -> torch.Tensor:
        return apply_rope(x, *table.cos_sin(torch.tensor([position])))

    torch.testing.assert_close(at(q, 77).norm(), q.norm())
    torch.testing.assert_close((at(q, 90) * at(k, 77)).sum(), (at(q, 13) * at(k, 0)).sum(), rtol=1e-4, atol=1e-4)


def test_pairs_turn_as_complex_numbers(device: str) -> None:
    """The last 16 of 24 channels, three heads; positions beyond the trained length; back again by the negative angle."""
    table = RopeTable(
        RopeParameters(16, 160000.0, "yarn", 16.0, 256, beta_fast=32.0, beta_slow=1.0, attention_factor=1.0), torch.device(device)
    )
    positions = torch.tensor([0, 1, 255, 256, 4095, 70000], device=device)
    x = random(6, 3, 24, device=device)
    cos, sin = table.pair_cos_sin(positions)
    turned = rotate_pairs(x, cos, sin)
    assert torch.equal(turned[..., :8], x[..., :8]) and torch.equal(turned[0], x[0])

    # the frequencies from the definition: blended between pairs lo and hi of the band
    def dimension(rotations: float) -> float:
        return 16 * math.log(256 / (2 * math.pi * rotations)) / (2 * math.log(160000.0))

    low, high = max(math.floor(dimension(32.0)), 0), min(math.ceil(dimension(1.0)), 15)
    for row, position in enumerate(positions.tolist()):
        for pair in range(8):
            ramp = min(max((pair - low) / max(high - low, 1e-3), 0.0), 1.0)
            plain = 160000.0 ** (-2 * pair / 16)
            angle = position * (plain / 16 * ramp + plain * (1 - ramp))
            for head in range(3):
                a, b = x[row, head, 8 + 2 * pair : 10 + 2 * pair].tolist()
                exact = complex(a, b) * complex(math.cos(angle), math.sin(angle))
                found = turned[row, head, 8 + 2 * pair : 10 + 2 * pair].tolist()
                # a float32 angle of position 70,000 is good to 4e-3
                assert found == pytest.approx([exact.real, exact.imag], rel=1e-4, abs=1e-5 + 3e-7 * position)
    torch.testing.assert_close(rotate_pairs(turned, cos, -sin), x)
    single = rotate_pairs(x[:, 0], cos, sin)  # rows without heads
    assert torch.equal(single, turned[:, 0])
    low_precision = rotate_pairs(x.bfloat16(), cos, sin)
    assert torch.equal(low_precision, rotate_pairs(x.bfloat16().float(), cos, sin).bfloat16())
    assert (
        depends_on_batch(
            lambda rows: rotate_pairs(x[:1].expand(rows.shape[0], 3, 24), *table.pair_cos_sin(rows)), torch.arange(256, device=device)
        )
        == []
    )


def test_an_unknown_rope_type_is_refused() -> None:
    with pytest.raises(ValueError, match="longrope"):
        RopeTable(RopeParameters(32, rope_type="longrope"), torch.device("cpu"))


def test_kv_write_stores_rows_at_their_slots_and_nothing_else(device: str) -> None:
    cache = torch.zeros(4, 8, 2, 4, dtype=torch.bfloat16, device=device)
    rows = random(3, 2, 4, device=device)
    slots = torch.tensor([-1, 9, 30], device=device)
    kv_write(cache, rows, slots.clamp_min(0))
    assert torch.equal(cache[1, 1], rows[1].bfloat16())
    assert torch.equal(cache[3, 6], rows[2].bfloat16())
    cache[1, 1] = cache[3, 6] = 0
    assert not cache[1:].any()  # −1 went to the null page
