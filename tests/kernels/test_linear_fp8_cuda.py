"""Products of packed weights: the numbers they stand for, the bits of the expanded weight at any number of rows, what differs is found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from deepinfer.errors import KernelBuildError
from deepinfer.kernels.linear.cuda import Projection, agreeing_rows, linears_of
from deepinfer.kernels.linear_fp8 import PackedWeight, can_pack, can_spread, expand, linear_fp8, scale_shape, spread_scale
from deepinfer.kernels.linear_fp8 import cuda as op
from deepinfer.kernels.linear_fp8.cuda import (
    Choice,
    Expansion,
    FewRowsFp8,
    PackedProjection,
    choose,
    differing,
    expand_program,
    few_rows_program,
    few_rows_programs,
    programs_for,
)
from deepinfer.kernels.toolchain import ModelShape, Program, default_store
from deepinfer.kernels.toolchain.shapes import LLAMA_8B, NAMED, QWEN3_8B_FP8
from deepinfer.platforms import get_platform
from invariance_kit import depends_on_batch
from kernel_kit import (
    KERNEL_PLACES,
    OnCpu,
    check_machine_code,
    device_of,
    kept_as,
    machine_accesses,
    random_rows,
    read_before_waiting,
    replayed,
)

WHOLE = 4096
"""Rows that a row is compared among."""

RUN = sorted({pair for shape in NAMED.values() if shape.weights == "fp8" for pair in linears_of(shape)[:-1]})
"""(in, out) of every named model's projections that stay packed."""

OTHERS = [(64, 64), (80, 192), (256, 1024), (896, 1152), (1536, 4864)]
"""Sizes of no named model: few channels, odd chunks, a last span of columns that is no whole one."""


def packed_weight(out_features: int, in_features: int, place: str = "c", seed: int = 0) -> PackedWeight:
    """Any bytes but NaN, with scales of four powers of two."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(0, 256, (out_features, in_features), generator=generator, dtype=torch.uint8)
    values[(values & 0x7F) == 0x7F] = 0
    scale = torch.exp2(2 * torch.randn(scale_shape(out_features, in_features), generator=generator)) * (in_features**-0.5 / 100)
    return PackedWeight(values.view(torch.float8_e4m3fn).to(device_of(place)), scale.to(device_of(place)))


def expansion_at(place: str, in_features: int, out_features: int, dtype: torch.dtype = torch.bfloat16) -> Expansion:
    made = Expansion(dtype, device_of(place))
    kernel = None
    if place == "c":
        kernel = OnCpu(expand_program(in_features, str(dtype).removeprefix("torch.")))
        made._room = made._room.to(kept_as(place, dtype))
        made.dtype = kept_as(place, dtype)
        made._kernels[in_features] = kernel
    made.reserve((out_features, in_features), kernel)
    return made


EXPANDED = [(256, 64), (576, 80), (4096, 64)]
"""Sizes of weights whose every byte is expanded."""


def gpu_programs() -> list[Program]:
    """All kernels that the tests of this file launch on a GPU; also for building them where TileLang is."""
    every = [p for pair in [*RUN, *OTHERS] for p in (*few_rows_programs(*pair, "bfloat16"), expand_program(pair[0], "bfloat16"))]
    every += [p for pair in ((256, 1024), (1024, 256)) for p in few_rows_programs(*pair, "bfloat16")]
    every += [expand_program(width, dtype) for width in (1024, *(w for w, _ in EXPANDED)) for dtype in ("bfloat16", "float16")]
    return list(dict.fromkeys([*every, *few_rows_programs(*OTHERS[2], "float16")]))


@pytest.fixture(scope="module")
def built() -> None:
    """All kernels of this file, built side by side; the library held to the order of additions that engines hold it to."""
    get_platform("cuda").prepare(None)
    default_store().get_all(gpu_programs())


# What a weight stands for


def test_scales_of_blocks_are_spread() -> None:
    scale = torch.arange(6.0).view(2, 3)
    assert scale_shape(256, 300) == (16, 3)
    spread = spread_scale(scale, (256, 300), (128, 128))
    assert spread.shape == (16, 3) and torch.equal(spread[:8], scale[:1].expand(8, 3)) and torch.equal(spread[8:], scale[1:].expand(8, 3))
    assert torch.equal(spread_scale(torch.tensor([[2.0]]), (40, 200), (40, 200)), torch.full((3, 2), 2.0)), "one of a tensor"
    values = packed_weight(100, 500).values
    of_blocks = torch.rand(4, 2)
    want = values.float() * of_blocks.repeat_interleave(32, 0)[:100].repeat_interleave(256, 1)[:, :500]
    assert torch.equal(expand(values, spread_scale(of_blocks, (100, 500), (32, 256)), torch.float32), want)


@pytest.mark.parametrize(
    ("shape", "block", "fits"),
    [
        ((256, 256), (128, 128), True),
        ((96, 576), (128, 128), True),
        ((96, 576), (16, 128), True),
        ((96, 576), (8, 128), False),
        ((96, 576), (32, 64), False),
        ((96, 100), (96, 100), True),
        ((96, 200), (96, 100), False),
        ((40, 100), (24, 128), False),
    ],
)
def test_blocks_that_cannot_be_spread(shape: tuple[int, int], block: tuple[int, int], fits: bool) -> None:
    assert can_spread(shape, block) == fits
    tall, wide = scale_shape(*shape)
    rows, columns = torch.arange(shape[0]) // block[0], torch.arange(shape[1]) // block[1]
    whole = all(len(set(part.tolist())) == 1 for part in (*rows.split(16), *columns.split(128)))
    assert whole == fits and tall == len(rows.split(16)) and wide == len(columns.split(128))


def test_weights_that_no_kernel_is_made_for() -> None:
    assert can_pack(576, (576,)) and can_pack(4096, (4096, 1024, 1024)) and can_pack(64, (96, 96))
    assert not can_pack(577, (576,)) and not can_pack(576, (96,)) and not can_pack(576, (56, 72))
    assert few_rows_programs(577, 64, "bfloat16") == [] and choose(576, 96, 1) is None
    with pytest.raises(KernelBuildError, match="8 at a time"):
        expand_program(100, "bfloat16")
    assert programs_for(LLAMA_8B) == [], "its weights are plain"
    assert {p.factory for p in programs_for(QWEN3_8B_FP8)} == {"few_rows_fp8", "expand_fp8"}


def test_the_reference_multiplies_what_is_rounded_once() -> None:
    weight, x = packed_weight(64, 256), random_rows(3, 256, dtype=torch.bfloat16).bfloat16()
    assert torch.equal(linear_fp8(x, weight.values, weight.scale), F.linear(x, weight.expanded(torch.bfloat16)))
    wide = weight.expanded(torch.float32)
    assert torch.equal(weight.expanded(torch.bfloat16), wide.bfloat16()) and not torch.equal(wide, wide.bfloat16().float())
    assert weight.nbytes == 64 * 256 + 4 * 2 * 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("in_features", "out_features"), EXPANDED, ids=str)
@pytest.mark.parametrize("place", KERNEL_PLACES)
def test_expanded_weights_are_the_references(place: str, in_features: int, out_features: int, dtype: torch.dtype) -> None:
    """Every byte, subnormal numbers and results among them, and scales that leave no exact number."""
    weight = packed_weight(out_features, in_features, place)
    weight.values.view(torch.uint8)[:16, :16] = (torch.arange(256, dtype=torch.uint8) & 0xF7).view(16, 16)
    weight.scale[1] = 3e-39 if dtype == torch.bfloat16 else 1.1e-7
    weight.scale[2] *= -1
    expansion = expansion_at(place, in_features, out_features, dtype)
    found = expansion(weight)
    assert found.dtype == kept_as(place, dtype) and torch.equal(found, weight.expanded(dtype).to(found.dtype))
    assert bool((found[16:32] != 0).any())


# Bits


@pytest.mark.parametrize(
    ("in_features", "out_features", "choice"),
    [
        (256, 64, Choice(8, 32, 2 << 10)),
        (576, 128, Choice(16, 32, 32 << 10, turned=True)),
        (320, 128, Choice(8, 64, 4 << 10, 64)),
        (80, 64, Choice(8, 16, 1 << 10)),
    ],
    ids=str,
)
def test_values_on_the_cpu_target(in_features: int, out_features: int, choice: Choice, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks, stages, tiles and rows that are no whole block, against float64; a row's bits whatever its mates."""
    monkeypatch.setattr(op, "choose", lambda i, o, rows: choice if rows <= 32 else None)
    programs = few_rows_programs(in_features, out_features, "bfloat16")
    few = FewRowsFp8(in_features, out_features, torch.bfloat16, torch.device("cpu"), [OnCpu(p) for p in programs])
    assert few.limit == 32
    weight, x = packed_weight(out_features, in_features), random_rows(19, in_features, place="c", dtype=torch.bfloat16)

    def product(x: torch.Tensor) -> torch.Tensor:
        out = torch.full((len(x), out_features), torch.nan)
        few(x, weight, out)
        return out

    exact = weight.expanded(torch.bfloat16).double()
    want, room = x.double() @ exact.T, 1e-6 * (x.double().abs() @ exact.abs().T)
    whole = product(x)
    assert bool(((whole.double() - want).abs() <= room).all())
    for rows in (1, 7, 8, 9, 16):
        assert torch.equal(product(x[:rows].contiguous()), whole[:rows])
        assert torch.equal(product(x[19 - rows :].contiguous()), whole[19 - rows :])


@pytest.mark.gpu
@pytest.mark.parametrize(("in_features", "out_features"), [*RUN, *OTHERS], ids=str)
def test_every_number_of_rows_has_the_bits_of_the_expanded_weight(in_features: int, out_features: int, built: None) -> None:
    """From one row to more than a kernel is chosen for, against the library's product of the reference's weight with 4,096 rows."""
    weight, x = packed_weight(out_features, in_features, "cuda"), random_rows(WHOLE, in_features, place="cuda", dtype=torch.bfloat16)
    expanded = weight.expanded(torch.bfloat16)
    whole = F.linear(x, expanded)
    few, expansion = FewRowsFp8(in_features, out_features, torch.bfloat16, x.device), Expansion(torch.bfloat16, x.device)
    projection = PackedProjection(weight, few, expansion)
    assert few.limit == projection.few_up_to == 256 and torch.equal(projection.weight, expanded)
    wrong: dict[str, list[int]] = {"kernel": [], "other rows": [], "library": []}
    for rows in [*range(1, few.limit + 1), 300, 512, 1000, WHOLE]:
        if not torch.equal(projection(x[:rows]), whole[:rows]):
            wrong["kernel"].append(rows)
        if not torch.equal(projection(x[WHOLE - rows :]), whole[WHOLE - rows :]):
            wrong["other rows"].append(rows)
        if not torch.equal(projection.by_library(x[:rows]), whole[:rows]):
            wrong["library"].append(rows)
    assert wrong == {"kernel": [], "other rows": [], "library": []}


@pytest.mark.gpu
def test_float16_has_the_bits_of_the_expanded_weight(built: None) -> None:
    in_features, out_features = OTHERS[2]
    weight, x = packed_weight(out_features, in_features, "cuda"), random_rows(WHOLE, in_features, place="cuda", dtype=torch.float16)
    few, expansion = FewRowsFp8(in_features, out_features, torch.float16, x.device), Expansion(torch.float16, x.device)
    projection, whole = PackedProjection(weight, few, expansion), F.linear(x, weight.expanded(torch.float16))
    assert [rows for rows in range(1, 300) if not torch.equal(projection(x[:rows]), whole[:rows])] == []


@pytest.mark.gpu
@pytest.mark.parametrize(("in_features", "out_features"), RUN, ids=str)
def test_rows_do_not_depend_on_the_batch(in_features: int, out_features: int, built: None) -> None:
    x = random_rows(300, in_features, place="cuda", dtype=torch.bfloat16)
    few, expansion = FewRowsFp8(in_features, out_features, torch.bfloat16, x.device), Expansion(torch.bfloat16, x.device)
    projection = PackedProjection(packed_weight(out_features, in_features, "cuda"), few, expansion)
    assert depends_on_batch(projection, x) == []
    for rows in (1, 9, 33, 65, 129, 200):
        want, spoilt = projection(x[:rows].contiguous()), x.clone()
        spoilt[rows:] = torch.nan
        assert torch.equal(projection(spoilt[:rows]), want), "rows behind"


@pytest.mark.gpu
def test_overlapping_and_captured_launches_give_the_bits_of_separate_ones(built: None) -> None:
    """A chain there and back in which each product reads what the one before wrote; above 256 rows both expand into the same memory."""
    wide, narrow = (256, 1024), (1024, 256)
    expansion = Expansion(torch.bfloat16, torch.device("cuda"))
    first, second = (
        PackedProjection(packed_weight(o, i, "cuda", seed), FewRowsFp8(i, o, torch.bfloat16, expansion.device), expansion)
        for seed, (i, o) in enumerate((wide, narrow))
    )
    for rows in (1, 40, 100, 256, 300):
        start = random_rows(rows, 256, place="cuda", dtype=torch.bfloat16)
        kept: list[torch.Tensor] = [torch.zeros_like(start)]

        def chain(apart: bool = False, start: torch.Tensor = start, kept: list[torch.Tensor] = kept) -> None:
            x = start * 1
            for _ in range(10):
                y = first(x)
                if apart:
                    torch.cuda.synchronize()
                x = second(y)
                x = x / x.abs().amax(1, keepdim=True)
                if apart:
                    torch.cuda.synchronize()
            kept[0].copy_(x)

        chain(apart=True)
        want = kept[0].clone()
        assert want.isfinite().all() and bool((want != 0).any())
        chain()
        assert torch.equal(kept[0], want)
        replay = replayed(chain)
        kept[0].zero_()
        replay()
        assert torch.equal(kept[0], want), rows


@pytest.mark.gpu
def test_the_comparison_finds_nothing_to_switch_off(built: None) -> None:
    counts = [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512, 1024, WHOLE]
    expansion = Expansion(torch.bfloat16, torch.device("cuda"))
    for in_features, out_features in RUN:
        few = FewRowsFp8(in_features, out_features, torch.bfloat16, expansion.device)
        projection = PackedProjection(packed_weight(out_features, in_features, "cuda"), few, expansion)
        assert agreeing_rows([projection], counts) == counts
        assert projection.few_up_to == few.limit and differing([projection]) == []


# Which form runs


class Few:
    """In a kernel's place: the product of the expanded weight in float64, another from ``from_rows`` rows on."""

    limit = 32

    def __init__(self, from_rows: int = 1 << 30) -> None:
        self.from_rows, self.rows = from_rows, list[int]()

    def covers(self, rows: int) -> bool:
        return rows <= self.limit

    def __call__(self, x: torch.Tensor, weight: PackedWeight, out: torch.Tensor) -> None:
        self.rows.append(len(x))
        out.copy_(exact_linear(x, weight.expanded(x.dtype)))
        if len(x) >= self.from_rows:
            out[-1, -1] += 1


class Expanded(Expansion):
    """Expands by the reference, ``off`` of the first numbers by one bit."""

    def __init__(self, off: int = 0) -> None:
        super().__init__(torch.bfloat16, torch.device("cpu"))
        self.off, self.calls = off, 0

    def reserve(self, shape: Any, kernel: Any = None) -> None:
        pass

    def __call__(self, weight: PackedWeight) -> torch.Tensor:
        self.calls += 1
        out = weight.expanded(torch.bfloat16)
        out.view(torch.int16)[-1, : self.off] ^= 1
        return out


def exact_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return (x.double() @ weight.double().T).to(x.dtype)


COUNTS = [1, 2, 4, 8, 16, 24, 32, 48, 64]


def projection_of(few: Few, expansion: Expanded | None = None, rows: int = 64) -> PackedProjection:
    return PackedProjection(packed_weight(rows, 256), few, expansion or Expanded())  # type: ignore[arg-type]


def test_few_rows_are_the_kernels_and_more_the_librarys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(F, "linear", exact_linear)
    few, expansion = Few(), Expanded()
    projection = projection_of(few, expansion)
    x = random_rows(40, 256).bfloat16()
    assert torch.equal(projection(x)[:5], projection(x[:5])) and few.rows == [5] and expansion.calls == 1
    assert agreeing_rows([projection], COUNTS) == COUNTS and projection.few_up_to == 32 and differing([projection]) == []


@pytest.mark.parametrize(("wrong_from", "up_to"), [(1, 0), (9, 8), (32, 24)])
def test_a_kernel_that_differs_is_named(wrong_from: int, up_to: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(F, "linear", exact_linear)
    right, wrong = projection_of(Few()), projection_of(Few(wrong_from), rows=128)
    assert agreeing_rows([right, wrong], COUNTS) == COUNTS and (right.few_up_to, wrong.few_up_to) == (32, up_to)
    assert differing([right, wrong]) == [f"[128, 256]: products of more than {up_to} rows have other bits than the library's"]


@pytest.mark.parametrize("rows", [64, 1024, 1088])
def test_expanded_weights_that_differ_are_named(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(F, "linear", exact_linear)
    projection = projection_of(Few(), Expanded(off=1), rows=rows)
    assert differing([projection]) == [f"[{rows}, 256]: expanded weights are other numbers than the reference's"]


def test_packed_and_plain_weights_of_one_shape_are_compared_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(F, "linear", exact_linear)
    plain = Projection(packed_weight(64, 256).expanded(torch.bfloat16))
    packed = projection_of(Few(9))
    assert agreeing_rows([plain, packed], COUNTS) == COUNTS and packed.few_up_to == 8


@pytest.mark.parametrize(("in_features", "out_features"), [*RUN, *OTHERS], ids=str)
def test_what_is_chosen_can_be_made_and_launched(in_features: int, out_features: int) -> None:
    """For every number of rows: the kernel that is launched is that of the choice, and its grid covers the answer once."""
    launched: list[tuple[Program, tuple[int, ...]]] = []

    class Noted:
        def __init__(self, program: Program) -> None:
            self.program = program

        def launch(self, grid: tuple[int, ...], *args: object) -> None:
            launched.append((self.program, grid))

    programs = few_rows_programs(in_features, out_features, "bfloat16")
    few = FewRowsFp8(in_features, out_features, torch.bfloat16, torch.device("cpu"), [Noted(p) for p in programs])
    assert few.limit == 256 and choose(in_features, out_features, 257) is None
    weight = PackedWeight(torch.empty(0), torch.empty(scale_shape(out_features, in_features), device="meta"))
    for rows in range(1, few.limit + 1):
        choice = choose(in_features, out_features, rows)
        assert choice is not None
        few(torch.empty(rows, 0), weight, torch.empty(rows, out_features, device="meta"))
        (program, grid), constants = launched.pop(), dict(few_rows_program(in_features, choice, "bfloat16").constants)
        assert program == few_rows_program(in_features, choice, "bfloat16") and program in programs
        assert grid[0] * choice.tile == out_features and (grid[1] - 1) * choice.tokens < rows <= grid[1] * choice.tokens
        chunk, stages = int(constants["chunk"]), int(constants["stages"])
        assert in_features % chunk == 0 and 128 % chunk == 0 and 1 <= stages - 1 <= in_features // chunk and choice.tile % 16 == 0
        assert not choice.turned or choice.tokens % 16 == 0


# Machine code


SMALL = ModelShape(256, 4, 2, 64, 512, 128, weights="fp8")


@pytest.mark.parametrize("choice", [choose(4096, 4096, 1), choose(4096, 4096, 64), choose(4096, 24576, 256)], ids=str)
def test_machine_code(choice: Choice, tmp_path: Path) -> None:
    program = few_rows_program(4096, choice, "bfloat16")
    check_machine_code(program, tmp_path)
    assert read_before_waiting(program) == {"weight", "scale"}


def test_machine_code_of_expansion(tmp_path: Path) -> None:
    program = expand_program(4096, "bfloat16")
    check_machine_code(program, tmp_path)
    assert read_before_waiting(program) == {"weight", "scale"}
    found = machine_accesses(program)
    assert set(found["STG"]) == {128} and found["LDG"].count(64) == 4


@pytest.mark.nightly
def test_machine_code_of_all(tmp_path: Path) -> None:
    programs = {p for pair in [*RUN, *OTHERS] for p in (*few_rows_programs(*pair, "bfloat16"), expand_program(pair[0], "bfloat16"))}
    programs |= set(programs_for(SMALL)) | set(few_rows_programs(*OTHERS[2], "float16"))
    for program in sorted(programs, key=lambda p: p.name):
        check_machine_code(program, tmp_path)
        assert read_before_waiting(program) == {"weight", "scale"}
