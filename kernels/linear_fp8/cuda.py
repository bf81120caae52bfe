"""Projections of weights that stay in 8-bit floats, on a GPU, with the bits of the expanded weight.

Few rows: ``few_rows_fp8`` reads the weight as it is stored, half the bytes, and makes each number ``dtype(float32(value) * scale)`` in
registers, in the places where a tensor-core product wants it; then it multiplies as ``linear.few_rows`` does, one accumulation after
another over K in steps of 16. More rows: ``expand_fp8`` writes the expanded weight to memory that all projections of a model share, and
the library multiplies. ``linear.cuda.agreeing_rows`` compares the two before either is used.
"""

# Annotations of TileLang functions are values that it reads: no `from __future__ import annotations` here.

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from deepinfer.errors import KernelBuildError

from ..fp8_cache.device import FILE as FP8_FILE
from ..fp8_cache.device import byte_type, decoded
from ..fp8_cache.device import prelude as fp8_prelude
from ..linear.cuda import linears_of
from ..linear.library import library
from ..toolchain import Dialect, ModelShape, Program, shape_config
from ..toolchain.device_code import FILE, let_next_start, wait_for_previous
from ..toolchain.driver import Launchable
from ..toolchain.loading import require
from ..toolchain.shapes import even_blocks, run_dtype
from .reference import SCALE_COLUMNS, SCALE_ROWS, PackedWeight, can_pack

_KB = 1024
_WIDE = 8  # numbers that a thread expands at a time: 8 bytes in, 16 out
_PAD = 16  # bytes behind a row in shared memory, without which 8 rows would be read through the same banks

# Rounding to bfloat16 on the CPU target, which has no such type.
_ON_CPU = """
#include <stdint.h>
#include <string.h>
extern "C" float as_bfloat16(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  bits = (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000u;
  memcpy(&x, &bits, 4);
  return x;
}
"""


def _prelude(d: Dialect) -> str | None:
    return f"{fp8_prelude(d)}{_ON_CPU}" if d.cpu else fp8_prelude(d)


def _number(d: Dialect, value: Any, scale: Any, dtype: str) -> Any:
    """What ``value`` stands for, in ``dtype``."""
    product = decoded(d, value) * scale
    rounded_in_c = d.cpu and dtype == "bfloat16"
    return d.T.call_extern("float32", "as_bfloat16", product) if rounded_in_c else d.T.cast(product, dtype)


@dataclass(frozen=True)
class Choice:
    """How one number of rows is run: ``tokens`` rows and ``tile`` outputs a block, ``ahead`` bytes of weights under way, ``chunk`` columns
    at a time at most; ``turned``: see ``few_rows_fp8``."""

    tokens: int
    tile: int
    ahead: int
    chunk: int = 128
    turned: bool = False


def choose(in_features: int, out_features: int, rows: int) -> Choice | None:
    """The kernel for ``rows`` rows (docs/kernels.md); ``None``: the weight is expanded."""
    if not can_pack(in_features, (out_features,)):
        return None
    if rows <= 16 and out_features >= 16384:  # so many blocks that some wait for their turn: the smaller, the fewer
        return Choice(8 if rows <= 8 else 16, 32, 16 * _KB)
    if rows <= 32:
        return Choice(16, 32, 32 * _KB, turned=True) if rows <= 16 else Choice(32, 32, 24 * _KB, turned=True)
    if rows <= 64 or (rows <= 256 and out_features <= 8192):
        return Choice(64, 64, 20 * _KB, 64)
    if rows <= 128:
        return Choice(128, 64, 16 * _KB, 64)
    return Choice(256, 64, 8 * _KB, 64) if rows <= 256 else None


def few_rows_fp8(d: Dialect, in_features: int, tokens: int, tile: int, chunk: int, stages: int, turned: bool, dtype: str) -> Any:
    """``out = x @ w.T``, ``w[o, i] = dtype(float32(weight[o, i]) * scale[o // 16, i // 128])``.

    ``x`` ``[rows, in]``, ``weight`` ``[out, in]``, ``out`` ``[rows, out]``; ``tile`` divides ``out`` and is a multiple of 16.
    ``chunk`` divides ``in_features`` and 128; ``stages`` − 1 chunks are under way at a time. Making numbers is what a warp does longest:
    ``turned``, outputs are the columns of a tensor-core product, of which a warp takes 8, and ``tokens``, at least 16, its rows; else
    outputs are the rows, 16 a warp, in warpgroups where ``tile`` is 64.
    """
    T = d.T
    rows, out_features, strips = T.dynamic("rows"), T.dynamic("out_features"), T.dynamic("strips")
    chunks, spans = in_features // chunk, -(-in_features // SCALE_COLUMNS)
    early = stages - 1  # chunks fetched before the first is used; at most all
    stored, kind = d.stored(dtype), byte_type(d)
    strip, threads = tile // SCALE_ROWS, (4 if turned else 2) * tile

    @T.macro
    def fetch_weight(weight: Any, w_s: Any, block: Any, n: Any) -> None:
        if d.cpu:
            for i, k in T.grid(tile, chunk):
                w_s[n % stages, i, k] = weight[block * tile + i, n * chunk + k]
        else:
            T.async_copy(weight[block * tile : block * tile + tile, n * chunk : n * chunk + chunk], w_s[n % stages, :, 0:chunk])

    @T.macro
    def fetch_x(x: Any, x_s: Any, row_block: Any, n: Any) -> None:
        if d.cpu:
            for j, k in T.grid(tokens, chunk):
                x_s[n % stages, j, k] = T.if_then_else(
                    row_block * tokens + j < rows, x[T.min(row_block * tokens + j, rows - 1), n * chunk + k], T.cast(0, stored)
                )
        else:
            T.async_copy(x[row_block * tokens : row_block * tokens + tokens, n * chunk : n * chunk + chunk], x_s[n % stages, :, :])

    @T.macro
    def arrived(behind: int) -> None:
        if not d.cpu:
            T.ptx_wait_group(behind)
            T.sync_threads()

    @T.macro
    def nothing() -> None:
        if not d.cpu:
            T.ptx_commit_group()
            T.ptx_commit_group()

    @T.macro
    def multiply(w_s: Any, x_s: Any, s_s: Any, w: Any, total: Any, n: Any) -> None:
        for i, k in d.par(tile, chunk):
            w[i, k] = _number(d, w_s[n % stages, i, k], s_s[i // SCALE_ROWS, n * chunk // SCALE_COLUMNS], dtype)
        if d.cpu:
            for i, j, k in T.grid(tile, tokens, chunk):
                if turned:
                    total[j, i] += T.cast(w[i, k], "float32") * T.cast(x_s[n % stages, j, k], "float32")
                else:
                    total[i, j] += T.cast(w[i, k], "float32") * T.cast(x_s[n % stages, j, k], "float32")
        elif turned:
            T.gemm(x_s[n % stages, :, :], w, total, transpose_B=True, policy=T.GemmWarpPolicy.FullCol)
        else:
            T.gemm(w, x_s[n % stages, :, :], total, transpose_B=True, policy=T.GemmWarpPolicy.FullRow)

    @T.prim_func
    def few_rows_fp8(
        x: T.Tensor((rows, in_features), stored),
        weight: T.Tensor((out_features, in_features), kind),
        scale: T.Tensor((strips, spans), "float32"),
        out: T.Tensor((rows, out_features), stored),
    ):
        with T.Kernel(out_features // tile, T.ceildiv(rows, tokens), threads=threads, prelude=_prelude(d)) as (block, row_block):
            w_s = d.shared((stages, tile, chunk + _PAD), kind)
            x_s = d.shared((stages, tokens, chunk), stored)
            s_s = d.shared((strip, spans), "float32")
            w = d.acc((tile, chunk), stored)
            total = d.acc((tokens, tile) if turned else (tile, tokens), "float32")
            let_next_start(d)
            for n in T.serial(early):
                fetch_weight(weight, w_s, block, n)
            for i, k in d.par(strip, spans):
                s_s[i, k] = scale[block * strip + i, k]
            wait_for_previous(d)
            for n in T.serial(early):
                fetch_x(x, x_s, row_block, n)
            T.clear(total)
            # Copies are waited for by how many groups were begun behind them: x of the later early chunks, then two of each later chunk.
            for n in T.serial(early):
                arrived(early - 1)
                if n + early < chunks:
                    fetch_weight(weight, w_s, block, n + early)
                    fetch_x(x, x_s, row_block, n + early)
                else:
                    nothing()
                multiply(w_s, x_s, s_s, w, total, n)
            if chunks > early:
                for m in T.serial(chunks - early):
                    arrived(2 * (early - 1))
                    if m + 2 * early < chunks:
                        fetch_weight(weight, w_s, block, m + 2 * early)
                        fetch_x(x, x_s, row_block, m + 2 * early)
                    else:
                        nothing()
                    multiply(w_s, x_s, s_s, w, total, m + early)
            if turned:
                for j, i in d.par(tokens, tile):
                    if row_block * tokens + j < rows:
                        out[row_block * tokens + j, block * tile + i] = T.cast(total[j, i], stored)
            else:
                for i, j in d.par(tile, tokens):
                    if row_block * tokens + j < rows:
                        out[row_block * tokens + j, block * tile + i] = T.cast(total[i, j], stored)

    return few_rows_fp8


def expand_fp8(d: Dialect, in_features: int, blocks: int, threads: int, rows: int, dtype: str) -> Any:
    """``out[o, i] = dtype(float32(weight[o, i]) * scale[o // 16, i // 128])``. ``rows`` (a divisor of 16 and of ``out``) rows a block, each
    cut in ``blocks`` pieces.

    Grid: ``(out / rows, blocks)``. The weight is read before the kernel waits for those before.
    """
    T = d.T
    out_features, strips, spans = T.dynamic("out_features"), T.dynamic("strips"), -(-in_features // SCALE_COLUMNS)
    stored, kind = d.stored(dtype), byte_type(d)
    width = in_features // blocks
    shape = (rows, threads, _WIDE)

    @T.prim_func
    def expand_fp8(
        weight: T.Tensor((out_features, in_features), kind),
        scale: T.Tensor((strips, spans), "float32"),
        out: T.Tensor((out_features, in_features), stored),
    ):
        with T.Kernel(out_features // rows, blocks, threads=threads, prelude=_prelude(d)) as (strip, piece):
            values, numbers = d.acc(shape, kind), d.acc(shape, stored)
            let_next_start(d)
            for r, t, v in d.par(*shape):
                if t * _WIDE + v < width:
                    values[r, t, v] = weight[strip * rows + r, piece * width + t * _WIDE + v]
            for r, t, v in d.par(*shape):
                if t * _WIDE + v < width:
                    place = scale[strip * rows // SCALE_ROWS, (piece * width + t * _WIDE + v) // SCALE_COLUMNS]
                    numbers[r, t, v] = _number(d, values[r, t, v], place, dtype)
            wait_for_previous(d)
            for r, t, v in d.par(*shape):
                if t * _WIDE + v < width:
                    out[strip * rows + r, piece * width + t * _WIDE + v] = numbers[r, t, v]

    return expand_fp8


_LIMITS = (8, 16, 32, 64, 128, 256)
"""Rows between which the choice may change."""

_FILES = (FILE, FP8_FILE, "linear_fp8/reference.py")
_ROWS = 4  # of a block that expands


def few_rows_program(in_features: int, choice: Choice, dtype: str) -> Program:
    """The kernel of a choice."""
    chunk = next(c for c in (128, 64, 32, 16) if c <= choice.chunk and in_features % c == 0 and (c < 128 or in_features // c >= 8))
    stages = min(in_features // chunk, max(2, choice.ahead // (choice.tile * chunk))) + 1
    sizes = {"tokens": choice.tokens, "tile": choice.tile, "chunk": chunk, "stages": stages, "turned": choice.turned}
    constants = shape_config(in_features=in_features, dtype=dtype, **sizes)
    return Program("linear_fp8", "few_rows_fp8", constants, _FILES)


def few_rows_programs(in_features: int, out_features: int, dtype: str) -> list[Program]:
    """Every kernel that is chosen for some number of rows."""
    chosen = [choose(in_features, out_features, rows) for rows in _LIMITS]
    return [few_rows_program(in_features, choice, dtype) for choice in dict.fromkeys(chosen) if choice is not None]


def expand_program(in_features: int, dtype: str) -> Program:
    """The kernel that expands weights ``[any, in_features]``. Raises ``KernelBuildError`` if their rows are not read 8 bytes at a time."""
    if in_features % _WIDE:
        raise KernelBuildError(f"rows of {in_features} numbers cannot be expanded {_WIDE} at a time")
    blocks, threads = even_blocks(in_features // _WIDE, 256)
    constants = shape_config(in_features=in_features, blocks=blocks, threads=threads, rows=_ROWS, dtype=dtype)
    return Program("linear_fp8", "expand_fp8", constants, _FILES)


class FewRowsFp8:
    """The kernels for packed weights ``[out_features, in_features]``, for up to ``limit`` rows; 0 = for none.

    Raises ``KernelBuildError`` if one cannot be had. ``kernels``: those of ``few_rows_programs``, loaded elsewhere.
    """

    def __init__(
        self, in_features: int, out_features: int, dtype: torch.dtype, device: torch.device, kernels: Sequence[Launchable] | None = None
    ) -> None:
        name = run_dtype(dtype)
        chosen = {rows: choose(in_features, out_features, rows) for rows in _LIMITS}
        programs = few_rows_programs(in_features, out_features, name)
        if kernels is None:
            kernels = require(programs, device, after=True) if programs else []
        made = dict(zip(programs, kernels, strict=True))
        self._out_features = out_features
        self._kernels = [
            (rows, choice, made[few_rows_program(in_features, choice, name)]) for rows, choice in chosen.items() if choice is not None
        ]
        self.limit = max((rows for rows, _, _ in self._kernels), default=0)

    def covers(self, rows: int) -> bool:
        """Whether there is one for so many rows."""
        return rows <= self.limit

    def __call__(self, x: torch.Tensor, weight: PackedWeight, out: torch.Tensor) -> None:
        """``x`` ``[R, in]``, ``weight`` of ``[out, in]``, ``out`` ``[R, out]``; all contiguous, ``R`` up to ``limit``."""
        rows = out.shape[0]
        _, choice, kernel = next(k for k in self._kernels if rows <= k[0])
        grid = (self._out_features // choice.tile, -(-rows // choice.tokens))
        kernel.launch(grid, x, weight.values, weight.scale, out, rows, self._out_features, weight.scale.shape[0])


class Expansion:
    """Memory for one expanded weight, shared by all projections of a model, which run one after another on one stream.

    Args:
        dtype: bfloat16 or float16.
        device: a GPU.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.device = dtype, device
        self._kernels: dict[int, Launchable] = {}
        self._most = 0
        self._room = torch.empty(0, dtype=dtype, device=device)

    def reserve(self, shape: Sequence[int], kernel: Launchable | None = None) -> None:
        """Makes ready for weights ``shape``; before any graph is recorded. Raises ``KernelBuildError`` if there is no kernel for them.
        ``kernel``: that of ``expand_program``, loaded elsewhere."""
        out_features, in_features = shape
        if in_features not in self._kernels:
            programs = [expand_program(in_features, run_dtype(self.dtype))]
            self._kernels[in_features] = require(programs, self.device, after=True)[0] if kernel is None else kernel
        self._most = max(self._most, out_features * in_features)

    def allocate(self) -> None:
        """Has the memory for what was reserved, which otherwise is there at the first call."""
        if self._room.numel() < self._most:
            self._room = torch.empty(self._most, dtype=self.dtype, device=self.device)

    def __call__(self, weight: PackedWeight) -> torch.Tensor:
        """``weight`` expanded, ``[out, in]``, until the next call. Its shape must have been reserved."""
        out_features, in_features = weight.shape
        self.allocate()
        out = self._room[: out_features * in_features].view(out_features, in_features)
        blocks, _ = even_blocks(in_features // _WIDE, 256)
        grid = (out_features // _ROWS, blocks)
        self._kernels[in_features].launch(grid, weight.values, weight.scale, out, out_features, weight.scale.shape[0])
        return out


class PackedProjection:
    """One packed weight ``[out, in]`` without bias, called as ``linear.cuda.Projection`` is.

    ``few`` is used up to ``few_up_to`` rows; more rows are multiplied by the library, with the weight in ``expansion``.
    """

    __slots__ = ("bias", "expansion", "few", "few_up_to", "library", "packed")

    def __init__(self, packed: PackedWeight, few: FewRowsFp8, expansion: Expansion) -> None:
        self.packed, self.few, self.expansion = packed, few, expansion
        self.few_up_to = few.limit
        self.bias: torch.Tensor | None = None
        self.library = library(packed.values.device)
        expansion.reserve(packed.shape)

    @property
    def weight(self) -> torch.Tensor:
        """The expanded weight, until the next use of ``expansion``."""
        return self.expansion(self.packed)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` ``[R, in]`` → ``[R, out]``."""
        if x.shape[0] > self.few_up_to:
            return self.by_library(x)
        out = x.new_empty((x.shape[0], self.packed.shape[0]))
        self.few(x, self.packed, out)
        return out

    def by_library(self, x: torch.Tensor) -> torch.Tensor:
        """The same by cuBLAS, of the expanded weight."""
        weight = self.weight
        return F.linear(x, weight) if self.library is None else self.library.linear(x, weight)


def differing(projections: Sequence[PackedProjection]) -> list[str]:
    """What is wrong with ``projections``, after ``linear.cuda.agreeing_rows`` has seen them: one line a shape, empty = nothing.

    A kernel for few rows that was switched off for some rows it is chosen for, or expanded weights that are not those of
    ``reference.expand``, bit by bit; these are compared for one weight of each shape.
    """
    found: dict[tuple[int, ...], str] = {}
    seen: set[tuple[int, ...]] = set()
    for projection in projections:
        shape = tuple(projection.packed.shape)
        if projection.few_up_to < projection.few.limit:
            found[shape] = f"{list(shape)}: products of more than {projection.few_up_to} rows have other bits than the library's"
        elif shape not in seen and not _expands(projection):
            found[shape] = f"{list(shape)}: expanded weights are other numbers than the reference's"
        seen.add(shape)
    return list(found.values())


def _expands(projection: PackedProjection) -> bool:
    packed, weight = projection.packed, projection.weight
    pieces = range(0, packed.shape[0], _PIECE)
    parts = ((at, PackedWeight(packed.values[at : at + _PIECE], packed.scale[at // SCALE_ROWS :][: _PIECE // SCALE_ROWS])) for at in pieces)
    return all(torch.equal(weight[at : at + _PIECE], part.expanded(weight.dtype)) for at, part in parts)


_PIECE = 1024  # rows that the reference expands at a time, for its float32 copies


def programs_for(shape: ModelShape) -> list[Program]:
    """What a model of ``shape`` launches: nothing unless its weights are packed."""
    if shape.weights != "fp8":
        return []
    pairs = [pair for pair in linears_of(shape)[:-1] if can_pack(pair[0], (pair[1],))]  # the head is never packed
    few = [program for pair in pairs for program in few_rows_programs(*pair, shape.dtype)]
    return [*few, *(expand_program(width, shape.dtype) for width in dict.fromkeys(width for width, _ in pairs))]
