"""Projections of many rows on a GPU, with the bits of the library's own, and with a gated activation behind them.

One warp of a block has the copy engine bring chunks of the weight and of the input; the others multiply them, 64 rows a warpgroup, one
tensor-core accumulation after another over K in steps of 16, never split: the order in which cuBLAS adds without workspace. The first
chunks of the weight are under way before the block waits for the kernel ahead. Blocks of neighbouring rows (a cluster) may share the
weight that all of them read: the copy engine then writes one read to each of them.
"""

# Annotations of TileLang functions are values that it reads: no `from __future__ import annotations` here.

from dataclasses import dataclass
from typing import Any

import torch

from ..toolchain import Dialect, Program, shape_config
from ..toolchain.device_code import FILE, let_next_start, prelude, quotient, wait_for_previous
from ..toolchain.driver import Launchable


@dataclass(frozen=True)
class Many:
    """``tokens`` rows (a multiple of 64) and ``tile`` outputs a block, in chunks of ``chunk`` channels, of which ``w_stages`` of the
    weight and ``x_stages`` of the rows are under way at most.

    ``cluster`` blocks of neighbouring rows share the reads of the weight. ``walkers``: so many blocks along the outputs, each for one tile
    after another, which fetch the next tile's first chunks while they finish one; 0 = a block a tile.
    """

    tokens: int
    tile: int
    chunk: int
    w_stages: int
    x_stages: int
    cluster: int = 1
    walkers: int = 0

    def program(self, in_features: int, out_features: int, dtype: str, gated: bool = False) -> Program:
        """The kernel; ``gated``: for ``out_features`` of each half of the weight."""
        constants = shape_config(
            in_features=in_features, out_features=out_features, tokens=self.tokens, tile=self.tile, chunk=self.chunk,
            w_stages=self.w_stages, x_stages=self.x_stages, cluster=self.cluster, walks=self.walkers > 0, gated=gated, dtype=dtype,
        )  # fmt: skip
        return Program("linear", "many_rows", constants, (FILE,), form="many_rows")

    def launch(self, kernel: Launchable, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
        """Launches it for all rows of ``out``."""
        rows, out_features = out.shape
        row_blocks, out_blocks = -(-rows // (self.tokens * self.cluster)) * self.cluster, -(-out_features // self.tile)
        if self.walkers:
            walkers = min(out_blocks, self.walkers)
            kernel.launch((row_blocks, walkers), x, weight, out, walkers, rows)
        else:
            kernel.launch((row_blocks, out_blocks), x, weight, out, rows)


def many_rows(
    d: Dialect,
    in_features: int,
    out_features: int,
    tokens: int,
    tile: int,
    chunk: int,
    w_stages: int,
    x_stages: int,
    cluster: int,
    walks: bool,
    gated: bool,
    dtype: str,
) -> Any:
    """``out = x @ weight.T``: ``x`` ``[rows, in]``, ``weight`` ``[out, in]``, ``out`` ``[rows, out]``.

    ``gated``: ``weight`` ``[2 out, in]``, whose first half gives the gate, and ``out = silu(gate) * up``, gate and up each rounded
    before, as ``swiglu`` has it. ``chunk`` divides ``in_features`` and ``x_stages`` divides ``w_stages``; the rest is as ``Many`` has it.
    ``walks``: block ``b`` along the outputs makes tiles ``b``, ``b + walkers``, …; ``w_stages`` then divides the chunks.
    """
    T = d.T
    rows = T.dynamic("rows")
    chunks = in_features // chunk
    groups = tokens // 64
    threads = 128 * groups
    halves = 2 if gated else 1
    parts = chunk // 64 if gated else 1  # of a chunk, each with gate and up in one piece of shared memory: one product for both
    part = chunk // parts
    rounds, rest = divmod(chunks, w_stages)
    everyone = (1 << cluster) - 1 if cluster > 1 else None
    policy = T.GemmWarpPolicy.FullRow
    out_blocks = -(-out_features // tile)
    assert not walks or rest == 0

    @T.macro
    def fetch_weight(weight, w_s, w_full, out_block, n, at):
        for p, h in T.grid(parts, halves):
            T.tma_copy(
                weight[
                    h * out_features + out_block * tile : h * out_features + out_block * tile + tile,
                    at * chunk + p * part : at * chunk + p * part + part,
                ],
                w_s[n % w_stages, p, h * tile : h * tile + tile, :],
                barrier=w_full[n % w_stages],
                cluster_mask=everyone,
            )
        if T.shuffle_elect(32):  # the lane that copies: it says what to expect before it arrives
            T.mbarrier_arrive(w_full[n % w_stages])

    @T.macro
    def fetch_rows(x, x_s, x_full, row_block, n, at):
        for p in T.unroll(parts):
            T.tma_copy(
                x[row_block * tokens : row_block * tokens + tokens, at * chunk + p * part : at * chunk + p * part + part],
                x_s[n % x_stages, p, :, :],
                barrier=x_full[n % x_stages],
            )
        if T.shuffle_elect(32):
            T.mbarrier_arrive(x_full[n % x_stages])

    @T.macro
    def multiply(x_s, w_s, w_full, x_full, done, total, thread, turn, r, s, more):
        T.mbarrier_wait_parity(w_full[s], (turn * rounds + r) % 2)
        T.mbarrier_wait_parity(x_full[s % x_stages], ((turn * rounds + r) * (w_stages // x_stages) + s // x_stages) % 2)
        for p in T.unroll(parts):
            T.wgmma_gemm(x_s[s % x_stages, p, :, :], w_s[s, p, :, :], total, transpose_B=True, policy=policy)
        # what was begun before this chunk is done: its places may be filled again, unless nothing more is to come
        T.wait_wgmma(parts)
        if r * w_stages + s > 0 and (more or r * w_stages + s - 1 < chunks - x_stages) and thread % 128 < cluster:
            T.mbarrier_arrive(done[(s + w_stages - 1) % w_stages], thread % 128)

    @T.macro
    def finish(out, total, up, row_block, out_block):
        if gated:
            for i, j in T.Parallel(tokens, tile):
                up[i, j] = T.cast(T.cast(total[i, tile + j], dtype), "float32")
            for i, j in T.Parallel(tokens, tile):
                total[i, j] = T.cast(T.cast(total[i, j], dtype), "float32")
            for i, j in T.Parallel(tokens, tile):
                total[i, j] = quotient(d, total[i, j], 1.0 + T.exp(-total[i, j])) * up[i, j]
        for i, j in T.Parallel(tokens, tile):
            if row_block * tokens + i < rows and out_block * tile + j < out_features:
                out[row_block * tokens + i, out_block * tile + j] = T.cast(total[i, j], dtype)

    @T.prim_func
    def many_rows(
        x: T.Tensor((rows, in_features), dtype),
        weight: T.Tensor((halves * out_features, in_features), dtype),
        out: T.Tensor((rows, out_features), dtype),
        walkers: T.int32,
    ):
        with T.Kernel(
            T.ceildiv(T.ceildiv(rows, tokens), cluster) * cluster,
            walkers if walks else out_blocks,
            threads=threads + 32,
            prelude=prelude(d),
            cluster_dims=cluster,
        ) as (row_block, first):
            w_s = T.alloc_shared((w_stages, parts, halves * tile, part), dtype)
            x_s = T.alloc_shared((x_stages, parts, tokens, part), dtype)
            total = T.alloc_fragment((tokens, halves * tile), "float32")
            up = T.alloc_fragment((tokens, tile), "float32") if gated else total
            w_full = T.alloc_barrier([1] * w_stages)
            x_full = T.alloc_barrier([1] * x_stages)
            done = T.alloc_cluster_barrier([groups * cluster] * w_stages)
            thread = T.get_thread_binding()
            turns = T.alloc_var("int32")
            turns = T.truncdiv(out_blocks - first + walkers - 1, walkers) if walks else 1
            let_next_start(d)
            if thread >= threads:
                for n in T.serial(w_stages):
                    fetch_weight(weight, w_s, w_full, first, n, n)
                wait_for_previous(d)
                for n in T.serial(x_stages):
                    fetch_rows(x, x_s, x_full, row_block, n, n)
                for n in T.serial(turns * chunks - x_stages):
                    T.mbarrier_wait_parity(done[n % w_stages], n // w_stages % 2)
                    fetch_rows(x, x_s, x_full, row_block, n + x_stages, (n + x_stages) % chunks)
                    if n + w_stages < turns * chunks:
                        later = n + w_stages
                        fetch_weight(weight, w_s, w_full, first + (later // chunks * walkers if walks else 0), later, later % chunks)
            else:
                for turn in T.serial(turns):
                    T.clear(total)
                    for r in T.serial(rounds):
                        for s in T.unroll(w_stages):
                            multiply(x_s, w_s, w_full, x_full, done, total, thread, turn, r, s, turn + 1 < turns)
                    if rest > 0:
                        for s in T.unroll(rest):
                            multiply(x_s, w_s, w_full, x_full, done, total, thread, turn, rounds, s, turn + 1 < turns)
                    T.wait_wgmma(0)
                    if turn + 1 < turns and thread % 128 < cluster:
                        T.mbarrier_arrive(done[(chunks - 1) % w_stages], thread % 128)
                    finish(out, total, up, row_block, first + (turn * walkers if walks else 0))

    return many_rows
