"""Attention of single rows on a GPU, whole or with their segments shared out, and the sum of what was shared out. See ``cuda``."""

# Annotations of TileLang functions are values that it reads: no `from __future__ import annotations` here.

from typing import Any

from ..toolchain import Dialect
from ..toolchain.device_code import exp2, let_next_start, prelude, wait_for_previous
from .tiles import LOWEST, SEGMENT, fetching, tile_keys, widening


def decode_attention(
    d: Dialect, heads: int, kv_heads: int, head_dim: int, page_tokens: int, window: int, splits: int, dtype: str, fp8: bool = False
) -> Any:
    """Units of one row, unit ``i`` row ``i``, the other way round: keys and channels are the rows of the matrix products, and the query
    heads of a KV head their columns, so that a warp has few numbers of each to do.

    ``splits`` = 1: ``blocks`` blocks take a (row, KV head) after another. More: block ``splits * i + s`` takes every ``splits``-th segment
    of (row, KV head) ``i`` from ``s`` on and leaves partial results: ``part_value`` ``[rows, heads, segments, head_dim]`` and
    ``part_scale`` ``[2, rows, heads, segments]`` (maximum, sum) float32.

    Keys and values pass in turn through a ring of three places: while one is worked on, two are under way, across the borders of units
    too. ``fetch`` says what comes next: ``next_*`` is the tile whose keys were asked for last.

    ``fp8``: as in ``paged_attention``; an item is made ``dtype`` in a place that all items share when its turn has come.
    """
    T = d.T
    group = heads // kv_heads
    queries = 8 if group <= 8 else 16
    keys = tile_keys(head_dim)
    per_segment = SEGMENT // keys
    copies = max(1, keys // page_tokens)
    behind = 2 * copies + 1  # groups of copies begun behind the one that is waited for: an item of keys with its queries, one of values
    rows, pages, tables, width, part_rows, segments = (T.dynamic(n) for n in ("rows", "pages", "tables", "width", "part_rows", "segments"))
    fetch = fetching(d, keys, page_tokens, fp8)
    widen = widening(d, keys, head_dim, dtype)
    kept = "float8_e4m3fn" if fp8 else dtype

    @T.prim_func
    def decode_attention(
        q: T.Tensor((rows, heads, head_dim), dtype),
        k: T.Tensor((pages, page_tokens, kv_heads, head_dim), kept),
        v: T.Tensor((pages, page_tokens, kv_heads, head_dim), kept),
        table: T.Tensor((tables, width), "int32"),
        position: T.Tensor((rows,), "int64"),
        table_row: T.Tensor((rows,), "int64"),
        out: T.Tensor((rows, heads, head_dim), dtype),
        part_value: T.Tensor((part_rows, heads, segments, head_dim), "float32"),
        part_scale: T.Tensor((2, part_rows, heads, segments), "float32"),
        log2_scale: T.float32,
        factors: T.Tensor((2,), "float32"),
        blocks: T.int32,
    ):
        with T.Kernel(blocks, threads=128, prelude=prelude(d)) as block:
            q_s = T.alloc_shared((2, queries, head_dim), dtype)
            ring = T.alloc_shared((3, keys, head_dim), kept)
            if fp8:
                wide = T.alloc_shared((keys, head_dim), dtype)
            w_s = T.alloc_shared((keys, queries), dtype)
            sum_s = T.alloc_shared((queries,), "float32")
            ones = T.alloc_fragment((64, keys), dtype)
            score = T.alloc_fragment((keys, queries), "float32")
            part = T.alloc_fragment((head_dim, queries), "float32")
            part_sum = T.alloc_fragment((64, queries), "float32")
            part_top = T.alloc_fragment((queries,), "float32")
            newer = T.alloc_fragment((queries,), "float32")
            keep = T.alloc_fragment((queries,), "float32")
            if splits == 1:
                total = T.alloc_fragment((head_dim, queries), "float32")
                total_sum = T.alloc_fragment((64, queries), "float32")
                top = T.alloc_fragment((queries,), "float32")
                take = T.alloc_fragment((queries,), "float32")
            todo = T.alloc_var("int32")
            base = T.alloc_var("int32")
            split = T.alloc_var("int32")
            unit = T.alloc_var("int32")  # worked on: row * kv_heads + head
            tile = T.alloc_var("int32")
            last = T.alloc_var("int32")
            later_last = T.alloc_var("int32")  # of the unit behind it
            next_unit = T.alloc_var("int32")  # fetched
            next_tile = T.alloc_var("int32")
            next_last = T.alloc_var("int32")
            next_row = T.alloc_var("int64")
            old = T.alloc_var("int32")
            let_next_start(d)
            T.fill(ones, 1)
            log2_scale = factors[0] if fp8 else log2_scale
            value_scale = factors[1] if fp8 else 1.0
            split = block % splits
            unit = block // splits
            last = T.cast(position[unit // kv_heads], "int32")
            base = 0
            if window > 0:
                base = T.max(last - (window - 1), 0) // SEGMENT
            tile = (base + split) * per_segment
            todo = 0
            if splits == 1:
                for n in T.serial(T.ceildiv(rows * kv_heads - block, blocks)):
                    base = 0
                    if window > 0:
                        base = T.max(T.cast(position[(block + n * blocks) // kv_heads], "int32") - (window - 1), 0) // SEGMENT
                    todo = todo + T.cast(position[(block + n * blocks) // kv_heads], "int32") // keys + 1 - base * per_segment
            else:
                # whole segments base + split, base + split + splits, …, the last one perhaps short
                todo = (last // SEGMENT + splits - base - split) // splits * per_segment
                if (last // SEGMENT - base) % splits == split:
                    todo = todo - (per_segment - 1 - last // keys % per_segment)
            later_last = T.cast(position[T.min(unit + blocks, rows * kv_heads - 1) // kv_heads], "int32")
            next_unit = unit
            next_tile = tile
            next_last = last
            next_row = table_row[unit // kv_heads]
            # The kernel ahead writes the newest key of each row; a tile without it is there already.
            old = 0
            if todo > 0 and tile * keys + keys <= last:
                old = 1
                fetch(k, ring, table, next_row, tile, last, unit % kv_heads, 0)
                fetch(v, ring, table, next_row, tile, last, unit % kv_heads, 1)
            wait_for_previous(d)
            if todo > 0:
                if old == 0:
                    fetch(k, ring, table, next_row, tile, last, unit % kv_heads, 0)
                    fetch(v, ring, table, next_row, tile, last, unit % kv_heads, 1)
                T.async_copy(
                    q[unit // kv_heads, unit % kv_heads * group : unit % kv_heads * group + group, :],
                    q_s[0, 0:group, :],
                    coalesced_width=8,  # an equal share for every thread may be less than a copy can be
                )
                if splits == 1:
                    T.fill(total, 0)
                    T.fill(total_sum, 0)
                    T.fill(top, LOWEST)
                T.fill(part, 0)
                T.fill(part_sum, 0)
                T.fill(part_top, LOWEST)
                # Items 0, 1, 2, … are keys, values, keys, …; item i lies in place i % 3. At step n item n is asked for and item n - 2
                # worked on; the first two have been asked for. Even steps work on scores, odd ones on values.
                for step in T.serial(2, 2 * todo + 2):
                    if step % 2 == 0:
                        if step < 2 * todo:
                            next_tile = next_tile + 1
                            if splits > 1:
                                if next_tile % per_segment == 0:
                                    next_tile = next_tile + (splits - 1) * per_segment
                            else:
                                if next_tile > next_last // keys:
                                    next_unit = next_unit + blocks
                                    next_last = T.cast(position[next_unit // kv_heads], "int32")
                                    next_row = table_row[next_unit // kv_heads]
                                    next_tile = 0
                                    if window > 0:
                                        next_tile = T.max(next_last - (window - 1), 0) // SEGMENT * per_segment
                            fetch(k, ring, table, next_row, next_tile, next_last, next_unit % kv_heads, step % 3)
                            T.async_copy(
                                q[next_unit // kv_heads, next_unit % kv_heads * group : next_unit % kv_heads * group + group, :],
                                q_s[step // 2 % 2, 0:group, :],
                                coalesced_width=8,
                            )
                        else:
                            for _ in T.unroll(copies + 1):
                                T.ptx_commit_group()
                        if step == 2:
                            T.ptx_wait_group(copies + 1)  # the first queries are asked for behind the first values
                        else:
                            T.ptx_wait_group(behind)
                        T.sync_threads()
                        if fp8:
                            widen(ring, (step - 2) % 3, wide, keys)
                            T.sync_threads()
                        T.clear(score)
                        T.gemm(
                            wide if fp8 else ring[(step - 2) % 3, :, :],
                            q_s[(step // 2 - 1) % 2, :, :],
                            score,
                            transpose_B=True,
                            policy=T.GemmWarpPolicy.FullRow,
                        )
                        for i, j in T.Parallel(keys, queries):
                            if window > 0:
                                score[i, j] = T.if_then_else(
                                    tile * keys + i <= last and tile * keys + i > last - window,
                                    score[i, j] * log2_scale,
                                    LOWEST,
                                )
                            else:
                                score[i, j] = T.if_then_else(tile * keys + i <= last, score[i, j] * log2_scale, LOWEST)
                        T.reduce_max(score, newer, dim=0, clear=True)
                        for j in T.Parallel(queries):
                            newer[j] = T.max(newer[j], part_top[j])
                            keep[j] = exp2(d, part_top[j] - newer[j])
                            part_top[j] = newer[j]
                        for i, j in T.Parallel(keys, queries):
                            score[i, j] = exp2(d, score[i, j] - part_top[j])
                        for i, j in T.Parallel(keys, queries):
                            w_s[i, j] = T.cast(score[i, j], dtype)
                        for i, j in T.Parallel(head_dim, queries):
                            part[i, j] = part[i, j] * keep[j]
                        for i, j in T.Parallel(64, queries):
                            part_sum[i, j] = part_sum[i, j] * keep[j]
                        T.sync_threads()
                    else:
                        if step < 2 * todo:
                            fetch(v, ring, table, next_row, next_tile, next_last, next_unit % kv_heads, step % 3)
                        else:
                            for _ in T.unroll(copies):
                                T.ptx_commit_group()
                        T.ptx_wait_group(behind)
                        T.sync_threads()
                        if fp8:
                            widen(ring, (step - 2) % 3, wide, last + 1 - tile * keys)
                            T.sync_threads()
                        elif last < tile * keys + keys - 1:
                            # what lies behind the newest key may be anything, and zero times NaN is NaN
                            for i, j in T.Parallel(keys, head_dim):
                                ring[(step - 2) % 3, i, j] = T.if_then_else(
                                    tile * keys + i > last, T.cast(0, dtype), ring[(step - 2) % 3, i, j]
                                )
                            T.sync_threads()
                        T.gemm(wide if fp8 else ring[(step - 2) % 3, :, :], w_s, part, transpose_A=True, policy=T.GemmWarpPolicy.FullRow)
                        T.gemm(ones, w_s, part_sum, policy=T.GemmWarpPolicy.FullRow)
                        if tile % per_segment == per_segment - 1 or tile == last // keys:
                            if splits > 1:
                                for i, j in T.Parallel(head_dim, queries):
                                    if j < group:
                                        part_value[unit // kv_heads, unit % kv_heads * group + j, tile // per_segment, i] = part[i, j]
                                for j in T.Parallel(queries):
                                    if j < group:
                                        part_scale[0, unit // kv_heads, unit % kv_heads * group + j, tile // per_segment] = part_top[j]
                                for i, j in T.Parallel(64, queries):
                                    if i == 0 and j < group:
                                        part_scale[1, unit // kv_heads, unit % kv_heads * group + j, tile // per_segment] = part_sum[i, j]
                            else:
                                for j in T.Parallel(queries):
                                    newer[j] = T.max(top[j], part_top[j])
                                    keep[j] = exp2(d, top[j] - newer[j])
                                    take[j] = exp2(d, part_top[j] - newer[j])
                                    top[j] = newer[j]
                                for i, j in T.Parallel(head_dim, queries):
                                    total[i, j] = total[i, j] * keep[j] + part[i, j] * take[j]
                                for i, j in T.Parallel(64, queries):
                                    total_sum[i, j] = total_sum[i, j] * keep[j] + part_sum[i, j] * take[j]
                            for j in T.Parallel(queries):
                                part_top[j] = LOWEST
                            T.fill(part, 0)
                            T.fill(part_sum, 0)
                        if splits > 1:
                            tile = tile + 1
                            if tile % per_segment == 0:
                                tile = tile + (splits - 1) * per_segment
                        else:
                            if tile == last // keys:
                                for i, j in T.Parallel(64, queries):
                                    if i == 0:
                                        sum_s[j] = value_scale / total_sum[i, j]
                                T.sync_threads()
                                for i, j in T.Parallel(head_dim, queries):
                                    if j < group:
                                        out[unit // kv_heads, unit % kv_heads * group + j, i] = T.cast(total[i, j] * sum_s[j] + 0.0, dtype)
                                T.fill(total, 0)
                                T.fill(total_sum, 0)
                                T.fill(top, LOWEST)
                                unit = unit + blocks
                                last = later_last
                                later_last = T.cast(position[T.min(unit + blocks, rows * kv_heads - 1) // kv_heads], "int32")
                                tile = 0
                                if window > 0:
                                    tile = T.max(last - (window - 1), 0) // SEGMENT * per_segment
                            else:
                                tile = tile + 1
                        T.sync_threads()

    return decode_attention


def add_segments(d: Dialect, heads: int, head_dim: int, window: int, dtype: str, fp8: bool = False) -> Any:
    """The total of a row's partial results, segment by segment, as ``decode_attention`` with one split has it in registers; ``fp8``
    and ``factors`` as there."""
    T = d.T
    total_rows, part_rows, segments = (T.dynamic(n) for n in ("total_rows", "part_rows", "segments"))

    @T.prim_func
    def add_segments(
        part_value: T.Tensor((part_rows, heads, segments, head_dim), "float32"),
        part_scale: T.Tensor((2, part_rows, heads, segments), "float32"),
        position: T.Tensor((total_rows,), "int64"),
        out: T.Tensor((total_rows, heads, head_dim), dtype),
        factors: T.Tensor((2,), "float32"),
    ):
        with T.Kernel(total_rows, heads, threads=head_dim, prelude=prelude(d)) as (row, head):
            total = T.alloc_fragment((head_dim,), "float32")
            top = T.alloc_var("float32")
            newer = T.alloc_var("float32")
            total_sum = T.alloc_var("float32")
            keep = T.alloc_var("float32")
            take = T.alloc_var("float32")
            last = T.alloc_var("int32")
            base = T.alloc_var("int32")
            let_next_start(d)
            wait_for_previous(d)
            last = T.cast(position[row], "int32")
            base = 0
            if window > 0:
                base = T.max(last - (window - 1), 0) // SEGMENT
            top = LOWEST
            total_sum = 0.0
            T.fill(total, 0)
            for n in T.serial(last // SEGMENT + 1 - base):
                newer = T.max(top, part_scale[0, row, head, base + n])
                keep = exp2(d, top - newer)
                take = exp2(d, part_scale[0, row, head, base + n] - newer)
                top = newer
                total_sum = total_sum * keep + part_scale[1, row, head, base + n] * take
                for j in T.Parallel(head_dim):
                    total[j] = total[j] * keep + part_value[row, head, base + n, j] * take
            keep = (factors[1] if fp8 else 1.0) / total_sum
            for j in T.Parallel(head_dim):
                out[row, head, j] = T.cast(total[j] * keep + 0.0, dtype)

    return add_segments
