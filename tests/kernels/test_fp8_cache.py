"""Keys and values in 8-bit floats: what is stored, what is read, and attention over it."""

from __future__ import annotations

import pytest
import torch

from deepinfer.kernels.fp8_cache import FP8, CacheScales, decode, encode
from deepinfer.kernels.kv_write import kv_write
from deepinfer.kernels.paged_attention import make_plan, paged_attention
from deepinfer.kernels.rope_kv import rope_kv

CODES = torch.arange(256, dtype=torch.uint8)
NAN = (CODES & 0x7F) == 0x7F
SCALES = (1.0, 0.25, 0.0371, 3.7)


def value_of(code: int) -> float:
    """By the definition of e4m3: 4 bits of exponent, biased by 7, 3 of fraction; the largest code of either sign is NaN."""
    sign, exponent, fraction = (-1.0 if code & 128 else 1.0), code >> 3 & 15, code & 7
    if code & 127 == 127:
        return float("nan")
    return sign * (2.0 ** (exponent - 7) * (1 + fraction / 8) if exponent else 2.0**-6 * fraction / 8)


def test_every_code_is_the_number_it_stands_for(device: str) -> None:
    want = torch.tensor([value_of(code) for code in range(256)], device=device)
    for stored in (CODES.to(device), CODES.to(device).view(FP8), CODES.to(device).view(16, 16).view(FP8)):
        got = decode(stored)
        assert got.dtype == torch.float32 and got.shape == stored.shape
        assert torch.equal(got.flatten().nan_to_num(1e9), want.nan_to_num(1e9))
    for wide in (torch.bfloat16, torch.float16):
        assert torch.equal(want[~NAN.to(device)].to(wide).float(), want[~NAN.to(device)]), "16 bits hold every number exactly"
    assert torch.equal(encode(want).view(torch.uint8)[~NAN.to(device)], CODES.to(device)[~NAN.to(device)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_nearest_number_is_stored_and_of_two_the_even_one(dtype: torch.dtype, device: str) -> None:
    numbers = torch.tensor([value_of(code) for code in range(127)], dtype=torch.float64)  # ascending with the code
    middles = (numbers[1:] + numbers[:-1]) / 2
    generator = torch.Generator().manual_seed(3)
    x = torch.cat(
        (torch.randn(20000, generator=generator), torch.randn(20000, generator=generator) * 100, middles.float(), numbers.float())
    )
    x = torch.cat((x, -x)).to(dtype)
    distance = (x.double().abs().clamp(max=448)[:, None] - numbers).abs()
    nearest = distance.amin(1, keepdim=True)
    near = distance == nearest
    even = near & (torch.arange(127) % 2 == 0)
    want = torch.where(near.sum(1) > 1, even.int().argmax(1), near.int().argmax(1))
    assert (near.sum(1) > 1).any(), "ties are among them"
    got = encode(x.to(device)).view(torch.uint8).cpu().long()
    assert torch.equal(got & 127, want) and torch.equal(got >> 7, (torch.signbit(x)).long())


@pytest.mark.parametrize("scale", SCALES)
def test_scales_divide_and_what_is_too_large_is_the_largest(scale: float, device: str) -> None:
    x = torch.randn(1000, generator=torch.Generator().manual_seed(1)).to(device) * 30
    assert torch.equal(decode(encode(x, scale)), decode(encode(x * torch.tensor(1 / scale, dtype=torch.float32), 1.0)))
    relative = (decode(encode(x, scale)).double() * scale - x.double()).abs() / x.double().abs().clamp(min=2.0**-6 * scale)
    assert relative[x.abs() < 448 * scale].amax() < 2.0**-4 * (1 + 1e-6)
    most = torch.finfo(torch.float32).max
    large = torch.tensor([448.0, 449.0, 464.0, 480.0, 1e9, most, torch.inf], device=device) * scale
    assert (decode(encode(large, scale)) == 448).all() and (decode(encode(-large, scale)) == -448).all()
    assert decode(encode(torch.tensor([torch.nan], device=device), scale)).isnan().all()


def test_entries_are_written_encoded_and_no_others(device: str) -> None:
    cache = torch.zeros(4, 16, 2, 32, device=device).to(FP8)
    rows = torch.randn(5, 2, 32, generator=torch.Generator().manual_seed(0)).to(device)
    slots = torch.tensor([17, 40, 3, 63, 22], device=device)
    kv_write(cache, rows, slots, 0.5)
    flat = cache.flatten(0, 1).view(torch.uint8)
    assert torch.equal(flat[slots], encode(rows, 0.5).view(torch.uint8))
    others = torch.ones(64, dtype=torch.bool, device=device)
    others[slots] = False
    assert not flat[others].any()


@pytest.mark.parametrize("norm", [False, True])
def test_rotated_keys_are_those_of_a_wide_cache_encoded(norm: bool, device: str) -> None:
    generator = torch.Generator().manual_seed(2)
    heads, kv_heads, d, rows = 4, 2, 32, 9
    qkv = (torch.randn(rows, (heads + 2 * kv_heads) * d, generator=generator) * 3).bfloat16().to(device)
    angle = torch.rand(rows, d // 2, generator=generator).to(device) * 6
    slots = torch.randperm(32, generator=generator)[:rows].to(device) + 16
    weights = torch.rand(2, d, generator=generator).to(device) + 0.5 if norm else None
    scales, found = CacheScales(0.03, 1.7), []
    for kind in (torch.bfloat16, FP8):
        q = torch.empty(rows, heads, d, dtype=torch.bfloat16, device=device)
        k, v = (torch.zeros(3, 16, kv_heads, d, device=device).to(kind) for _ in range(2))
        rope_kv(qkv, angle.cos(), angle.sin(), slots, q, k, v, weights, 1e-6, scales)
        found.append(
            (
                q,
                k.flatten(0, 1).view(torch.uint8 if kind == FP8 else kind)[slots],
                v.flatten(0, 1).view(torch.uint8 if kind == FP8 else kind)[slots],
            )
        )
    (q, k, v), (q8, k8, v8) = found
    assert torch.equal(q, q8)
    assert torch.equal(encode(k, scales.key).view(torch.uint8), k8) and torch.equal(encode(v, scales.value).view(torch.uint8), v8)


# Attention

HEADS, KV_HEADS, DIM, PAGE = 6, 2, 32, 16


class Pages:
    """Keys and values of one sequence on shuffled pages of three caches: 8-bit, and two wide ones of the numbers it holds. What is not
    written is NaN in all of them."""

    def __init__(self, length: int, seed: int, device: str) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.length = length
        self.q = (2 * torch.randn(length, HEADS, DIM, generator=generator)).bfloat16().to(device)
        self.given = [torch.randn(length, KV_HEADS, DIM, generator=generator).to(device) for _ in range(2)]
        count = -(-length // PAGE)
        order = 1 + torch.randperm(count, generator=generator)
        self.table = order[None].to(device=device, dtype=torch.int32)
        at = torch.arange(length)
        slots = (order[at // PAGE] * PAGE + at % PAGE).to(device)
        self.narrow = [torch.full((count + 1, PAGE, KV_HEADS, DIM), torch.nan, device=device).to(FP8) for _ in range(2)]
        for cache, rows in zip(self.narrow, self.given, strict=True):
            kv_write(cache, rows, slots)
        self.wide = {dtype: [decode(cache).to(dtype) for cache in self.narrow] for dtype in (torch.float32, torch.bfloat16, torch.float16)}

    def run(self, caches: list[torch.Tensor], chunk: int, window: int | None, scale: float) -> torch.Tensor:
        """All rows, ``chunk`` at a time."""
        out = []
        for start in range(0, self.length, chunk):
            end = min(start + chunk, self.length)
            position = torch.arange(start, end, device=self.q.device)
            plan = make_plan(position, self.table, [0, end - start], [end], int(end - start == 1), PAGE)
            out.append(paged_attention(self.q[start:end], *caches, plan, scale, window))
        return torch.cat(out)


@pytest.mark.parametrize("window", [None, 40])
def test_attention_is_that_over_a_wide_cache_of_the_stored_numbers(window: int | None, device: str) -> None:
    """Bit for bit, with the scale of keys in the scores' factor; and no cut changes a bit of it."""
    pages = Pages(300, 4, device)
    for scale in (DIM**-0.5, DIM**-0.5 * 0.0371):
        want = pages.run(pages.narrow, 300, window, scale)
        assert not want.isnan().any()
        for dtype, wide in pages.wide.items():
            assert torch.equal(pages.run(wide, 300, window, scale), want), dtype
        for chunk in (1, 7, 64):
            assert torch.equal(pages.run(pages.narrow, chunk, window, scale), want), chunk


def test_the_error_is_what_rounding_explains(device: str) -> None:
    """Against float64 attention of the numbers before they were stored. Each key and value is off by 2^-4 of itself at most (2^-10 below
    2^-6), so a score by ``e``, a weight by a factor of ``exp(2 e)`` either way, and the answer by what follows."""
    pages = Pages(200, 5, device)
    got = pages.run(pages.narrow, 200, None, DIM**-0.5).double()
    q = pages.q.double()
    k, v = (x.double().repeat_interleave(HEADS // KV_HEADS, 1) for x in pages.given)
    off_k, off_v = (torch.maximum(x.abs() * 2.0**-4, torch.tensor(2.0**-10, device=device)) for x in (k, v))
    seen = torch.ones(200, 200, dtype=torch.bool, device=device).tril()

    def scores(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.einsum("qhd,khd->hqk", a, b) * DIM**-0.5

    weight = scores(q, k).masked_fill(~seen, -torch.inf).softmax(-1)
    e = scores(q.abs(), off_k).masked_fill(~seen, 0.0).amax(-1, keepdim=True)
    exact = torch.einsum("hqk,khd->qhd", weight, v)
    bound = torch.einsum("hqk,khd->qhd", weight * ((2 * e).exp() - 1), v.abs() + off_v) + torch.einsum("hqk,khd->qhd", weight, off_v)
    error = (got - exact).abs()
    assert (error <= bound + 1e-5).all()
    assert 0.002 < error.square().mean().sqrt() / exact.square().mean().sqrt() < 0.06, "about 5 % where queries are twice as large as keys"
