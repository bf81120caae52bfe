"""Attention of units of many rows on a GPU: for prompts and mixed steps. What a unit is and why bits are the same: ``cuda``."""

# Annotations of TileLang functions are values that it reads: no `from __future__ import annotations` here.

from typing import Any

from ..toolchain import Dialect
from ..toolchain.device_code import exp2, let_next_start, prelude, wait_for_previous
from .tiles import LOWEST, ROWS, SEGMENT, SUMS, fetching, tile_keys, widening


def paged_attention(
    d: Dialect, heads: int, kv_heads: int, head_dim: int, page_tokens: int, window: int, stages: int, dtype: str, fp8: bool = False
) -> Any:
    """One block for each (unit, KV head), for units of many rows.

    ``window``: a row sees the last so many positions; 0 = all. ``position`` are those of the rows, ascending within a unit; rows
    ``unit_first … unit_first + unit_count - 1`` belong to row ``unit_table`` of ``table``. A unit of 0 rows is skipped.
    ``width``, of which nothing else is read: from one row of ``table`` to the next.

    ``log2_scale``: factor of the scores. ``fp8``: keys and values are 8-bit floats, made ``dtype`` in shared memory; the factor of the
    scores is the first of ``factors`` instead, which hold the scale of keys and that of values, the second the factor of the answer.
    """
    T = d.T
    group = heads // kv_heads
    tokens = ROWS // group
    keys = tile_keys(head_dim)
    per_segment = SEGMENT // keys
    copies = max(1, keys // page_tokens)
    total_rows, pages, tables, width, units = (T.dynamic(n) for n in ("total_rows", "pages", "tables", "width", "units"))
    fetch = fetching(d, keys, page_tokens, fp8)
    widen = widening(d, keys, head_dim, dtype)
    kept = "float8_e4m3fn" if fp8 else dtype

    @T.prim_func
    def paged_attention(
        q: T.Tensor((total_rows, heads, head_dim), dtype),
        k: T.Tensor((pages, page_tokens, kv_heads, head_dim), kept),
        v: T.Tensor((pages, page_tokens, kv_heads, head_dim), kept),
        table: T.Tensor((tables, width), "int32"),
        position: T.Tensor((total_rows,), "int64"),
        unit_first: T.Tensor((units,), "int32"),
        unit_count: T.Tensor((units,), "int32"),
        unit_table: T.Tensor((units,), "int64"),
        out: T.Tensor((total_rows, heads, head_dim), dtype),
        log2_scale: T.float32,
        factors: T.Tensor((2,), "float32"),
    ):
        with T.Kernel(units, kv_heads, threads=2 * ROWS, prelude=prelude(d)) as (unit, head):
            q_s = T.alloc_shared((ROWS, head_dim), dtype)
            k_s = T.alloc_shared((stages, keys, head_dim), kept)
            v_s = T.alloc_shared((stages, keys, head_dim), kept)
            if fp8:
                k_w = T.alloc_shared((keys, head_dim), dtype)
                v_w = T.alloc_shared((keys, head_dim), dtype)
            ones = T.alloc_shared((keys, SUMS), dtype)
            score = T.alloc_fragment((ROWS, keys), "float32")
            weight = T.alloc_fragment((ROWS, keys), dtype)
            part = T.alloc_fragment((ROWS, head_dim), "float32")
            part_sum = T.alloc_fragment((ROWS, SUMS), "float32")
            part_top = T.alloc_fragment((ROWS,), "float32")
            total = T.alloc_fragment((ROWS, head_dim), "float32")
            total_sum = T.alloc_fragment((ROWS, SUMS), "float32")
            top = T.alloc_fragment((ROWS,), "float32")
            newer = T.alloc_fragment((ROWS,), "float32")
            keep = T.alloc_fragment((ROWS,), "float32")
            take = T.alloc_fragment((ROWS,), "float32")
            seen = T.alloc_fragment((ROWS,), "int32")
            first = T.alloc_var("int32")
            count = T.alloc_var("int32")
            row = T.alloc_var("int64")
            last = T.alloc_var("int32")
            begun = T.alloc_var("int32")
            tile = T.alloc_var("int32")

            let_next_start(d)
            T.fill(ones, 1)
            log2_scale = factors[0] if fp8 else log2_scale
            value_scale = factors[1] if fp8 else 1.0
            wait_for_previous(d)
            first = unit_first[unit]
            count = unit_count[unit]
            if count > 0:
                row = unit_table[unit]
                last = T.cast(position[first + count - 1], "int32")
                begun = 0
                if window > 0:
                    begun = T.max(T.cast(position[first], "int32") - (window - 1), 0) // SEGMENT * per_segment
                for i in T.Parallel(ROWS):
                    seen[i] = T.cast(position[first + T.min(i // group, count - 1)], "int32")
                for n in T.unroll(stages - 1):
                    if begun + n <= last // keys:
                        fetch(k, k_s, table, row, begun + n, last, head, n)
                        fetch(v, v_s, table, row, begun + n, last, head, n)
                    else:
                        for _ in T.unroll(2 * copies):
                            T.ptx_commit_group()
                for i, j in T.Parallel(ROWS, head_dim):
                    q_s[i, j] = q[first + T.min(i // group, count - 1), head * group + i % group, j]
                T.fill(total, 0)
                T.fill(total_sum, 0)
                T.fill(top, LOWEST)
                T.fill(part, 0)
                T.fill(part_sum, 0)
                T.fill(part_top, LOWEST)
                for n in T.serial(last // keys + 1 - begun):
                    tile = begun + n
                    if tile + stages - 1 <= last // keys:
                        fetch(k, k_s, table, row, tile + stages - 1, last, head, (n + stages - 1) % stages)
                        fetch(v, v_s, table, row, tile + stages - 1, last, head, (n + stages - 1) % stages)
                    else:
                        for _ in T.unroll(2 * copies):
                            T.ptx_commit_group()
                    T.ptx_wait_group((2 * stages - 1) * copies)
                    T.sync_threads()
                    if fp8:
                        widen(k_s, n % stages, k_w, keys)
                        T.sync_threads()
                    T.clear(score)
                    T.gemm(q_s, k_w if fp8 else k_s[n % stages, :, :], score, transpose_B=True, policy=T.GemmWarpPolicy.FullRow)
                    for i, j in T.Parallel(ROWS, keys):
                        if window > 0:
                            score[i, j] = T.if_then_else(
                                tile * keys + j <= seen[i] and tile * keys + j > seen[i] - window,
                                score[i, j] * log2_scale,
                                LOWEST,
                            )
                        else:
                            score[i, j] = T.if_then_else(tile * keys + j <= seen[i], score[i, j] * log2_scale, LOWEST)
                    T.reduce_max(score, newer, dim=1, clear=True)
                    for i in T.Parallel(ROWS):
                        newer[i] = T.max(newer[i], part_top[i])
                        keep[i] = exp2(d, part_top[i] - newer[i])
                        part_top[i] = newer[i]
                    for i, j in T.Parallel(ROWS, keys):
                        score[i, j] = exp2(d, score[i, j] - part_top[i])
                    for i, j in T.Parallel(ROWS, keys):
                        weight[i, j] = T.cast(score[i, j], dtype)
                    for i, j in T.Parallel(ROWS, head_dim):
                        part[i, j] = part[i, j] * keep[i]
                    for i, j in T.Parallel(ROWS, SUMS):
                        part_sum[i, j] = part_sum[i, j] * keep[i]
                    T.ptx_wait_group((2 * stages - 2) * copies)
                    T.sync_threads()
                    if fp8:
                        widen(v_s, n % stages, v_w, last + 1 - tile * keys)
                        T.sync_threads()
                    elif last < tile * keys + keys - 1:
                        # what lies behind the newest key may be anything, and zero times NaN is NaN
                        for i, j in T.Parallel(keys, head_dim):
                            v_s[n % stages, i, j] = T.if_then_else(tile * keys + i > last, T.cast(0, dtype), v_s[n % stages, i, j])
                        T.sync_threads()
                    T.gemm(weight, v_w if fp8 else v_s[n % stages, :, :], part, policy=T.GemmWarpPolicy.FullRow)
                    T.gemm(weight, ones, part_sum, policy=T.GemmWarpPolicy.FullRow)
                    T.sync_threads()
                    if tile % per_segment == per_segment - 1 or tile == last // keys:
                        for i in T.Parallel(ROWS):
                            newer[i] = T.max(top[i], part_top[i])
                            keep[i] = exp2(d, top[i] - newer[i])
                            take[i] = exp2(d, part_top[i] - newer[i])
                            top[i] = newer[i]
                            part_top[i] = LOWEST
                        for i, j in T.Parallel(ROWS, head_dim):
                            total[i, j] = total[i, j] * keep[i] + part[i, j] * take[i]
                        for i, j in T.Parallel(ROWS, SUMS):
                            total_sum[i, j] = total_sum[i, j] * keep[i] + part_sum[i, j] * take[i]
                        T.fill(part, 0)
                        T.fill(part_sum, 0)
                T.reduce_max(total_sum, take, dim=1, clear=True)  # of equal ones
                for i in T.Parallel(ROWS):
                    take[i] = value_scale / take[i]
                for i, j in T.Parallel(ROWS, head_dim):
                    if i < T.min(count, tokens) * group:
                        # adding 0 turns -0 into 0, of which empty tiles might have made either
                        out[first + i // group, head * group + i % group, j] = T.cast(total[i, j] * take[i] + 0.0, dtype)

    return paged_attention
