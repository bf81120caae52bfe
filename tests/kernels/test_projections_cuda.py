"""Projections on a GPU: the library's bits at every number of rows, and the comparison that says where a form may be used."""

from __future__ import annotations

import ctypes
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from deepinfer.kernels.linear import cuda as op
from deepinfer.kernels.linear.choice import choose
from deepinfer.kernels.linear.cuda import GatedProjection, ProductKernels, Projection, agreeing_rows, linears_of, programs_for, programs_of
from deepinfer.kernels.linear.few_rows import Few
from deepinfer.kernels.linear.library import Library
from deepinfer.kernels.toolchain import Program, default_store
from deepinfer.kernels.toolchain.shapes import NAMED, SMOLLM2_135M
from deepinfer.platforms import get_platform
from invariance_kit import depends_on_batch
from kernel_kit import check_machine_code, read_before_waiting, replayed

WHOLE = 4096
"""Rows that a row is compared among."""

WEIGHTS = sorted({pair for shape in NAMED.values() for pair in linears_of(shape)})
RUN = [pair for pair in WEIGHTS if choose(*pair, 1) is not None]
"""(in, out) of every named model's projections that have kernels."""

OTHERS = [(64, 64), (80, 192), (256, 1024), (896, 1152), (1536, 4864), (3584, 3584), (5120, 5120)]
"""Sizes of no named model: a few channels, an odd chunk, other models' widths."""


def limit_of(in_features: int, out_features: int) -> int:
    """Up to how many rows some kernel is chosen."""
    return max((rows for rows in range(1, 513) if choose(in_features, out_features, rows) is not None), default=0)


def random(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0, device: str = "cuda") -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(*shape, generator=generator, device=device).to(dtype)


@pytest.fixture(scope="module")
def built() -> None:
    """All kernels of this file, built side by side; the library held to the order of additions that engines hold it to."""
    get_platform("cuda").prepare(None)
    programs = [p for pair in [*RUN, *OTHERS] for p in programs_of(*pair, "bfloat16")]
    default_store().get_all([*programs, *[p for pair in RUN[:3] for p in programs_of(*pair, "float16")]])


# Bits


@pytest.mark.gpu
@pytest.mark.parametrize(("in_features", "out_features"), [*RUN, *OTHERS], ids=str)
def test_every_number_of_rows_has_the_bits_of_the_library(in_features: int, out_features: int, built: None) -> None:
    """Kernel and library alike, from one row to the most that a kernel is chosen for, against the same rows among 4,096."""
    weight = random(out_features, in_features, seed=1) * 0.05
    x = random(WHOLE, in_features)
    whole = F.linear(x, weight)
    kernels, projection = ProductKernels(in_features, out_features, torch.bfloat16, x.device), Projection(weight)
    assert kernels.limit == limit_of(in_features, out_features) > 0
    assert torch.equal(projection.by_library(x), whole)
    wrong: dict[str, list[int]] = {"kernel": [], "kernel, other rows": [], "library": []}
    for rows in range(1, kernels.limit + 1):
        for form, first in (("kernel", 0), ("kernel, other rows", WHOLE - rows)):
            out = torch.full((rows, out_features), torch.nan, dtype=x.dtype, device=x.device)
            if kernels.covers(rows):
                kernels(x[first : first + rows], weight, out)
                if not torch.equal(out, whole[first : first + rows]):
                    wrong[form].append(rows)
        if not torch.equal(projection.by_library(x[:rows]), whole[:rows]):
            wrong["library"].append(rows)
    assert wrong == {"kernel": [], "kernel, other rows": [], "library": []}


@pytest.mark.gpu
@pytest.mark.parametrize(("in_features", "out_features"), RUN[:3], ids=str)
def test_float16_has_the_bits_of_the_library(in_features: int, out_features: int, built: None) -> None:
    weight, x = random(out_features, in_features, dtype=torch.float16, seed=1) * 0.05, random(WHOLE, in_features, dtype=torch.float16)
    whole = F.linear(x, weight)
    kernels = ProductKernels(in_features, out_features, torch.float16, x.device)
    for rows in filter(kernels.covers, range(1, kernels.limit + 1)):
        out = torch.full((rows, out_features), torch.nan, dtype=x.dtype, device=x.device)
        kernels(x[:rows], weight, out)
        assert torch.equal(out, whole[:rows]), rows


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("in_features", "out_features"), WEIGHTS, ids=str)
def test_the_library_called_directly_gives_torchs_bits(in_features: int, out_features: int, dtype: torch.dtype, built: None) -> None:
    """Without torch between, at any number of rows; the same on another stream, and captured in a graph."""
    weight, x = random(out_features, in_features, dtype=dtype, seed=1) * 0.05, random(WHOLE, in_features, dtype=dtype)
    projection = Projection(weight)
    assert projection.library is not None, "torch's cuBLAS is not found"
    for rows in (1, 2, 3, 7, 8, 17, 32, 48, 64, 100, 128, 255, 256, 320, 512, 1000, 1024, 2048, WHOLE):
        assert torch.equal(projection.by_library(x[:rows]), F.linear(x[:rows], weight)), rows
    want, stream = F.linear(x[:24], weight), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        elsewhere = projection.by_library(x[:24])
    torch.cuda.current_stream().wait_stream(stream)
    assert torch.equal(elsewhere, want) and torch.equal(projection.by_library(x[:24]), want)
    out = torch.zeros_like(want)
    replay = replayed(lambda: out.copy_(projection.by_library(x[:24])))
    out.zero_()
    replay()
    assert torch.equal(out, want) and torch.equal(projection.by_library(x[:24]), want)


@pytest.mark.gpu
@pytest.mark.parametrize(("in_features", "out_features"), RUN, ids=str)
def test_values(in_features: int, out_features: int, built: None) -> None:
    """Against float64: one rounding of the answer, and float32 sums over all channels."""
    weight, x = random(out_features, in_features, seed=1) * 0.05, random(8, in_features)
    out = torch.empty(8, out_features, dtype=x.dtype, device=x.device)
    ProductKernels(in_features, out_features, torch.bfloat16, x.device)(x, weight, out)
    for at in range(0, out_features, 16384):
        part = weight[at : at + 16384].double()
        want = x.double() @ part.T
        room = 2.0**-8 * want.abs() + 1e-6 * (x.double().abs() @ part.abs().T)
        assert bool(((out[:, at : at + 16384].double() - want).abs() <= room).all())


@pytest.mark.gpu
@pytest.mark.parametrize(("in_features", "out_features"), RUN[:4], ids=str)
def test_rows_do_not_depend_on_the_batch(in_features: int, out_features: int, built: None) -> None:
    """Which rows, how many, at which place; and what lies behind them in memory."""
    weight, x = random(out_features, in_features, seed=1), random(256, in_features)
    projection = Projection(weight, None, ProductKernels(in_features, out_features, torch.bfloat16, x.device))
    assert depends_on_batch(projection, x) == []
    for rows in (1, 5, 8, 9, 17, 33):
        want = projection(x[:rows].contiguous())
        spoilt = x.clone()
        spoilt[rows:] = torch.nan
        assert torch.equal(projection(spoilt[:rows]), want), "rows behind"
        mixed = x[:rows].clone()
        mixed[rows // 2] = torch.nan
        got = projection(mixed)
        assert got[rows // 2].isnan().all() and torch.equal(got[: rows // 2], want[: rows // 2])
        assert torch.equal(got[rows // 2 + 1 :], want[rows // 2 + 1 :]), "a mate of NaN"


@pytest.mark.gpu
def test_overlapping_and_captured_launches_give_the_bits_of_separate_ones(built: None) -> None:
    """A chain of products, there and back, in which each reads what the one before wrote."""
    wide, narrow = (576, 1536), (1536, 576)
    there, back = random(wide[1], wide[0], seed=1) * 0.04, random(narrow[1], narrow[0], seed=2) * 0.03
    first, second = ProductKernels(*wide, torch.bfloat16, there.device), ProductKernels(*narrow, torch.bfloat16, there.device)
    for rows in (1, 8, 24):
        x, start = torch.empty(rows, 576, dtype=torch.bfloat16, device="cuda"), random(rows, 576)
        y = torch.empty(rows, 1536, dtype=torch.bfloat16, device="cuda")

        def chain(apart: bool = False, start: torch.Tensor = start, x: torch.Tensor = x, y: torch.Tensor = y) -> None:
            torch.mul(start, 1, out=x)
            for _ in range(15):
                first(x, there, y)
                if apart:
                    torch.cuda.synchronize()
                second(y, back, x)
                if apart:
                    torch.cuda.synchronize()

        chain(apart=True)
        want = x.clone()
        assert want.isfinite().all() and bool((want != 0).any())
        chain()
        assert torch.equal(x, want)
        replay = replayed(chain)
        x.zero_()
        replay()
        assert torch.equal(x, want)


# Which form runs


@pytest.mark.gpu
@pytest.mark.parametrize("shape", NAMED, ids=str)
def test_the_comparison_finds_nothing_to_switch_off(shape: str, built: None) -> None:
    """Of a layer of each named model: every number of rows agrees, and every kernel is used as far as it is chosen."""
    counts = [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512, 1024, WHOLE]
    for in_features, out_features in linears_of(NAMED[shape])[:4]:
        kernels = ProductKernels(in_features, out_features, torch.bfloat16, torch.device("cuda"))
        projection = Projection(random(out_features, in_features, seed=1) * 0.05, None, kernels)
        assert agreeing_rows([projection], counts) == counts
        assert projection.few_up_to == kernels.limit


PLANT_PLACES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def exact_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """A product whose rows know nothing of each other."""
    out = torch.stack([(weight.double() * row.double()).sum(-1) for row in x]).to(x.dtype)
    return out if bias is None else out + bias


class Product:
    """In the kernels' place: ``x @ weight.T``, one bit off from ``from_rows`` rows on, and none for ``without``."""

    limit = 32

    def __init__(self, from_rows: int = 1 << 30, without: tuple[int, ...] = ()) -> None:
        self.from_rows, self.without = from_rows, without
        self.rows: list[int] = []

    def covers(self, rows: int) -> bool:
        return rows <= self.limit and rows not in self.without

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
        self.rows.append(len(x))
        out.copy_(exact_linear(x, weight))
        if len(x) >= self.from_rows:
            out[-1, -1] = torch.nextafter(out[-1, -1].float(), torch.tensor(9e9, device=out.device)).to(out.dtype) * 1.01


COUNTS = [1, 2, 4, 8, 16, 24, 32, 48, 64]


def projection_of(place: str, few: Product | None = None, bias: bool = False) -> Projection:
    weight = random(24, 40, seed=3, device=place)
    made = Projection(weight, random(24, device=place) if bias else None, few)  # type: ignore[arg-type]
    made.library = None  # torch's way, in whose place something else is put
    return made


@pytest.mark.parametrize("place", PLANT_PLACES)
def test_what_does_not_depend_on_the_batch_agrees_everywhere(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(F, "linear", exact_linear)
    projection = projection_of(place, Product())
    assert agreeing_rows([projection, projection_of(place, bias=True)], COUNTS) == COUNTS
    assert projection.few_up_to == 32


@pytest.mark.parametrize("place", PLANT_PLACES)
def test_a_library_that_depends_on_the_batch_is_found(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: two numbers of rows get another order of additions, one of them where a kernel of the right bits is chosen."""

    def planted(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        out = exact_linear(x, weight, bias)
        if len(x) in (4, 24, 48):
            half = weight.shape[1] // 2  # in two halves, each rounded
            out[0] = exact_linear(x[:1, :half], weight[:, :half]) + exact_linear(x[:1, half:], weight[:, half:])
        return out

    monkeypatch.setattr(F, "linear", planted)
    assert agreeing_rows([projection_of(place)], COUNTS) == [1, 2, 8, 16, 32, 64]
    kept = projection_of(place, Product())
    assert agreeing_rows([kept], COUNTS) == [1, 2, 4, 8, 16, 24, 32, 64] and kept.few_up_to == 32
    assert agreeing_rows([kept, projection_of(place)], COUNTS[:4]) == [1, 2, 4, 8], "both have one shape, compared once"


@pytest.mark.parametrize("place", PLANT_PLACES)
@pytest.mark.parametrize(("wrong_from", "up_to"), [(1, 0), (3, 2), (9, 8), (17, 16), (33, 32)])
def test_a_kernel_that_differs_is_switched_off(place: str, wrong_from: int, up_to: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(F, "linear", exact_linear)
    few = Product(wrong_from)
    projection = projection_of(place, few)
    assert agreeing_rows([projection], COUNTS) == COUNTS and projection.few_up_to == up_to
    few.rows.clear()
    for rows in (1, 8, 9, 33):
        projection(random(rows, 40, device=place))
    assert few.rows == [rows for rows in (1, 8, 9, 33) if rows <= up_to]


def test_the_most_rows_are_what_the_others_are_compared_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(F, "linear", lambda x, weight, bias=None: exact_linear(x, weight) * (1.5 if len(x) == 64 else 1))
    assert agreeing_rows([projection_of("cpu")], [*COUNTS, 8, 64]) == [64]


def test_rows_without_a_kernel_are_the_librarys(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gap among the rows that kernels are chosen for."""
    monkeypatch.setattr(F, "linear", exact_linear)
    product = Product(without=(8, 16))
    projection = projection_of("cpu", product)
    assert agreeing_rows([projection], COUNTS) == COUNTS and projection.few_up_to == 32
    assert product.rows == [1, 2, 4, 24, 32]


class Gated(Product):
    """The activation behind it too, here a product of the halves."""

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
        both = torch.empty(len(x), len(weight), dtype=x.dtype)
        super().__call__(x, weight, both)
        times(both, out)


def times(both: torch.Tensor, out: torch.Tensor) -> None:
    gate, up = both.float().chunk(2, dim=1)
    out.copy_(gate * up)


@pytest.mark.parametrize(("wrong_from", "up_to"), [(1, 0), (9, 8), (33, 32)])
def test_an_activation_done_at_once_is_held_against_one_done_apart(wrong_from: int, up_to: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(F, "linear", exact_linear)
    at_once, product = Gated(wrong_from), projection_of("cpu", Product())
    gated = GatedProjection(product, times, at_once)  # type: ignore[arg-type]
    assert agreeing_rows([product, gated], COUNTS) == COUNTS
    assert gated.few_up_to == up_to and product.few_up_to == 32
    at_once.rows.clear()
    x = random(9, 40, device="cpu")
    assert gated(x).shape == (9, 12) and at_once.rows == ([9] if up_to >= 9 else [])


def test_a_bias_is_the_librarys() -> None:
    few = Product()
    projection = projection_of("cpu", few, bias=True)
    x = random(3, 40, device="cpu")
    assert projection.few is None and projection.few_up_to == 0
    assert torch.equal(projection(x), F.linear(x, projection.weight, projection.bias)) and not few.rows
    plain = projection_of("cpu", few)
    assert plain(x).shape == (3, 24) and plain(random(33, 40, device="cpu")).shape == (33, 24) and few.rows == [3]


class _OtherThreadsRun:
    """cuBLAS whose calls give way to other threads; ``products``: of each, the thread's stream and the handle's."""

    def __init__(self, own: threading.local) -> None:
        self.own, self.stream = own, 0
        self.products: list[tuple[int, int]] = []

    def cublasSetStream_v2(self, handle: object, stream: ctypes.c_void_p) -> int:
        self.stream = stream.value or 0
        time.sleep(1e-3)
        return 0

    def cublasGemmEx(self, *_: object) -> int:
        self.products.append((self.own.stream, self.stream))
        return 0

    def cublasCreate_v2(self, *_: object) -> int:
        return 0

    cublasSetMathMode = cublasCreate_v2


def test_threads_on_different_streams_share_a_handle(monkeypatch: pytest.MonkeyPatch) -> None:
    """A product on another's stream would be missing in what that thread records, and run there out of order."""
    own = threading.local()
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(synchronize=lambda: None))
    monkeypatch.setattr("deepinfer.kernels.linear.library.raw_stream", lambda device: own.stream)
    cublas = _OtherThreadsRun(own)
    made = Library(cublas, torch.device("cuda"))  # type: ignore[arg-type]
    x, weight = random(3, 40, device="cpu"), random(24, 40, device="cpu")

    def run(stream: int) -> None:
        own.stream = stream
        for _ in range(10):
            made.linear(x, weight)

    threads = [threading.Thread(target=run, args=(stream,)) for stream in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(cublas.products) == 30 and all(mine == used for mine, used in cublas.products)


def test_every_stream_of_a_handle_has_a_workspace_of_its_own_where_one_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A change of the stream takes the workspace away, and two streams must not share one."""
    calls: list[tuple[str, int, int]] = []
    stream = 0

    class Cublas(_OtherThreadsRun):
        def cublasSetStream_v2(self, handle: object, stream: ctypes.c_void_p) -> int:
            calls.append(("stream", stream.value or 0, 0))
            return 0

        def cublasSetWorkspace_v2(self, handle: object, memory: ctypes.c_void_p, size: ctypes.c_size_t) -> int:
            calls.append(("workspace", memory.value or 0, size.value))
            return 0

    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(synchronize=lambda: None))
    monkeypatch.setattr("deepinfer.kernels.linear.library.raw_stream", lambda device: stream)
    own = threading.local()
    own.stream = 0
    x, weight = random(3, 40, device="cpu"), random(24, 40, device="cpu")
    for wanted in (0, 4096):
        made = Library(Cublas(own), torch.device("cuda"), wanted)  # type: ignore[arg-type]
        made._device = torch.device("cpu")  # where the workspace of this test lies
        calls.clear()
        for number in (1, 1, 2, 1):
            stream = number
            made.linear(x, weight)
        assert [c[:2] for c in calls if c[0] == "stream"] == [("stream", 1), ("stream", 2), ("stream", 1)]
        spaces = [c for c in calls if c[0] == "workspace"]
        if not wanted:
            assert not spaces
            continue
        assert [c[0] for c in calls] == ["stream", "workspace"] * 3 and {c[2] for c in spaces} == {4096}
        assert spaces[0] == spaces[2] != spaces[1]


# What is chosen


@pytest.mark.parametrize(("in_features", "out_features"), [*WEIGHTS, *OTHERS], ids=str)
def test_what_is_chosen_can_be_made_and_launched(in_features: int, out_features: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """For every number of rows: the kernel that is launched is that of the choice, and its grid covers the answer once."""
    launched: list[tuple[Program, tuple[int, ...]]] = []

    class Noted:
        def __init__(self, program: Program) -> None:
            self.program = program

        def launch(self, grid: tuple[int, ...], *args: object) -> None:
            launched.append((self.program, grid))

    monkeypatch.setattr(op, "require", lambda programs, device, after: [Noted(p) for p in programs])
    kernels = ProductKernels(in_features, out_features, torch.bfloat16, torch.device("cpu"))
    assert kernels.limit == limit_of(in_features, out_features)
    for rows in range(1, kernels.limit + 1):
        choice = choose(in_features, out_features, rows)
        assert kernels.covers(rows) == (choice is not None)
        if choice is None:
            continue
        kernels(torch.empty(rows, 0), torch.empty(0), torch.empty(rows, out_features, device="meta"))
        (program, grid), constants = launched.pop(), dict(choice.program(in_features, out_features, "bfloat16").constants)
        assert program == choice.program(in_features, out_features, "bfloat16")
        if isinstance(choice, Few):
            assert grid[0] * choice.tile == out_features and (grid[1] - 1) * choice.tokens < rows <= grid[1] * choice.tokens
            assert in_features % constants["chunk"] == 0 and constants["stages"] - 1 <= in_features // constants["chunk"]
    assert not kernels.covers(kernels.limit + 1)


def test_sizes_without_a_kernel_are_the_librarys() -> None:
    for pair in ((576, 65), (577, 64), (8192, 2048)):
        assert programs_of(*pair, "bfloat16") == [] and choose(*pair, 1) is None
    assert programs_of(577, 64, "bfloat16", gated=True) == [] and choose(577, 64, 64, gated=True) is None
    kernels = ProductKernels(577, 64, torch.bfloat16, torch.device("cpu"))
    assert kernels.limit == 0
    projection = Projection(torch.ones(64, 577), None, kernels)
    assert projection.few_up_to == 0 and projection(torch.ones(2, 577)).eq(577).all()


# Machine code


@pytest.mark.parametrize(("in_features", "choice"), [(576, Few(8, 16, 48 * 1024)), (1536, Few(32, 32, 36 * 1024))], ids=str)
def test_machine_code(in_features: int, choice: Few, tmp_path: Path) -> None:
    program = choice.program(in_features, 64, "bfloat16")
    check_machine_code(program, tmp_path)
    assert read_before_waiting(program) == {"weight"}


@pytest.mark.nightly
def test_machine_code_of_all(tmp_path: Path) -> None:
    programs = {p for shape in NAMED.values() for p in programs_for(shape)}
    programs |= {p for pair in OTHERS for p in programs_of(*pair, "bfloat16")}
    assert len(programs) > len(programs_of(SMOLLM2_135M.hidden, 960, "bfloat16"))
    for program in sorted(programs, key=lambda p: p.name):
        check_machine_code(program, tmp_path)
        assert read_before_waiting(program) == {"weight"}
