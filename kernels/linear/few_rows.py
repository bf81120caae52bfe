"""Projections of few rows on a GPU, with the bits of the library's own.

What a library's kernel for few rows costs is mostly its start. This one fetches weights before it waits for the kernel ahead, so that its
start hides behind that one's end. A block multiplies ``tile`` rows of the weight, whole, with ``tokens`` rows of the input: one
tensor-core accumulation after another over K in steps of 16, never split. cuBLAS without workspace adds in the same order.
"""

# Annotations of TileLang functions are values that it reads: no `from __future__ import annotations` here.

from dataclasses import dataclass
from typing import Any

import torch

from ..toolchain import Dialect, Program, shape_config
from ..toolchain.device_code import FILE, let_next_start, prelude, wait_for_previous
from ..toolchain.driver import Launchable


@dataclass(frozen=True)
class Few:
    """``tokens`` rows and ``tile`` outputs a block, ``ahead`` bytes of weights under way."""

    tokens: int
    tile: int
    ahead: int

    def program(self, in_features: int, out_features: int, dtype: str, gated: bool = False) -> Program:
        """The kernel, for any ``out_features`` that ``tile`` divides; there is none with an activation."""
        assert not gated
        chunk = next(c for c in (128, 64, 32, 16) if in_features % c == 0 and (c < 128 or in_features // c >= 8))
        stages = min(in_features // chunk, max(2, self.ahead // (self.tile * chunk * 2))) + 1
        constants = shape_config(in_features=in_features, tokens=self.tokens, tile=self.tile, chunk=chunk, stages=stages, dtype=dtype)
        return Program("linear", "few_rows", constants, (FILE,), form="few_rows")

    def launch(self, kernel: Launchable, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
        """Launches it for all rows of ``out``."""
        rows, out_features = out.shape
        kernel.launch((out_features // self.tile, -(-rows // self.tokens)), x, weight, out, rows, out_features)


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
