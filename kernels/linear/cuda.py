"""Projections of few rows on a GPU, with the bits of the library's own.

What a library's kernel for few rows costs is mostly its start. This one fetches weights before it waits for the kernel ahead, so that its
start hides behind that one's end. A block multiplies ``tile`` rows of the weight, whole, with ``tokens`` rows of the input: one
tensor-core accumulation after another over K in steps of 16, never split. cuBLAS without workspace adds in the same order; ``census``
compares the two before either is used in the other's place, so that which one runs may follow the number of rows.
"""

# Annotations of TileLang functions are values that it reads: no `from __future__ import annotations` here.

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from deepinfer.errors import KernelBuildError

from ..toolchain import Dialect, ModelShape, Program, shape_config
from ..toolchain.device_code import FILE, let_next_start, prelude, wait_for_previous
from ..toolchain.loading import require
from ..toolchain.shapes import run_dtype

_BYTES_AHEAD = 48 * 1024
"""Of weights a block has under way: three such blocks of a multiprocessor keep memory busy."""


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


def few_rows_program(in_features: int, tokens: int, tile: int, dtype: str, ahead: int = _BYTES_AHEAD) -> Program:
    """The kernel for up to ``tokens`` rows a block; ``ahead``: bytes of weights that a block has under way. Raises ``KernelBuildError``."""
    chunk = next((c for c in (128, 64, 32, 16) if in_features % c == 0 and (c < 128 or in_features // c >= 8)), 0)
    if not chunk:
        raise KernelBuildError(f"inputs of {in_features} channels are no multiple of 16")
    stages = min(in_features // chunk, max(2, ahead // (tile * chunk * 2))) + 1
    constants = shape_config(in_features=in_features, tokens=tokens, tile=tile, chunk=chunk, stages=stages, dtype=dtype)
    return Program("linear", "few_rows", constants, (FILE,))


_TOKENS = (8, 16, 32)
"""Rows of a block, one kernel each."""

_WIDE_INPUT = 4096
"""From so many channels on a block's weights are more than its rows."""


def _tile(tokens: int, in_features: int) -> int:
    return 32 if tokens == 32 else 16


class FewRows:
    """The kernels for inputs of ``in_features`` channels: ``x @ weight.T`` of up to ``most`` rows.

    Raises ``KernelBuildError`` if one cannot be had.
    """

    def __init__(self, in_features: int, dtype: torch.dtype, device: torch.device) -> None:
        programs = self.programs(in_features, run_dtype(dtype))
        self._kernels = dict(zip(_TOKENS, require(programs, device, after=True), strict=True))
        self._tiles = {tokens: _tile(tokens, in_features) for tokens in _TOKENS}

    @staticmethod
    def programs(in_features: int, dtype: str) -> list[Program]:
        """What it launches."""
        return [few_rows_program(in_features, tokens, _tile(tokens, in_features), dtype) for tokens in _TOKENS]

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
        """``x`` ``[R, in]``, ``weight`` ``[out, in]`` with ``out`` a multiple of 32, ``out`` ``[R, out]``; all contiguous."""
        rows, width = out.shape
        tokens = next((t for t in _TOKENS if rows <= t), _TOKENS[-1])
        grid = (width // self._tiles[tokens], -(-rows // tokens))
        self._kernels[tokens].launch(grid, x, weight, out, rows, width)


def few_rows_limit(in_features: int, out_features: int) -> int:
    """Up to how many rows these kernels are faster than the library's on an H200 (docs/kernels.md)."""
    if in_features >= _WIDE_INPUT:
        return 8 if in_features < 2 * _WIDE_INPUT else 0
    if out_features >= 16384:
        return 16
    return 256 if out_features <= 1024 else 32


class Projection:
    """One weight ``[out, in]`` with optional bias, run by whichever form is fastest at a number of rows that has the same bits.

    ``few`` is used up to ``few_up_to`` rows; 0 = never.
    """

    __slots__ = ("bias", "few", "few_up_to", "weight")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, few: FewRows | None = None, few_up_to: int = 0) -> None:
        self.weight, self.bias = weight, bias
        self.few, self.few_up_to = few, few_up_to

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` ``[R, in]`` → ``[R, out]``."""
        if self.few is None or x.shape[0] > self.few_up_to:
            return F.linear(x, self.weight, self.bias)
        out = x.new_empty((x.shape[0], self.weight.shape[0]))
        self.few(x, self.weight, out)
        return out


def agreeing_rows(projections: Sequence[Projection], candidates: Sequence[int]) -> list[int]:
    """Which numbers of rows give every row the bits it has among the most rows of all: for all ``projections``, ascending.

    Compares every row of random inputs, bit by bit. A kernel for few rows that differs from the library is switched off (``few_up_to``)
    before the library's own form is compared. The largest candidate is the definition and always agrees.
    """
    agreed = sorted(set(candidates))
    seen: dict[tuple[int, int, bool], tuple[list[int], int]] = {}
    for projection in projections:
        weight = projection.weight
        key = (weight.shape[0], weight.shape[1], projection.bias is not None)
        if key not in seen:
            seen[key] = _agreeing(projection, sorted(set(candidates)))
        rows, projection.few_up_to = seen[key][0], min(projection.few_up_to, seen[key][1])
        agreed = [r for r in agreed if r in rows]
    return agreed


def _agreeing(projection: Projection, candidates: list[int]) -> tuple[list[int], int]:
    """Agreeing candidates, and up to how many rows the kernel for few agrees."""
    weight = projection.weight
    generator = torch.Generator().manual_seed(0)
    probe = torch.randn(candidates[-1], weight.shape[1], generator=generator).to(device=weight.device, dtype=weight.dtype)
    whole = F.linear(probe, weight, projection.bias)
    few_up_to = 0
    if projection.few is not None:
        for rows in [r for r in candidates if r <= projection.few_up_to]:
            if not torch.equal(projection(probe[:rows].contiguous()), whole[:rows]):
                break
            few_up_to = rows
    found = []
    for rows in candidates:
        if rows <= few_up_to or torch.equal(F.linear(probe[:rows].contiguous(), weight, projection.bias), whole[:rows]):
            found.append(rows)
    return found, few_up_to


def programs_for(shape: ModelShape) -> list[Program]:
    """What a model of ``shape`` launches."""
    widths = dict.fromkeys((shape.hidden, shape.q_size, shape.intermediate))
    return [program for width in widths for program in FewRows.programs(width, shape.dtype)]
