"""Top-k on Ascend by counting: a number's rank is how many go before it, so that equal ones need no second look and nothing is sorted."""

# Annotations of TileLang functions are values that it reads: no `from __future__ import annotations` here.

from typing import Any

from ..toolchain import Dialect, ModelShape, Program, shape_config
from ..toolchain.ascend import CORES

_THREADS = 256


def top_k(d: Dialect, n: int, k: int) -> Any:
    """As ``reference.top_k``: ``scores`` float32 ``[rows, n]``, ``places`` int64 ``[rows, k]``. ``n²`` comparisons a row."""
    T = d.T
    rows = T.dynamic("rows")

    @T.prim_func
    def top_k(scores: T.Tensor((rows, n), "float32"), places: T.Tensor((rows, k), "int64")):
        with T.Kernel(CORES) as core:
            own_scores, order = T.alloc_shared((n,), "float32"), T.alloc_shared((n,), "int32")
            own_places = T.alloc_shared((k,), "int64")
            for step in T.serial(T.ceildiv(rows - core, CORES)):
                T.copy(scores[step * CORES + core, 0:n], own_scores)
                with T.SimtVF(threads=_THREADS):
                    for i in T.Parallel(n):  # in integers, −0 as 0: an addition of 0 is simplified away
                        bits = T.reinterpret(own_scores[i], "int32")
                        order[i] = T.if_then_else(bits < 0, -(bits & T.int32(0x7FFFFFFF)), bits)
                    for i in T.Parallel(n):
                        rank = T.alloc_local((1,), "int32")
                        rank[0] = 0
                        for j in T.serial(n):
                            if order[j] > order[i] or (order[j] == order[i] and j < i):
                                rank[0] += 1
                        if rank[0] < k:
                            own_places[rank[0]] = T.cast(i, "int64")
                T.copy(own_places, places[step * CORES + core, 0:k])

    return top_k


_SIZES = ((2048, 512),)
"""(scores, chosen) of an indexer's rows."""


def programs_for(shape: ModelShape) -> list[Program]:
    """Of any model: what is chosen from follows from no size of a dense one."""
    return [Program("top_k", "top_k", shape_config(n=n, k=k), form="asc") for n, k in _SIZES]
