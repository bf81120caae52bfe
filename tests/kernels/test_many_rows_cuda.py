"""Projections of many rows, plain and with the gated activation: the bits of the separate ways, whatever the tiles, stages and clusters."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from deepinfer.errors import KernelBuildError
from deepinfer.kernels.linear.choice import LIMITS, choose
from deepinfer.kernels.linear.cuda import GatedProjection, ProductKernels, Projection, agreeing_rows, linears_of, programs_of
from deepinfer.kernels.linear.many_rows import Many
from deepinfer.kernels.swiglu.cuda import SwiGlu
from deepinfer.kernels.toolchain import KernelStore, default_store
from deepinfer.kernels.toolchain.loading import require
from deepinfer.kernels.toolchain.shapes import NAMED
from deepinfer.kernels.toolchain.store import MOST_SHARED
from deepinfer.platforms import get_platform
from invariance_kit import depends_on_batch
from kernel_kit import lowered, need_tilelang, read_before_waiting, replayed

WHOLE = 4096
"""Rows that a row is compared among."""

PRODUCTS = sorted({(*pair, False) for shape in NAMED.values() for pair in linears_of(shape)})
GATED = sorted({(shape.hidden, shape.intermediate, True) for shape in NAMED.values()})
OTHERS = [(64, 64, False), (192, 320, False), (1024, 2560, False), (64, 96, True), (896, 4864, True), (5120, 5120, False)]
"""(in, out, gated) of no named model: few channels, tiles that overlap the end, other models' widths."""

CHOSEN = [
    (sizes, rows, choice)
    for sizes in [*PRODUCTS, *GATED, *OTHERS]
    for rows in LIMITS
    if isinstance(choice := choose(sizes[0], sizes[1], rows, sizes[2]), Many)
]
RUN = list(dict.fromkeys(sizes for sizes, _, _ in CHOSEN))

FORMS = [
    Many(64, 32, 64, 3, 3),
    Many(64, 48, 64, 9, 3),
    Many(64, 96, 192, 2, 2),
    Many(128, 64, 64, 4, 4, cluster=2),
    Many(192, 16, 192, 2, 2),
    Many(64, 64, 64, 3, 3, cluster=4),
    Many(64, 32, 64, 3, 3, walkers=7),
    Many(128, 16, 64, 9, 3, cluster=2, walkers=5),
]
"""Of every kind of choice one, for 576 channels."""


def random(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, generator=generator, device="cuda").to(dtype)


@pytest.fixture(scope="module")
def built() -> None:
    """All kernels of this file, built side by side; the library held to the order of additions that engines hold it to."""
    get_platform("cuda").prepare(None)
    programs = [p for i, o, gated in RUN for p in programs_of(i, o, "bfloat16", gated)]
    programs += [form.program(576, 592, "bfloat16", gated) for form in FORMS for gated in (False, True)]
    default_store().get_all(programs)


def apart(x: torch.Tensor, weight: torch.Tensor, gated: bool) -> torch.Tensor:
    """By the library, and the activation's own kernel behind it."""
    product = Projection(weight)
    if not gated:
        return product.by_library(x)
    return GatedProjection(product, SwiGlu(weight.shape[0] // 2, x.dtype, x.device)).by_library(x)


# Bits


@pytest.mark.gpu
@pytest.mark.parametrize(("in_features", "out_features", "gated"), RUN, ids=str)
def test_every_number_of_rows_has_the_bits_of_the_separate_ways(in_features: int, out_features: int, gated: bool, built: None) -> None:
    """At every number of rows that a kernel is chosen for, against the same rows among 4,096."""
    weight = random(out_features * (2 if gated else 1), in_features, seed=1) * 0.05
    x = random(WHOLE, in_features)
    whole = apart(x, weight, gated)
    kernels = ProductKernels(in_features, out_features, torch.bfloat16, x.device, gated)
    wrong = []
    for rows in range(1, kernels.limit + 1):
        if kernels.covers(rows):
            for first in (0, WHOLE - rows):
                out = torch.full((rows, out_features), torch.nan, dtype=x.dtype, device=x.device)
                kernels(x[first : first + rows], weight, out)
                if not torch.equal(out, whole[first : first + rows]):
                    wrong.append((rows, first))
    assert wrong == []


@pytest.mark.gpu
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_every_form_has_the_bits_of_the_separate_ways(form: Many, gated: bool, built: None) -> None:
    """Tiles that overlap the end of the weight and of the rows write nothing there, and what lies behind the rows is not read."""
    out_features = 592
    weight, x = random(out_features * (2 if gated else 1), 576, seed=1) * 0.05, random(300, 576)
    whole = apart(x, weight, gated)
    (kernel,) = require([form.program(576, out_features, "bfloat16", gated)], x.device, after=True)
    for rows in (1, 63, 64, 65, 127, 130, 256, 300):
        spoilt = x.clone()
        spoilt[rows:] = torch.nan
        out = torch.full((rows + 70, out_features), 7.0, dtype=x.dtype, device=x.device)
        form.launch(kernel, spoilt[:rows], weight, out[:rows])
        assert torch.equal(out[:rows], whole[:rows]) and bool((out[rows:] == 7).all()), rows


@pytest.mark.gpu
@pytest.mark.parametrize("gated", [False, True])
def test_float16_has_the_bits_of_the_separate_ways(gated: bool, built: None) -> None:
    weight, x = random(592 * (2 if gated else 1), 576, dtype=torch.float16, seed=1) * 0.05, random(256, 576, dtype=torch.float16)
    whole = apart(x, weight, gated)
    for form in FORMS[:4]:
        (kernel,) = require([form.program(576, 592, "float16", gated)], x.device, after=True)
        out = torch.empty_like(whole)
        form.launch(kernel, x, weight, out)
        assert torch.equal(out, whole), form


@pytest.mark.gpu
def test_values_that_are_no_numbers_stay_in_their_rows(built: None) -> None:
    """NaN and infinity of a row, and gates far from zero, where the activation ends."""
    weight, x = random(2 * 592, 576, seed=1), random(256, 576) * 8
    x[5], x[70, 3], x[71, 4] = torch.nan, torch.inf, -torch.inf
    whole = apart(x, weight, gated=True)
    for form in FORMS[:4]:
        (kernel,) = require([form.program(576, 592, "bfloat16", True)], x.device, after=True)
        out = torch.empty_like(whole)
        form.launch(kernel, x, weight, out)
        same = (out == whole) | (out.isnan() & whole.isnan())
        assert bool(same.all()) and bool(out[:5].isfinite().all()) and bool(out[5].isnan().all()), form


@pytest.mark.gpu
def test_a_gated_projection_does_not_depend_on_the_batch(built: None) -> None:
    i, o, _ = GATED[0]
    weight, x = random(2 * o, i, seed=1) * 0.05, random(256, i)
    kernels = ProductKernels(i, o, torch.bfloat16, x.device, gated=True)
    product = Projection(weight, None, ProductKernels(i, 2 * o, torch.bfloat16, x.device))
    gated = GatedProjection(product, SwiGlu(o, torch.bfloat16, x.device), kernels)
    counts = [1, 8, 16, 32, 64, 128, 192, 256, 512]
    assert agreeing_rows([product, gated], counts) == counts and gated.few_up_to == kernels.limit > 0
    assert depends_on_batch(gated, x) == []


@pytest.mark.gpu
def test_overlapping_and_captured_launches_give_the_bits_of_separate_ones(built: None) -> None:
    """A chain of products in which each reads what the one before wrote, of kernels that share a multiprocessor and such that do not."""
    weights = [random(592, 576, seed=n) * 0.04 for n in range(2)]
    forms = [form for form in FORMS if form.tile <= 64]
    kernels = [require([form.program(576, 592, "bfloat16")], torch.device("cuda"), after=True)[0] for form in forms]
    for rows in (64, 200):
        start = random(rows, 576)
        a, b = torch.empty(rows, 592, dtype=start.dtype, device="cuda"), torch.empty(rows, 576, dtype=start.dtype, device="cuda")

        def chain(apart: bool = False, start: torch.Tensor = start, a: torch.Tensor = a, b: torch.Tensor = b) -> None:
            torch.mul(start, 1, out=b)
            for n, (form, kernel) in enumerate(itertools.islice(itertools.cycle(zip(forms, kernels, strict=True)), 24)):
                form.launch(kernel, b, weights[n % 2], a)
                if apart:
                    torch.cuda.synchronize()
                torch.mul(a[:, :576], 1, out=b) if n % 3 else b.copy_(a[:, 16:])

        chain(apart=True)
        want = b.clone()
        assert want.isfinite().all() and bool((want != 0).any())
        chain()
        assert torch.equal(b, want)
        replay = replayed(chain)
        b.zero_()
        replay()
        assert torch.equal(b, want)


# What is chosen


@pytest.mark.parametrize(("sizes", "rows", "choice"), CHOSEN, ids=str)
def test_a_choice_fits_its_sizes(sizes: tuple[int, int, bool], rows: int, choice: Many) -> None:
    """Whole chunks, places that the ring comes round in, tiles of the widths that warpgroup products have, and memory."""
    in_features, _, gated = sizes
    assert in_features % choice.chunk == 0 and choice.chunk % 64 == 0 and choice.tokens % 64 == 0
    assert choice.w_stages % choice.x_stages == 0 and 2 <= choice.x_stages <= choice.w_stages <= max(2, in_features // choice.chunk)
    assert choice.tile == 8 or (choice.tile % 16 == 0 and choice.tile <= 256)
    taken = 2 * choice.chunk * (choice.tokens * choice.x_stages + choice.tile * choice.w_stages * (2 if gated else 1))
    assert taken + 1024 <= MOST_SHARED
    assert not choice.walkers or in_features // choice.chunk % choice.w_stages == 0


class Noted:
    """In a kernel's place: keeps the grid."""

    def launch(self, grid: tuple[int, ...], *args: object) -> None:
        self.grid, self.numbers = grid, [a for a in args if isinstance(a, int)]


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_a_grid_covers_the_answer_in_whole_clusters(form: Many) -> None:
    for rows, out_features in ((1, 16), (64, 592), (65, 576), (300, 640)):
        noted = Noted()
        form.launch(noted, torch.empty(rows, 0), torch.empty(0), torch.empty(rows, out_features, device="meta"))
        along_rows, along_outputs = noted.grid
        row_blocks, out_blocks = -(-rows // form.tokens), -(-out_features // form.tile)
        assert along_rows % form.cluster == 0 and along_rows - form.cluster < row_blocks <= along_rows
        assert along_outputs == (min(form.walkers, out_blocks) if form.walkers else out_blocks)
        assert noted.numbers == ([along_outputs, rows] if form.walkers else [rows])


# Machine code


@pytest.mark.parametrize("gated", [False, True])
def test_machine_code(gated: bool, tmp_path: Path) -> None:
    """Warpgroup products at the tile's full width, gate and up in one, copies by the copy engine, nothing spilt."""
    need_tilelang()
    pytest.importorskip("cuda.bindings", reason="kernels are compiled by NVRTC: pip install 'deepinfer[cuda]'")
    form = Many(128, 32, 64, 3, 3, cluster=2)
    program = form.program(576, 1536, "bfloat16", gated)
    try:
        built = KernelStore(tmp_path).build(program)
    except KernelBuildError as e:
        raise AssertionError(e) from e
    assert built.resources.spill_stores == built.resources.spill_loads == built.resources.stack == 0
    assert built.cluster == 2 and built.threads == 288 and KernelStore(tmp_path).find(program) == built
    source = lowered(program).source
    assert set(re.findall(r"wgmma_ss<[^>]*?, 64, (\d+), 16,", source)) == {"64" if gated else "32"}
    assert "cp_async" not in source and "wait_wgmma<0>" in source


@pytest.mark.parametrize("gated", [False, True])
def test_only_weights_are_read_before_the_kernel_ahead_has_ended(gated: bool) -> None:
    assert read_before_waiting(Many(64, 32, 64, 3, 3).program(576, 1536, "bfloat16", gated)) == {"weight"}


@pytest.mark.nightly
def test_machine_code_of_all(tmp_path: Path) -> None:
    for sizes, _, choice in CHOSEN:
        program = choice.program(sizes[0], sizes[1], "bfloat16", sizes[2])
        KernelStore(tmp_path).build(program)  # raises for one that spills
        assert read_before_waiting(program) == {"weight"}


def test_float32_products_agree_with_torch_where_there_is_no_kernel() -> None:
    """A gated projection without kernels is its two steps."""
    weight, x = torch.randn(32, 8), torch.randn(5, 8)

    def activation(both: torch.Tensor, out: torch.Tensor) -> None:
        torch.mul(F.silu(both[:, :16]), both[:, 16:], out=out)

    gated = GatedProjection(Projection(weight), activation)
    both = F.linear(x, weight)
    assert gated.few_up_to == 0 and torch.equal(gated(x), F.silu(both[:, :16]) * both[:, 16:])
