"""Paged attention on a GPU: the same arithmetic for decoding rows, drafts and prompts.

A *unit* is some consecutive rows of one sequence with the query heads of one KV head, up to 64 rows of a matrix product. A block walks the
unit's tiles; every ``SEGMENT`` keys, counted from position 0, it closes a partial result (maximum, sum, weighted values) and adds
it to the total, in the order of the segments. With few units the segments of one unit go to several blocks, which leave their partial
results in memory, and a second kernel adds them up in the same order with the same operations: so the bits of a row depend neither on how
its segments were spread nor on which rows stand beside it. Keys a row does not see have weight exactly zero.

Formula: softmax(q k^T * scale) v with the maximum taken out (Milakov & Gimelshein 2018), weights rounded to the run dtype before the
product with v and before they are summed, which is a product with ones: tensor cores add alike whatever an element's place is.
"""

# Annotations of TileLang functions are values that it reads: no `from __future__ import annotations` here.

from typing import Any

import torch

from ..toolchain import Dialect, ModelShape, Program, StoredKernel, shape_config
from ..toolchain.device_code import FILE, let_next_start, prelude, wait_for_previous
from ..toolchain.loading import require
from ..toolchain.shapes import run_dtype
from .units import Units


def tile_keys(head_dim: int) -> int:
    """Keys of a tile, by whose maximum weights are made. Part of what the bits mean."""
    return 128 if head_dim <= 64 else 64


WIDE = 64
"""Rows of a block: tokens times query heads of a KV head."""

SEGMENT = 128
"""Keys of a partial result. Part of what the bits mean."""

_SUMS = 16
"""Columns of the product with ones that adds up weights: tensor cores add in the same order whatever a row's place is."""

_LOWEST = -1e30  # below every score; finite, so that a row that sees nothing of a tile makes no NaN

PASSES = (("tl.disable_safe_memory_legalize", True), ("tl.disable_tma_lower", True))

BY_WARPS = (("tl.disable_wgmma", True), *PASSES)
"""For ``decode_attention``: products of single warps, which take operands as they lie and want no fence that waits for copies under way."""


def unit_tokens(heads: int, kv_heads: int) -> int:
    """Most rows of a step in one unit."""
    return WIDE // (heads // kv_heads)


def _fetch(d: Dialect, keys: int, page_tokens: int) -> Any:
    """``fetch(source, target, table, row, tile, last, head, stage)``: begins the copy of a tile of keys or values, one group a page; of
    pages behind the one of key ``last`` nothing is read."""
    T = d.T
    copies = max(1, keys // page_tokens)
    chunk = min(keys, page_tokens)

    @T.macro
    def fetch(source, target, table, row, tile, last, head, stage):
        for n in T.unroll(copies):
            if tile * keys + n * chunk <= last:
                start = tile * keys % page_tokens if copies == 1 else 0
                page = table[row, (tile * keys + n * chunk) // page_tokens]
                T.async_copy(source[page, start : start + chunk, head, :], target[stage, n * chunk : (n + 1) * chunk, :])
            else:
                T.ptx_commit_group()

    return fetch


def paged_attention(d: Dialect, heads: int, kv_heads: int, head_dim: int, page_tokens: int, window: int, stages: int, dtype: str) -> Any:
    """One block for each (unit, KV head), for units of many rows.

    ``window``: a row sees the last so many positions; 0 = all. ``position`` are those of the rows, ascending within a unit; rows
    ``unit_first … unit_first + unit_count - 1`` belong to row ``unit_table`` of ``table``. A unit of 0 rows is skipped.
    ``width``, of which nothing else is read: from one row of ``table`` to the next.
    """
    T = d.T
    group = heads // kv_heads
    tokens = WIDE // group
    keys = tile_keys(head_dim)
    per_segment = SEGMENT // keys
    copies = max(1, keys // page_tokens)
    total_rows, pages, tables, width, units = (T.dynamic(n) for n in ("total_rows", "pages", "tables", "width", "units"))
    fetch = _fetch(d, keys, page_tokens)

    @T.prim_func
    def paged_attention(
        q: T.Tensor((total_rows, heads, head_dim), dtype),
        k: T.Tensor((pages, page_tokens, kv_heads, head_dim), dtype),
        v: T.Tensor((pages, page_tokens, kv_heads, head_dim), dtype),
        table: T.Tensor((tables, width), "int32"),
        position: T.Tensor((total_rows,), "int64"),
        unit_first: T.Tensor((units,), "int32"),
        unit_count: T.Tensor((units,), "int32"),
        unit_table: T.Tensor((units,), "int64"),
        out: T.Tensor((total_rows, heads, head_dim), dtype),
        log2_scale: T.float32,
    ):
        with T.Kernel(units, kv_heads, threads=2 * WIDE, prelude=prelude(d)) as (unit, head):
            q_s = T.alloc_shared((WIDE, head_dim), dtype)
            k_s = T.alloc_shared((stages, keys, head_dim), dtype)
            v_s = T.alloc_shared((stages, keys, head_dim), dtype)
            ones = T.alloc_shared((keys, _SUMS), dtype)
            score = T.alloc_fragment((WIDE, keys), "float32")
            weight = T.alloc_fragment((WIDE, keys), dtype)
            part = T.alloc_fragment((WIDE, head_dim), "float32")
            part_sum = T.alloc_fragment((WIDE, _SUMS), "float32")
            part_top = T.alloc_fragment((WIDE,), "float32")
            total = T.alloc_fragment((WIDE, head_dim), "float32")
            total_sum = T.alloc_fragment((WIDE, _SUMS), "float32")
            top = T.alloc_fragment((WIDE,), "float32")
            newer = T.alloc_fragment((WIDE,), "float32")
            keep = T.alloc_fragment((WIDE,), "float32")
            take = T.alloc_fragment((WIDE,), "float32")
            seen = T.alloc_fragment((WIDE,), "int32")
            first = T.alloc_var("int32")
            count = T.alloc_var("int32")
            row = T.alloc_var("int64")
            last = T.alloc_var("int32")
            begun = T.alloc_var("int32")
            tile = T.alloc_var("int32")

            let_next_start(d)
            T.fill(ones, 1)
            wait_for_previous(d)
            first = unit_first[unit]
            count = unit_count[unit]
            if count > 0:
                row = unit_table[unit]
                last = T.cast(position[first + count - 1], "int32")
                begun = 0
                if window > 0:
                    begun = T.max(T.cast(position[first], "int32") - (window - 1), 0) // SEGMENT * per_segment
                for i in T.Parallel(WIDE):
                    seen[i] = T.cast(position[first + T.min(i // group, count - 1)], "int32")
                for n in T.unroll(stages - 1):
                    if begun + n <= last // keys:
                        fetch(k, k_s, table, row, begun + n, last, head, n)
                        fetch(v, v_s, table, row, begun + n, last, head, n)
                    else:
                        for _ in T.unroll(2 * copies):
                            T.ptx_commit_group()
                for i, j in T.Parallel(WIDE, head_dim):
                    q_s[i, j] = q[first + T.min(i // group, count - 1), head * group + i % group, j]
                T.fill(total, 0)
                T.fill(total_sum, 0)
                T.fill(top, _LOWEST)
                T.fill(part, 0)
                T.fill(part_sum, 0)
                T.fill(part_top, _LOWEST)
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
                    T.clear(score)
                    T.gemm(q_s, k_s[n % stages, :, :], score, transpose_B=True, policy=T.GemmWarpPolicy.FullRow)
                    for i, j in T.Parallel(WIDE, keys):
                        if window > 0:
                            score[i, j] = T.if_then_else(
                                tile * keys + j <= seen[i] and tile * keys + j > seen[i] - window, score[i, j] * log2_scale, _LOWEST
                            )
                        else:
                            score[i, j] = T.if_then_else(tile * keys + j <= seen[i], score[i, j] * log2_scale, _LOWEST)
                    T.reduce_max(score, newer, dim=1, clear=True)
                    for i in T.Parallel(WIDE):
                        newer[i] = T.max(newer[i], part_top[i])
                        keep[i] = T.exp2(part_top[i] - newer[i])
                        part_top[i] = newer[i]
                    for i, j in T.Parallel(WIDE, keys):
                        weight[i, j] = T.cast(T.exp2(score[i, j] - part_top[i]), dtype)
                    for i, j in T.Parallel(WIDE, head_dim):
                        part[i, j] = part[i, j] * keep[i]
                    for i, j in T.Parallel(WIDE, _SUMS):
                        part_sum[i, j] = part_sum[i, j] * keep[i]
                    T.ptx_wait_group((2 * stages - 2) * copies)
                    T.sync_threads()
                    if last < tile * keys + keys - 1:
                        # what lies behind the newest key may be anything, and zero times NaN is NaN
                        for i, j in T.Parallel(keys, head_dim):
                            v_s[n % stages, i, j] = T.if_then_else(tile * keys + i > last, T.cast(0, dtype), v_s[n % stages, i, j])
                        T.sync_threads()
                    T.gemm(weight, v_s[n % stages, :, :], part, policy=T.GemmWarpPolicy.FullRow)
                    T.gemm(weight, ones, part_sum, policy=T.GemmWarpPolicy.FullRow)
                    T.sync_threads()
                    if tile % per_segment == per_segment - 1 or tile == last // keys:
                        for i in T.Parallel(WIDE):
                            newer[i] = T.max(top[i], part_top[i])
                            keep[i] = T.exp2(top[i] - newer[i])
                            take[i] = T.exp2(part_top[i] - newer[i])
                            top[i] = newer[i]
                            part_top[i] = _LOWEST
                        for i, j in T.Parallel(WIDE, head_dim):
                            total[i, j] = total[i, j] * keep[i] + part[i, j] * take[i]
                        for i, j in T.Parallel(WIDE, _SUMS):
                            total_sum[i, j] = total_sum[i, j] * keep[i] + part_sum[i, j] * take[i]
                        T.fill(part, 0)
                        T.fill(part_sum, 0)
                T.reduce_max(total_sum, take, dim=1, clear=True)  # of equal ones
                for i in T.Parallel(WIDE):
                    take[i] = 1.0 / take[i]
                for i, j in T.Parallel(WIDE, head_dim):
                    if i < T.min(count, tokens) * group:
                        # adding 0 turns -0 into 0, of which empty tiles might have made either
                        out[first + i // group, head * group + i % group, j] = T.cast(total[i, j] * take[i] + 0.0, dtype)

    return paged_attention


def decode_attention(d: Dialect, heads: int, kv_heads: int, head_dim: int, page_tokens: int, window: int, splits: int, dtype: str) -> Any:
    """Units of one row, unit ``i`` row ``i``, the other way round: keys and channels are the rows of the matrix products, and the query
    heads of a KV head their columns, so that a warp has few numbers of each to do.

    ``splits`` = 1: ``blocks`` blocks take a (row, KV head) after another. More: block ``splits * i + s`` takes every ``splits``-th segment
    of (row, KV head) ``i`` from ``s`` on and leaves partial results: ``part_value`` ``[rows, heads, segments, head_dim]`` and
    ``part_scale`` ``[2, rows, heads, segments]`` (maximum, sum) float32.

    Keys and values pass in turn through a ring of three places: while one is worked on, two are under way, across the borders of units
    too. ``fetch`` says what comes next: ``next_*`` is the tile whose keys were asked for last.
    """
    T = d.T
    group = heads // kv_heads
    queries = 8 if group <= 8 else 16
    keys = tile_keys(head_dim)
    per_segment = SEGMENT // keys
    copies = max(1, keys // page_tokens)
    behind = 2 * copies + 1  # groups of copies begun behind the one that is waited for: an item of keys with its queries, one of values
    rows, pages, tables, width, part_rows, segments = (T.dynamic(n) for n in ("rows", "pages", "tables", "width", "part_rows", "segments"))
    fetch = _fetch(d, keys, page_tokens)

    @T.prim_func
    def decode_attention(
        q: T.Tensor((rows, heads, head_dim), dtype),
        k: T.Tensor((pages, page_tokens, kv_heads, head_dim), dtype),
        v: T.Tensor((pages, page_tokens, kv_heads, head_dim), dtype),
        table: T.Tensor((tables, width), "int32"),
        position: T.Tensor((rows,), "int64"),
        table_row: T.Tensor((rows,), "int64"),
        out: T.Tensor((rows, heads, head_dim), dtype),
        part_value: T.Tensor((part_rows, heads, segments, head_dim), "float32"),
        part_scale: T.Tensor((2, part_rows, heads, segments), "float32"),
        log2_scale: T.float32,
        blocks: T.int32,
    ):
        with T.Kernel(blocks, threads=128, prelude=prelude(d)) as block:
            q_s = T.alloc_shared((2, queries, head_dim), dtype)
            ring = T.alloc_shared((3, keys, head_dim), dtype)
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
                    T.fill(top, _LOWEST)
                T.fill(part, 0)
                T.fill(part_sum, 0)
                T.fill(part_top, _LOWEST)
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
                        T.clear(score)
                        T.gemm(
                            ring[(step - 2) % 3, :, :],
                            q_s[(step // 2 - 1) % 2, :, :],
                            score,
                            transpose_B=True,
                            policy=T.GemmWarpPolicy.FullRow,
                        )
                        for i, j in T.Parallel(keys, queries):
                            if window > 0:
                                score[i, j] = T.if_then_else(
                                    tile * keys + i <= last and tile * keys + i > last - window, score[i, j] * log2_scale, _LOWEST
                                )
                            else:
                                score[i, j] = T.if_then_else(tile * keys + i <= last, score[i, j] * log2_scale, _LOWEST)
                        T.reduce_max(score, newer, dim=0, clear=True)
                        for j in T.Parallel(queries):
                            newer[j] = T.max(newer[j], part_top[j])
                            keep[j] = T.exp2(part_top[j] - newer[j])
                            part_top[j] = newer[j]
                        for i, j in T.Parallel(keys, queries):
                            w_s[i, j] = T.cast(T.exp2(score[i, j] - part_top[j]), dtype)
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
                        if last < tile * keys + keys - 1:
                            # what lies behind the newest key may be anything, and zero times NaN is NaN
                            for i, j in T.Parallel(keys, head_dim):
                                ring[(step - 2) % 3, i, j] = T.if_then_else(
                                    tile * keys + i > last, T.cast(0, dtype), ring[(step - 2) % 3, i, j]
                                )
                            T.sync_threads()
                        T.gemm(ring[(step - 2) % 3, :, :], w_s, part, transpose_A=True, policy=T.GemmWarpPolicy.FullRow)
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
                                    keep[j] = T.exp2(top[j] - newer[j])
                                    take[j] = T.exp2(part_top[j] - newer[j])
                                    top[j] = newer[j]
                                for i, j in T.Parallel(head_dim, queries):
                                    total[i, j] = total[i, j] * keep[j] + part[i, j] * take[j]
                                for i, j in T.Parallel(64, queries):
                                    total_sum[i, j] = total_sum[i, j] * keep[j] + part_sum[i, j] * take[j]
                            for j in T.Parallel(queries):
                                part_top[j] = _LOWEST
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
                                        sum_s[j] = 1.0 / total_sum[i, j]
                                T.sync_threads()
                                for i, j in T.Parallel(head_dim, queries):
                                    if j < group:
                                        out[unit // kv_heads, unit % kv_heads * group + j, i] = T.cast(total[i, j] * sum_s[j] + 0.0, dtype)
                                T.fill(total, 0)
                                T.fill(total_sum, 0)
                                T.fill(top, _LOWEST)
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


def add_segments(d: Dialect, heads: int, head_dim: int, window: int, dtype: str) -> Any:
    """The total of a row's partial results, segment by segment, as ``paged_attention`` with one split has it in registers."""
    T = d.T
    total_rows, part_rows, segments = (T.dynamic(n) for n in ("total_rows", "part_rows", "segments"))

    @T.prim_func
    def add_segments(
        part_value: T.Tensor((part_rows, heads, segments, head_dim), "float32"),
        part_scale: T.Tensor((2, part_rows, heads, segments), "float32"),
        position: T.Tensor((total_rows,), "int64"),
        out: T.Tensor((total_rows, heads, head_dim), dtype),
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
            top = _LOWEST
            total_sum = 0.0
            T.fill(total, 0)
            for n in T.serial(last // SEGMENT + 1 - base):
                newer = T.max(top, part_scale[0, row, head, base + n])
                keep = T.exp2(top - newer)
                take = T.exp2(part_scale[0, row, head, base + n] - newer)
                top = newer
                total_sum = total_sum * keep + part_scale[1, row, head, base + n] * take
                for j in T.Parallel(head_dim):
                    total[j] = total[j] * keep + part_value[row, head, base + n, j] * take
            keep = 1.0 / total_sum
            for j in T.Parallel(head_dim):
                out[row, head, j] = T.cast(total[j] * keep + 0.0, dtype)

    return add_segments


def attention_programs(heads: int, kv_heads: int, head_dim: int, page_tokens: int, window: int, dtype: str) -> list[Program]:
    """The kernels of one kind of layer: units, rows by themselves, units in ``SPLITS`` splits, and what adds the latter up."""

    def program(factory: str, passes: tuple[tuple[str, bool], ...], **choices: int) -> Program:
        constants = shape_config(
            heads=heads, kv_heads=kv_heads, head_dim=head_dim, page_tokens=page_tokens, window=window, dtype=dtype, **choices
        )
        return Program("paged_attention", factory, constants, uses=(FILE,), passes=passes)

    adding = shape_config(heads=heads, head_dim=head_dim, window=window, dtype=dtype)
    if head_dim % 64 or heads // kv_heads > 16:  # no even shares for four warps: single rows are units like others
        return [program("paged_attention", PASSES, stages=2)]
    return [
        program("paged_attention", PASSES, stages=2),
        program("decode_attention", BY_WARPS, splits=1),
        program("decode_attention", BY_WARPS, splits=SPLITS),
        Program("paged_attention", "add_segments", adding, uses=(FILE,), passes=PASSES),
    ]


SPLITS = 16
"""Blocks that share the segments of a unit where there are few units."""

SPLIT_ROWS = 16
"""Most rows of a step whose segments are shared out: with more, units fill the GPU by themselves."""

_SHARED, _REGISTERS = 227 * 1024, 65536
"""Of a multiprocessor: bytes of shared memory, registers."""


def _blocks_of_processor(kernel: StoredKernel) -> int:
    """Blocks of ``kernel`` that a multiprocessor holds at once."""
    registers = -(-kernel.resources.registers // 8) * 8 * kernel.threads
    return max(1, min(_SHARED // (kernel.shared + 1024), _REGISTERS // registers))


_LOG2_E = 1.4426950408889634


class Scratch:
    """Room for partial results of ``SPLIT_ROWS`` rows, shared by the layers of a model, as long as the longest sequence so far."""

    def __init__(self, heads: int, head_dim: int, device: torch.device) -> None:
        self._heads, self._head_dim, self._device = heads, head_dim, device
        self.reserve(SEGMENT)

    def reserve(self, max_tokens: int) -> None:
        """Makes room for sequences of ``max_tokens`` tokens. What is captured keeps the room it has: reserve the longest before."""
        segments = -(-max_tokens // SEGMENT)
        self.value = torch.empty((SPLIT_ROWS, self._heads, segments, self._head_dim), dtype=torch.float32, device=self._device)
        self.scale = torch.empty((2, SPLIT_ROWS, self._heads, segments), dtype=torch.float32, device=self._device)

    @property
    def segments(self) -> int:
        """Segments of a sequence there is room for."""
        return self.scale.shape[-1]


class PagedAttention:
    """Attention of one kind of layer over pages of ``page_tokens`` tokens, on a GPU.

    Args:
        heads, kv_heads, head_dim: of the layer; ``window`` sees the last so many positions, ``None`` = all.
        scratch: where partial results go.

    Raises ``KernelBuildError`` if a kernel cannot be had.
    """

    def __init__(
        self, heads: int, kv_heads: int, head_dim: int, page_tokens: int, window: int | None, dtype: torch.dtype, device: torch.device,
        scratch: Scratch,
    ) -> None:  # fmt: skip
        programs = attention_programs(heads, kv_heads, head_dim, page_tokens, window or 0, run_dtype(dtype))
        self._wide, *for_rows = require(programs, device, after=True)
        self._blocks = 0  # of a step's single rows; 0 = they are units like others
        if for_rows:
            self._single, self._split, self._add = for_rows
            processors = torch.cuda.get_device_properties(device).multi_processor_count
            self._blocks = processors * _blocks_of_processor(self._single.stored)
        self._shape = (heads, head_dim)
        self._kv_heads = kv_heads
        self._scale = head_dim**-0.5 * _LOG2_E
        self._scratch = scratch
        self.tokens = unit_tokens(heads, kv_heads)

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, units: Units, out: torch.Tensor) -> None:
        """``q`` ``[R, heads, head_dim]`` → ``out``, the same shape; ``k``, ``v`` ``[pages, page_tokens, kv_heads, head_dim]`` hold the
        rows' own entries. Rows that are in no unit are not written. Allocates nothing."""
        count, width = units.first.shape[0], units.table.stride(0)  # rows of a table cut to its longest sequence lie apart
        if not units.single or not self._blocks:
            common = (q, k, v, units.table, units.position, units.first, units.count, units.row)
            self._wide.launch((count, self._kv_heads), *common, out, self._scale, width, count)
            return
        taken = (q, k, v, units.table, units.position, units.row)
        if count > SPLIT_ROWS:
            blocks = min(self._blocks, count * self._kv_heads)
            self._single.launch((blocks,), *taken, out, self._scale, blocks, count, width)
            return
        longest = units.table.shape[1] * k.shape[1]
        if self._scratch.segments * SEGMENT < longest:
            self._scratch.reserve(longest)
        value, scale, segments = self._scratch.value, self._scratch.scale, self._scratch.segments
        blocks = count * self._kv_heads * SPLITS
        self._split.launch((blocks,), *taken, value, scale, self._scale, blocks, count, width, SPLIT_ROWS, segments)
        self._add.launch((count, self._shape[0]), value, scale, units.position, out, SPLIT_ROWS, segments, count)


def programs_for(shape: ModelShape) -> list[Program]:
    """What a model of ``shape`` launches."""
    return list(attention_programs(shape.heads, shape.kv_heads, shape.head_dim, shape.page_tokens, 0, shape.dtype))
