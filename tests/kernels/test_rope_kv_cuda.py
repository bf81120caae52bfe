"""Rotation with the write to the caches: right values at the right entries, rows that do not depend on their batch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from deepinfer.errors import KernelBuildError
from deepinfer.kernels.fp8_cache import FP8, CacheScales, encode
from deepinfer.kernels.rope import RopeParameters, RopeTable
from deepinfer.kernels.rope_kv import rope_kv
from deepinfer.kernels.rope_kv.cuda import RopeKv, block_heads_of, lanes_of, programs_for
from deepinfer.kernels.toolchain.shapes import (
    LLAMA_8B,
    QWEN3_8B,
    QWEN3_8B_KV8,
    SMOLLM2_1_7B,
    SMOLLM2_135M,
    SMOLLM2_135M_KV8,
    ModelShape,
    run_dtype,
)
from kernel_kit import (
    DTYPES,
    KERNEL_PLACES,
    ONE_ROUNDING,
    PLACES,
    check_machine_code,
    device_of,
    kept_as,
    kernels_at,
    lowered,
    machine_accesses,
    random_rows,
    read_before_waiting,
    replayed,
)

EPS = 1e-6
PAGE_TOKENS = 16
OTHER_HEADS = [ModelShape(1, 4, 2, d, 1, 1, page_tokens=PAGE_TOKENS, qk_norm=norm) for d in (64, 96, 128, 256) for norm in (False, True)]


def name(shape: ModelShape) -> str:
    return f"{shape.heads}+{shape.kv_heads}x{shape.head_dim}{'n' if shape.qk_norm else ''}"


@dataclass
class Case:
    """Rows and what they are rotated by; ``run`` fills new caches that held ones."""

    place: str
    shape: ModelShape
    dtype: torch.dtype
    qkv: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    slots: torch.Tensor
    norm: torch.Tensor | None

    @property
    def pages(self) -> int:
        return 2 + -(-256 // PAGE_TOKENS)

    def rows(self, chosen: slice) -> Case:
        parts = (x[chosen].contiguous() for x in (self.qkv, self.cos, self.sin, self.slots))
        return Case(self.place, self.shape, self.dtype, *parts, self.norm)

    def run(self, after: bool = True) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        s, device = self.shape, self.qkv.device
        kept = kept_as(self.place, self.dtype)
        q = torch.empty(self.qkv.shape[0], s.heads, s.head_dim, dtype=kept, device=device)
        k, v = (torch.ones(self.pages, PAGE_TOKENS, s.kv_heads, s.head_dim, dtype=kept, device=device) for _ in range(2))
        args = (self.qkv, self.cos, self.sin, self.slots, q, k, v)
        if self.place == "reference":
            rope_kv(*args, self.norm, EPS)
        else:
            programs = RopeKv.programs(s.heads, s.kv_heads, s.head_dim, run_dtype(self.dtype), s.qk_norm)
            kernels = kernels_at(self.place, programs)
            op = RopeKv(s.heads, s.kv_heads, s.head_dim, self.dtype, device, s.qk_norm, EPS, after, kernels)
            op(*args, self.norm)
        return q, k, v


def case_of(place: str, shape: ModelShape, dtype: torch.dtype, rows: int) -> Case:
    generator = torch.Generator().manual_seed(7)
    device = device_of(place)
    qkv = random_rows(rows, shape.q_size + 2 * shape.kv_size, place=place, dtype=dtype)
    positions = torch.randint(0, 9000, (rows,), generator=generator)
    cos, sin = RopeTable(RopeParameters(shape.head_dim), torch.device("cpu")).pair_cos_sin(positions)
    slots = torch.randperm(256, generator=generator)[:rows] + PAGE_TOKENS
    norm = random_rows(2, shape.head_dim, place=place, seed=3) if shape.qk_norm else None
    return Case(place, shape, dtype, qkv, cos.to(device), sin.to(device), slots.to(device), norm)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [(SMOLLM2_135M, torch.bfloat16), (SMOLLM2_135M, torch.float16), *((shape, torch.bfloat16) for shape in OTHER_HEADS)],
    ids=lambda x: name(x) if isinstance(x, ModelShape) else str(x),
)
@pytest.mark.parametrize("place", PLACES)
def test_values(place: str, shape: ModelShape, dtype: torch.dtype) -> None:
    case = case_of(place, shape, dtype, 5)
    q, k, v = (x.double() for x in case.run())
    heads, turning = shape.heads, shape.heads + shape.kv_heads
    split = case.qkv.double().view(5, turning + shape.kv_heads, shape.head_dim)
    x = split[:, :turning]
    if case.norm is not None:
        weight = case.norm.double().repeat_interleave(torch.tensor([shape.heads, shape.kv_heads], device=x.device), 0)
        x = x / torch.sqrt(x.square().mean(-1, keepdim=True) + EPS) * weight
    first, second = x.chunk(2, -1)
    cos, sin = case.cos.double()[:, None], case.sin.double()[:, None]
    exact = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
    # float32 products of numbers up to some 5 may cancel; then one rounding
    tolerance = {"rtol": ONE_ROUNDING[kept_as(place, dtype)], "atol": 1e-5}
    torch.testing.assert_close(q, exact[:, :heads], **tolerance)
    torch.testing.assert_close(k.flatten(0, 1)[case.slots], exact[:, heads:], **tolerance)
    assert torch.equal(v.flatten(0, 1)[case.slots], split[:, turning:]), "values are copied"
    for cache in (k, v):
        others = torch.ones(cache.shape[0] * PAGE_TOKENS, dtype=torch.bool, device=cache.device)
        others[case.slots] = False
        assert (cache.flatten(0, 1)[others] == 1).all(), "no other entry is written"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [SMOLLM2_135M], ids=name)
@pytest.mark.parametrize("place", KERNEL_PLACES)
def test_without_a_norm_the_bits_are_those_of_the_reference(place: str, shape: ModelShape, dtype: torch.dtype) -> None:
    """Products and sums of single numbers, never fused."""
    case = case_of(place, shape, dtype, 64)
    found = case.run()
    expected = Case("reference", shape, kept_as(place, dtype), case.qkv, case.cos, case.sin, case.slots, None).run()
    for x, y in zip(found, expected, strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("shape", [SMOLLM2_135M, OTHER_HEADS[5]], ids=name)
@pytest.mark.parametrize("place", KERNEL_PLACES)
def test_rows_do_not_depend_on_the_batch(place: str, shape: ModelShape) -> None:
    case = case_of(place, shape, torch.float16, 256)
    q, k, v = case.run()
    for count in (1, 3, 64):
        for start in (0, 100, 256 - count):
            part = case.rows(slice(start, start + count))
            some_q, some_k, some_v = part.run()
            assert torch.equal(some_q, q[start : start + count])
            for some, all_rows in ((some_k, k), (some_v, v)):
                assert torch.equal(some.flatten(0, 1)[part.slots], all_rows.flatten(0, 1)[part.slots])


@pytest.mark.parametrize("shape", [SMOLLM2_135M, OTHER_HEADS[5]], ids=name)
@pytest.mark.parametrize("place", PLACES)
def test_padding_rows_write_to_the_null_page_only(place: str, shape: ModelShape) -> None:
    case = case_of(place, shape, torch.float16, 8)
    q, k, v = case.rows(slice(0, 5)).run()
    case.qkv[5:], case.cos[6:] = float("nan"), float("inf")
    entries = case.pages * PAGE_TOKENS
    case.slots[5:] = torch.tensor([-1, entries, 2**40])
    padded_q, padded_k, padded_v = case.run()
    assert torch.equal(padded_q[:5], q)
    for padded, clean in ((padded_k, k), (padded_v, v)):
        assert torch.equal(padded.flatten(0, 1)[1:], clean.flatten(0, 1)[1:])
        assert padded[0, 0].isnan().any()


def test_heads_are_shared_out_in_whole_warps() -> None:
    for head_dim, lanes in ((16, 1), (32, 2), (64, 4), (80, 8), (96, 8), (128, 8), (192, 16), (256, 16), (512, 32)):
        assert lanes_of(head_dim) == lanes
        for heads in range(3, 200):
            threads = block_heads_of(heads, lanes) * lanes
            assert threads % 32 == 0 and threads <= 128
    for head_dim in (72, 1024):
        with pytest.raises(KernelBuildError, match="16 bytes"):
            RopeKv.programs(8, 2, head_dim, "bfloat16")


@pytest.mark.parametrize("shape", [SMOLLM2_1_7B, LLAMA_8B, OTHER_HEADS[2], OTHER_HEADS[6]], ids=name)
def test_accesses_are_wide(shape: ModelShape) -> None:
    (program,) = programs_for(shape)
    assert lowered(program).threads % 32 == 0
    # halves of a head, of cos and sin and perhaps of the weights, and the slot
    assert machine_accesses(program) == {"LDG": [64] + [128] * (10 if shape.qk_norm else 6), "STG": [128] * 6}


@pytest.mark.parametrize("shape", [SMOLLM2_135M, QWEN3_8B, OTHER_HEADS[3]], ids=name)
def test_machine_code(shape: ModelShape, tmp_path: Path) -> None:
    (program,) = programs_for(shape)
    check_machine_code(program, tmp_path)
    # Attention reads older keys before it waits for this one: all that they follow from has to be there by the time it may start.
    assert read_before_waiting(program, late=True) == ({"weights"} if shape.qk_norm else set())


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [SMOLLM2_135M, QWEN3_8B, LLAMA_8B], ids=name)
def test_overlapping_and_captured_launches_give_the_bits_of_separate_ones(shape: ModelShape) -> None:
    """A chain in which each launch rotates what the one before wrote, two rows of memory by turns."""
    case = case_of("cuda", shape, torch.bfloat16, 256)
    device, size = case.qkv.device, case.qkv.shape[1]
    answers = []
    for after in (False, True):
        op = RopeKv(shape.heads, shape.kv_heads, shape.head_dim, torch.bfloat16, device, shape.qk_norm, EPS, after)
        both = torch.zeros(2, 256 * size, dtype=torch.bfloat16, device=device)
        caches = torch.zeros(2, case.pages, PAGE_TOKENS, shape.kv_heads, shape.head_dim, dtype=torch.bfloat16, device=device)

        def chain(op: RopeKv = op, both: torch.Tensor = both, caches: torch.Tensor = caches) -> None:
            torch.mul(case.qkv.flatten(), 1, out=both[0])
            torch.mul(case.qkv.flatten(), 0, out=both[1])
            qkv = both.view(2, 256, size)
            q = both[:, : 256 * shape.q_size].view(2, 256, shape.heads, shape.head_dim)
            for _ in range(20):
                for one, other in ((0, 1), (1, 0)):
                    op(qkv[one], case.cos, case.sin, case.slots, q[other], caches[0], caches[1], case.norm)

        chain()
        answers.append((both.clone(), caches.clone()))
        replay = replayed(chain)
        both.zero_()
        caches.zero_()
        replay()
        answers.append((both, caches))
    for answer in answers[1:]:
        assert torch.equal(answer[0], answers[0][0]) and torch.equal(answer[1], answers[0][1])


# Caches in 8 bits

SCALES = CacheScales(0.037, 1.9)


def run_fp8(case: Case, scales: CacheScales = SCALES) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, and keys and values as bytes, of new caches that held zeros."""
    s, device = case.shape, case.qkv.device
    q = torch.empty(case.qkv.shape[0], s.heads, s.head_dim, dtype=kept_as(case.place, case.dtype), device=device)
    k, v = (torch.zeros(case.pages, PAGE_TOKENS, s.kv_heads, s.head_dim, dtype=torch.uint8, device=device).view(FP8) for _ in range(2))
    programs = RopeKv.programs(s.heads, s.kv_heads, s.head_dim, run_dtype(case.dtype), s.qk_norm, True)
    op = RopeKv(s.heads, s.kv_heads, s.head_dim, case.dtype, device, s.qk_norm, EPS, True, kernels_at(case.place, programs), True)
    written = torch.tensor([1 / scales.key, 1 / scales.value], device=device)
    op(case.qkv, case.cos, case.sin, case.slots, q, k, v, case.norm, written)
    return q, k.view(torch.uint8), v.view(torch.uint8)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [(SMOLLM2_135M, torch.bfloat16), (SMOLLM2_135M, torch.float16), (OTHER_HEADS[5], torch.bfloat16), (OTHER_HEADS[2], torch.bfloat16)],
    ids=lambda x: name(x) if isinstance(x, ModelShape) else str(x),
)
@pytest.mark.parametrize("place", KERNEL_PLACES)
def test_8_bit_caches_hold_what_wide_ones_would_encoded(place: str, shape: ModelShape, dtype: torch.dtype) -> None:
    """Every entry, with numbers from far below the smallest to far above the largest; entries of no row stay as they are."""
    case = case_of(place, shape, dtype, 64)
    case.qkv *= torch.logspace(-4, 3, 64, base=10, device=case.qkv.device).to(case.qkv.dtype)[:, None]
    q, k, v = case.run()
    q8, k8, v8 = run_fp8(case)
    assert torch.equal(q, q8)
    for wide, narrow, scale in ((k, k8, SCALES.key), (v, v8, SCALES.value)):
        wanted = encode(wide.flatten(0, 1)[case.slots], scale).view(torch.uint8)
        found = narrow.flatten(0, 1)
        assert torch.equal(found[case.slots], wanted)
        if wide is v or not shape.qk_norm:  # norms keep keys small
            assert {0, 0x7E, 0xFE} <= set(wanted.unique().tolist()), "both ends are met"
        found[case.slots] = 0
        assert not found.any()
    case.qkv[3] = torch.nan
    assert all((cache.flatten(0, 1)[case.slots[3]] & 0x7F == 0x7F).all() for cache in run_fp8(case)[1:]), "NaN stays NaN"


@pytest.mark.parametrize("place", KERNEL_PLACES)
def test_every_number_is_rounded_to_the_nearest(place: str) -> None:
    """All of float16, as values, which are not rotated."""
    shape = OTHER_HEADS[0]
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.float16)
    rows = len(every) // shape.kv_size
    case = case_of(place, shape, torch.float16, 256)
    for first in range(0, rows, 256):
        case.qkv[:, -shape.kv_size :] = every.view(rows, -1)[first : first + 256].to(case.qkv.device)
        _, _, v = run_fp8(case, CacheScales())
        values = case.qkv[:, -shape.kv_size :].view(256, shape.kv_heads, -1)
        got, wanted = v.flatten(0, 1)[case.slots], encode(values).view(torch.uint8)
        finite = ~values.isnan()
        assert torch.equal(got[finite], wanted[finite]) and (got[~finite] & 0x7F == 0x7F).all()


@pytest.mark.parametrize("shape", [SMOLLM2_135M_KV8, QWEN3_8B_KV8], ids=name)
def test_machine_code_for_8_bit_caches(shape: ModelShape, tmp_path: Path) -> None:
    (program,) = programs_for(shape)
    assert dict(program.constants)["fp8"]
    check_machine_code(program, tmp_path)
    assert read_before_waiting(program, late=True) == ({"weights"} if shape.qk_norm else set())
    # as with wide caches, and a scale; halves of a head are 8 bytes in a cache
    assert machine_accesses(program) == {"LDG": [32, 64] + [128] * (10 if shape.qk_norm else 6), "STG": [64] * 4 + [128] * 2}
