"""Rows of a table on Ascend, widened: a core a row."""

# Annotations of TileLang functions are values that it reads: no `from __future__ import annotations` here.

from typing import Any

from ..toolchain import Dialect, ModelShape, Program, shape_config
from ..toolchain.ascend import CORES

_THREADS = 256


def embedding(d: Dialect, vocab: int, hidden: int, dtype: str) -> Any:
    """As ``reference.embedding``: ``ids`` int64 ``[rows]``, ``table`` ``[vocab, hidden]`` in ``dtype``; ``x`` float32 ``[rows, hidden]``
    is what it returns."""
    T = d.T
    rows = T.dynamic("rows")

    @T.prim_func
    def embedding(ids: T.Tensor((rows,), "int64"), table: T.Tensor((vocab, hidden), dtype), x: T.Tensor((rows, hidden), "float32")):
        with T.Kernel(CORES) as core:
            own, wide = T.alloc_shared((hidden,), dtype), T.alloc_shared((hidden,), "float32")
            for step in T.serial(T.ceildiv(rows - core, CORES)):
                T.copy(table[T.max(0, T.min(ids[step * CORES + core], vocab - 1)), 0:hidden], own)
                with T.SimtVF(threads=_THREADS):
                    for i in T.Parallel(hidden):
                        wide[i] = T.cast(own[i], "float32")
                T.copy(wide, x[step * CORES + core, 0:hidden])

    return embedding


def programs_for(shape: ModelShape) -> list[Program]:
    """What a model of ``shape`` launches."""
    return [Program("embedding", "embedding", shape_config(vocab=shape.vocab, hidden=shape.hidden, dtype=shape.dtype), form="asc")]
