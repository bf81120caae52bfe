"""Attention of units of up to 128 rows on a GPU: for long prompts. What a unit is and why bits are the same: ``cuda``.

Two warpgroups multiply 64 rows each and share every key and value that is read; one warp more has the copy engine bring them, a
segment of keys and a segment's tiles of values ahead. A warpgroup has a product under way while it makes weights: that of the segment's
first tile beside the weights of its second, and the next segment's scores beside the sum of this one.
"""

# Annotations of TileLang functions are values that it reads: no `from __future__ import annotations` here.

from types import SimpleNamespace
from typing import Any

from ..toolchain import Dialect
from ..toolchain.device_code import exp2, let_next_start, prelude, wait_for_previous
from .tiles import LOWEST, SEGMENT, WIDE_ROWS, tile_keys

_ROWS = WIDE_ROWS
_SUMS = 8  # columns of the product with ones: as ``tiles.SUMS``, the fewest that a warpgroup product has
_PLACES = 2  # segments under way
_THREADS = 2 * _ROWS  # that multiply
_MEETING = 3  # the named barrier at which these meet


def wide_attention(d: Dialect, heads: int, kv_heads: int, head_dim: int, page_tokens: int, window: int, dtype: str) -> Any:
    """As ``prompt.paged_attention``, whose arguments these are: one block for each (unit, KV head). Heads have 64 or 128 channels."""
    T = d.T
    group = heads // kv_heads
    tokens = _ROWS // group
    keys = tile_keys(head_dim)
    per_segment = SEGMENT // keys
    chunk = min(keys, page_tokens)
    v_places = _PLACES * per_segment
    policy = T.GemmWarpPolicy.FullRow
    total_rows, pages, tables, width, units = (T.dynamic(n) for n in ("total_rows", "pages", "tables", "width", "units"))

    @T.macro
    def fetch(source, ring, full, done, places, n, start, length, table, row, head, last):
        """Keys or values of positions ``start … start + length - 1`` to place ``n % places``; behind ``last`` nothing is read."""
        if n >= places:
            T.mbarrier_wait_parity(done[n % places], (n // places - 1) % 2)
        for c in T.unroll(length // chunk):
            if start + c * chunk <= last:
                for h in T.unroll(head_dim // 64):
                    T.tma_copy(
                        source[
                            table[row, (start + c * chunk) // page_tokens],
                            (start + c * chunk) % page_tokens : (start + c * chunk) % page_tokens + chunk,
                            head,
                            h * 64 : h * 64 + 64,
                        ],
                        ring[n % places, c * chunk : (c + 1) * chunk, h * 64 : h * 64 + 64],
                        barrier=full[n % places],
                    )
        if T.shuffle_elect(32):  # the lane that copies: it says what to expect before it arrives
            T.mbarrier_arrive(full[n % places])

    @T.macro
    def ask(r, s):
        """Begins the scores of segment ``s``."""
        T.mbarrier_wait_parity(r.k_full[s % _PLACES], s // _PLACES % 2)
        T.wgmma_gemm(r.q, r.k[s % _PLACES, :, :], r.score, transpose_B=True, policy=policy, clear_accum=True)

    @T.macro
    def give_back(done, place, thread):
        if thread % 128 == 0:
            T.mbarrier_arrive(done[place])

    @T.macro
    def weigh(r, t, tile, weight, log2_scale, masked):
        """Weights of tile ``t`` of a segment, and what they make of the ones before."""
        for i, j in T.Parallel(_ROWS, keys):
            if not masked:
                r.some[i, j] = r.score[i, t * keys + j] * log2_scale
            elif window > 0:
                r.some[i, j] = T.if_then_else(
                    tile * keys + j <= r.seen[i] and tile * keys + j > r.seen[i] - window, r.score[i, t * keys + j] * log2_scale, LOWEST
                )
            else:
                r.some[i, j] = T.if_then_else(tile * keys + j <= r.seen[i], r.score[i, t * keys + j] * log2_scale, LOWEST)
        T.reduce_max(r.some, r.newer, dim=1, clear=True)
        if t > 0:
            for i in T.Parallel(_ROWS):
                r.newer[i] = T.max(r.newer[i], r.part_top[i])
                r.keep[i] = exp2(d, r.part_top[i] - r.newer[i])
        for i in T.Parallel(_ROWS):
            r.part_top[i] = r.newer[i]
        for i, j in T.Parallel(_ROWS, keys):
            r.some[i, j] = exp2(d, r.some[i, j] - r.part_top[i])
        for i, j in T.Parallel(_ROWS, keys):
            weight[i, j] = T.cast(r.some[i, j], dtype)

    @T.macro
    def blank(r, s, start, last):
        """What lies behind the newest key may be anything, and zero times NaN is NaN."""
        if last < start + SEGMENT - 1:
            for t in T.unroll(per_segment):
                n = s * per_segment + t
                T.mbarrier_wait_parity(r.v_full[n % v_places], n // v_places % 2)
                for i, j in T.Parallel(keys, head_dim):
                    if start + t * keys + i > last:
                        r.v[n % v_places, i, j] = T.cast(0, dtype)
            T.fence_proxy_async()
            T.sync_threads(_MEETING, _THREADS)

    @T.macro
    def add_up(r):
        """The segment's sum to the total."""
        T.reduce_max(r.part_sum, r.of_part, dim=1, clear=True)  # of equal ones
        for i in T.Parallel(_ROWS):
            r.newer[i] = T.max(r.top[i], r.part_top[i])
            r.keep[i] = exp2(d, r.top[i] - r.newer[i])
            r.take[i] = exp2(d, r.part_top[i] - r.newer[i])
            r.top[i] = r.newer[i]
            r.total_sum[i] = r.total_sum[i] * r.keep[i] + r.of_part[i] * r.take[i]
        for i, j in T.Parallel(_ROWS, head_dim):
            r.total[i, j] = r.total[i, j] * r.keep[i] + r.part[i, j] * r.take[i]

    @T.macro
    def segment(r, s, begun, last, log2_scale, thread, masked):
        """Segment ``s`` of a unit, whose scores are there; leaves those of the next. ``masked``: some rows do not see all of it."""
        n = s * per_segment
        if masked:
            blank(r, s, (begun + n) * keys, last)
        weigh(r, 0, begun + n, r.weight, log2_scale, masked)
        T.mbarrier_wait_parity(r.v_full[n % v_places], n // v_places % 2)
        T.wgmma_gemm(r.weight, r.v[n % v_places, :, :], r.part, policy=policy, clear_accum=True)
        T.wgmma_gemm(r.weight, r.ones, r.part_sum, transpose_B=True, policy=policy, clear_accum=True)
        if per_segment > 1:
            weigh(r, 1, begun + n + 1, r.later_weight, log2_scale, masked)
            T.warpgroup_fence_operand(r.later_weight, num_regs=keys // 4)  # made before the products are waited for
            T.mbarrier_wait_parity(r.v_full[(n + 1) % v_places], (n + 1) // v_places % 2)
            T.wait_wgmma(0)
            give_back(r.v_done, n % v_places, thread)
            for i, j in T.Parallel(_ROWS, head_dim):
                r.part[i, j] = r.part[i, j] * r.keep[i]
            for i, j in T.Parallel(_ROWS, _SUMS):
                r.part_sum[i, j] = r.part_sum[i, j] * r.keep[i]
            T.wgmma_gemm(r.later_weight, r.v[(n + 1) % v_places, :, :], r.part, policy=policy)
            T.wgmma_gemm(r.later_weight, r.ones, r.part_sum, transpose_B=True, policy=policy)
        T.wait_wgmma(0)
        give_back(r.v_done, (n + per_segment - 1) % v_places, thread)
        ask(r, s + 1)
        add_up(r)
        T.warpgroup_fence_operand(r.total, num_regs=head_dim // 2)
        T.wait_wgmma(0)
        give_back(r.k_done, (s + 1) % _PLACES, thread)

    @T.prim_func
    def wide_attention(
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
        with T.Kernel(units, kv_heads, threads=_THREADS + 128, prelude=prelude(d)) as (unit, head):
            some = T.alloc_fragment((_ROWS, keys), "float32")
            q_s = T.alloc_shared((_ROWS, head_dim), dtype)
            k_s = T.alloc_shared((_PLACES, SEGMENT, head_dim), dtype)
            v_s = T.alloc_shared((v_places, keys, head_dim), dtype)
            ones = T.alloc_shared((_SUMS, keys), dtype)
            k_full = T.alloc_barrier([1] * _PLACES)
            v_full = T.alloc_barrier([1] * v_places)
            k_done = T.alloc_barrier([2] * _PLACES)
            v_done = T.alloc_barrier([2] * v_places)
            score = T.alloc_fragment((_ROWS, SEGMENT), "float32")
            weight = T.alloc_fragment((_ROWS, keys), dtype)
            later_weight = T.alloc_fragment((_ROWS, keys), dtype)
            part = T.alloc_fragment((_ROWS, head_dim), "float32")
            part_sum = T.alloc_fragment((_ROWS, _SUMS), "float32")
            part_top = T.alloc_fragment((_ROWS,), "float32")
            total = T.alloc_fragment((_ROWS, head_dim), "float32")
            total_sum = T.alloc_fragment((_ROWS,), "float32")
            top = T.alloc_fragment((_ROWS,), "float32")
            newer = T.alloc_fragment((_ROWS,), "float32")
            keep = T.alloc_fragment((_ROWS,), "float32")
            take = T.alloc_fragment((_ROWS,), "float32")
            of_part = T.alloc_fragment((_ROWS,), "float32")
            seen = T.alloc_shared((_ROWS,), "int32")
            r = SimpleNamespace(
                q=q_s, k=k_s, v=v_s, ones=ones, k_full=k_full, v_full=v_full, k_done=k_done, v_done=v_done, score=score, some=some,
                weight=weight, later_weight=later_weight, part=part, part_sum=part_sum, part_top=part_top, total=total,
                total_sum=total_sum, top=top, newer=newer, keep=keep, take=take, of_part=of_part, seen=seen,
            )  # fmt: skip
            # where a warpgroup product leaves its numbers; what TileLang would take from the scores is twice as much
            T.annotate_layout(
                {some: T.Fragment(some.shape, lambda i, j: (i // 16 * 32 + i % 8 * 4 + j % 8 // 2, j // 8 * 4 + i % 16 // 8 * 2 + j % 2))}
            )
            first = T.alloc_var("int32")
            count = T.alloc_var("int32")
            row = T.alloc_var("int64")
            last = T.alloc_var("int32")
            least = T.alloc_var("int32")
            begun = T.alloc_var("int32") if window > 0 else 0
            whole = T.alloc_var("int32")
            segments = T.alloc_var("int32")
            thread = T.get_thread_binding()

            let_next_start(d)
            wait_for_previous(d)
            first = unit_first[unit]
            count = unit_count[unit]
            if count > 0:
                row = unit_table[unit]
                last = T.cast(position[first + count - 1], "int32")
                least = T.cast(position[first], "int32")
                if window > 0:
                    begun = T.max(least - (window - 1), 0) // SEGMENT * per_segment
                segments = last // SEGMENT + 1 - begun // per_segment
                if thread >= _THREADS:
                    T.set_max_nreg(24, 0)
                    if thread < _THREADS + 32:  # one warp is enough; only a whole warpgroup can give registers away
                        for s in T.serial(segments + 1):
                            # of the segment behind the last one nothing is read, and its scores are not used
                            fetch(k, r.k, r.k_full, r.k_done, _PLACES, s, begun * keys + s * SEGMENT, SEGMENT, table, row, head, last)
                            if s < segments:
                                for t in T.serial(per_segment):
                                    n = s * per_segment + t
                                    fetch(v, r.v, r.v_full, r.v_done, v_places, n, (begun + n) * keys, keys, table, row, head, last)
                else:
                    T.set_max_nreg(240, 1)
                    T.fill(r.ones, 1)
                    for i in T.Parallel(_ROWS):
                        r.seen[i] = T.cast(position[first + T.min(i // group, count - 1)], "int32")
                    for i, j in T.Parallel(_ROWS, head_dim):
                        r.q[i, j] = q[first + T.min(i // group, count - 1), head * group + i % group, j]
                    T.fence_proxy_async()
                    T.sync_threads(_MEETING, _THREADS)
                    T.fill(r.total, 0)
                    T.fill(r.total_sum, 0)
                    T.fill(r.top, LOWEST)
                    ask(r, 0)
                    T.wait_wgmma(0)
                    give_back(r.k_done, 0, thread)
                    whole = 0 if window > 0 else (least + 1) // SEGMENT
                    for s in T.serial(whole):
                        segment(r, s, begun, last, log2_scale, thread, False)
                    for s in T.serial(whole, segments):
                        segment(r, s, begun, last, log2_scale, thread, True)
                    for i in T.Parallel(_ROWS):
                        r.take[i] = 1.0 / r.total_sum[i]
                    for i, j in T.Parallel(_ROWS, head_dim):
                        if i < T.min(count, tokens) * group:
                            # adding 0 turns -0 into 0, of which empty tiles might have made either
                            out[first + i // group, head * group + i % group, j] = T.cast(r.total[i, j] * r.take[i] + 0.0, dtype)

    return wide_attention
