"""Projections of few rows on a GPU, with the bits of the library's own.

What a library's kernel for few rows costs is mostly its start. This one fetches weights before it waits for the kernel ahead, so that its
start hides behind that one's end. A block multiplies ``tile`` rows of the weight, whole, with ``tokens`` rows of the input: one
tensor-core accumulation after another over K in steps of 16, never split. cuBLAS without workspace adds in the same order;
``agreeing_rows`` compares the two before either is used in the other's place, so that which one runs may follow the number of rows.
"""

# Annotations of TileLang functions are values that it reads: no `from __future__ import annotations` here.

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from ..toolchain import Dialect, ModelShape, Program, shape_config
from ..toolchain.device_code import FILE, let_next_start, prelude, wait_for_previous
from ..toolchain.loading import require
from ..toolchain.shapes import run_dtype
from .library import library

_KB = 1024


@dataclass(frozen=True)
class Choice:
    """How one number of rows is run: ``tokens`` rows and ``tile`` outputs a block, ``ahead`` bytes of weights under way."""

    tokens: int
    tile: int
    ahead: int


def choose(in_features: int, out_features: int, rows: int) -> Choice | None:
    """The fastest kernel found on an H200 for ``rows`` rows (docs/kernels.md); ``None``: the library is faster."""
    if out_features % 64 or in_features % 16:
        return None
    if in_features >= 4096:  # weights are what is waited for; only their start can be hidden
        if rows > 16 or in_features >= 8192:
            return None
        if out_features <= 4096:
            return Choice(8, 16, 48 * _KB) if rows <= 8 else Choice(16, 16, 48 * _KB)
        if out_features <= 8192:
            return Choice(8, 64, 48 * _KB) if rows <= 8 else Choice(16, 16, 24 * _KB)
        return Choice(8, 16, 24 * _KB) if rows <= 8 else None
    if out_features >= 16384:
        return Choice(8, 32, 36 * _KB) if rows <= 8 else Choice(16, 32, 36 * _KB) if rows <= 16 else None
    if rows <= 8:
        return Choice(8, 16, 48 * _KB)
    if out_features >= 2048:
        return Choice(16, 32, 36 * _KB) if rows <= 16 else Choice(32, 32, 36 * _KB) if rows <= 32 else None
    if in_features >= 1024:
        return Choice(16, 16, 48 * _KB) if rows <= 64 else Choice(16, 32, 48 * _KB) if rows <= 128 else None
    return Choice(16, 32, 36 * _KB) if rows <= 64 else Choice(32, 32, 36 * _KB) if rows <= 256 else None


def few_rows(d: Dialect, in_features: int, tokens: int, tile: int, chunk: int, stages: int, dtype: str) -> Any:
    """``out = x @ weight.T``: ``x`` ``[rows, in]``, ``weight`` ``[out, in]``, ``out`` ``[rows, out]``; ``tile`` divides ``out``.

    ``chunk`` divides ``in_features``; ``stages`` − 1 chunks are under way at a time.
    """
    T = d.T
    rows, out_features = T.dynamic("rows"), T.dynamic("out_features")
    chunks = in_features // chunk
    early = stages - 1  # chunks fetched before the first is used; at most all

    @T.prim_func
    def few_rows(
        x: T.Tensor((rows, in_features), dtype),
        weight: T.Tensor((out_features, in_features), dtype),
        out: T.Tensor((rows, out_features), dtype),
    ):
        with T.Kernel(out_features // tile, T.ceildiv(rows, tokens), threads=2 * tile, prelude=prelude(d)) as (block, row_block):
            w_s = T.alloc_shared((stages, tile, chunk), dtype)
            x_s = T.alloc_shared((stages, tokens, chunk), dtype)
            total = T.alloc_fragment((tile, tokens), "float32")
            let_next_start(d)
            for n in T.serial(early):
                T.async_copy(weight[block * tile : block * tile + tile, n * chunk : n * chunk + chunk], w_s[n, :, :])
            wait_for_previous(d)
            for n in T.serial(early):
                T.async_copy(x[row_block * tokens : row_block * tokens + tokens, n * chunk : n * chunk + chunk], x_s[n, :, :])
            T.clear(total)
            # Copies are waited for by how many groups were begun behind them: x of the later early chunks, then two of each later chunk.
            for n in T.serial(early):
                T.ptx_wait_group(early - 1)
                T.sync_threads()
                if n + early < chunks:
                    T.async_copy(
                        weight[block * tile : block * tile + tile, (n + early) * chunk : (n + early) * chunk + chunk],
                        w_s[(n + early) % stages, :, :],
                    )
                    T.async_copy(
                        x[row_block * tokens : row_block * tokens + tokens, (n + early) * chunk : (n + early) * chunk + chunk],
                        x_s[(n + early) % stages, :, :],
                    )
                else:
                    T.ptx_commit_group()
                    T.ptx_commit_group()
                T.gemm(w_s[n % stages, :, :], x_s[n % stages, :, :], total, transpose_B=True, policy=T.GemmWarpPolicy.FullRow)
            if chunks > early:
                for m in T.serial(chunks - early):
                    T.ptx_wait_group(2 * (early - 1))
                    T.sync_threads()
                    if m + 2 * early < chunks:
                        T.async_copy(
                            weight[block * tile : block * tile + tile, (m + 2 * early) * chunk : (m + 2 * early) * chunk + chunk],
                            w_s[(m + 2 * early) % stages, :, :],
                        )
                        T.async_copy(
                            x[row_block * tokens : row_block * tokens + tokens, (m + 2 * early) * chunk : (m + 2 * early) * chunk + chunk],
                            x_s[(m + 2 * early) % stages, :, :],
                        )
                    else:
                        T.ptx_commit_group()
                        T.ptx_commit_group()
                    T.gemm(
                        w_s[(m + early) % stages, :, :],
                        x_s[(m + early) % stages, :, :],
                        total,
                        transpose_B=True,
                        policy=T.GemmWarpPolicy.FullRow,
                    )
            for i, j in T.Parallel(tile, tokens):
                if row_block * tokens + j < rows:
                    out[row_block * tokens + j, block * tile + i] = T.cast(total[i, j], dtype)

    return few_rows


def few_rows_program(in_features: int, choice: Choice, dtype: str) -> Program:
    """The kernel of a choice."""
    chunk = next(c for c in (128, 64, 32, 16) if in_features % c == 0 and (c < 128 or in_features // c >= 8))
    stages = min(in_features // chunk, max(2, choice.ahead // (choice.tile * chunk * 2))) + 1
    constants = shape_config(in_features=in_features, tokens=choice.tokens, tile=choice.tile, chunk=chunk, stages=stages, dtype=dtype)
    return Program("linear", "few_rows", constants, (FILE,))


_LIMITS = (8, 16, 32, 64, 128, 256)
"""Rows between which the choice may change."""


def few_rows_programs(in_features: int, out_features: int, dtype: str) -> list[Program]:
    """Every kernel that is chosen for some number of rows."""
    chosen = [choose(in_features, out_features, rows) for rows in _LIMITS]
    return [few_rows_program(in_features, choice, dtype) for choice in dict.fromkeys(chosen) if choice is not None]


class FewRows:
    """The kernels for weights ``[out_features, in_features]``, for up to ``limit`` rows; 0 = for none.

    Raises ``KernelBuildError`` if one cannot be had.
    """

    def __init__(self, in_features: int, out_features: int, dtype: torch.dtype, device: torch.device) -> None:
        name = run_dtype(dtype)
        chosen = {rows: choose(in_features, out_features, rows) for rows in _LIMITS}
        programs = few_rows_programs(in_features, out_features, name)
        kernels = dict(zip(programs, require(programs, device, after=True), strict=True)) if programs else {}
        self._out_features = out_features
        self._kernels = [
            (rows, choice, kernels[few_rows_program(in_features, choice, name)]) for rows, choice in chosen.items() if choice is not None
        ]
        self.limit = max((rows for rows, _, _ in self._kernels), default=0)

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
        """``x`` ``[R, in]``, ``weight`` ``[out, in]``, ``out`` ``[R, out]``; all contiguous, ``R`` up to ``limit``."""
        rows = out.shape[0]
        _, choice, kernel = next(k for k in self._kernels if rows <= k[0])
        kernel.launch((self._out_features // choice.tile, -(-rows // choice.tokens)), x, weight, out, rows, self._out_features)


class Projection:
    """One weight ``[out, in]`` with optional bias, run by whichever form is fastest at a number of rows that has the same bits.

    ``few``, for weights without bias, is used up to ``few_up_to`` rows; 0 = never.
    """

    __slots__ = ("bias", "few", "few_up_to", "library", "weight")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None, few: FewRows | None = None) -> None:
        self.weight, self.bias = weight, bias
        self.few = few if bias is None else None
        self.few_up_to = 0 if self.few is None else self.few.limit
        self.library = library(weight.device) if bias is None else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` ``[R, in]`` → ``[R, out]``."""
        if self.few is None or x.shape[0] > self.few_up_to:
            return self.by_library(x)
        out = x.new_empty((x.shape[0], self.weight.shape[0]))
        self.few(x, self.weight, out)
        return out

    def by_library(self, x: torch.Tensor) -> torch.Tensor:
        """The same by cuBLAS."""
        if self.library is None:
            return F.linear(x, self.weight, self.bias)
        return self.library.linear(x, self.weight)


class Product(Protocol):
    """What ``agreeing_rows`` compares: ``Projection``, or one that keeps its weight in another form. ``weight`` in the run dtype."""

    few_up_to: int

    @property
    def weight(self) -> torch.Tensor: ...
    @property
    def bias(self) -> torch.Tensor | None: ...
    @property
    def few(self) -> object | None: ...
    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...
    def by_library(self, x: torch.Tensor) -> torch.Tensor: ...


def agreeing_rows(projections: Sequence[Product], candidates: Sequence[int]) -> list[int]:
    """Which numbers of rows give every row the bits it has among the most rows of all: for all ``projections``, ascending.

    Compares every row of random inputs, bit by bit. A kernel for few rows that differs from the library is switched off (``few_up_to``)
    before the library's own form is compared. The largest candidate is the definition and always agrees.
    """
    agreed = sorted(set(candidates))
    seen: dict[tuple[type, int, int, bool], tuple[list[int], int]] = {}
    for projection in projections:
        weight = projection.weight
        key = (type(projection), weight.shape[0], weight.shape[1], projection.bias is not None)
        if key not in seen:
            seen[key] = _agreeing(projection, sorted(set(candidates)))
        rows, projection.few_up_to = seen[key][0], min(projection.few_up_to, seen[key][1])
        agreed = [r for r in agreed if r in rows]
    return agreed


def _agreeing(projection: Product, candidates: list[int]) -> tuple[list[int], int]:
    """Agreeing candidates, and up to how many rows the kernel for few agrees."""
    weight = projection.weight
    generator = torch.Generator().manual_seed(0)
    probe = torch.randn(candidates[-1], weight.shape[1], generator=generator).to(device=weight.device, dtype=weight.dtype)
    whole = projection.by_library(probe)
    few_up_to = 0
    if projection.few is not None:
        for rows in [r for r in candidates if r <= projection.few_up_to]:
            if not torch.equal(projection(probe[:rows].contiguous()), whole[:rows]):
                break
            few_up_to = rows
    found = []
    for rows in candidates:
        if rows <= few_up_to or torch.equal(projection.by_library(probe[:rows].contiguous()), whole[:rows]):
            found.append(rows)
    return found, few_up_to


def programs_for(shape: ModelShape) -> list[Program]:
    """What a model of ``shape`` launches."""
    return [program for width, out in linears_of(shape) for program in few_rows_programs(width, out, shape.dtype)]


def linears_of(shape: ModelShape) -> list[tuple[int, int]]:
    """(in, out) of the projections of a layer, then of the head."""
    qkv = shape.q_size + 2 * shape.kv_size
    return [
        (shape.hidden, qkv),
        (shape.q_size, shape.hidden),
        (shape.hidden, 2 * shape.intermediate),
        (shape.intermediate, shape.hidden),
        (shape.hidden, shape.vocab),
    ]
