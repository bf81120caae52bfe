"""Rotations on Ascend, of channels ``i`` and ``i + d/2``: a core a row, all of its heads."""

# Annotations of TileLang functions are values that it reads: no `from __future__ import annotations` here.

from typing import Any

from ..toolchain import Dialect, ModelShape, Program, shape_config
from ..toolchain.ascend import CORES

_THREADS = 128


def rotate(d: Dialect, heads: int, head_dim: int, dtype: str) -> Any:
    """As ``reference.apply_rope``: ``x`` ``[rows, heads, head_dim]`` in ``dtype``, ``cos`` and ``sin`` float32 ``[rows, head_dim / 2]`` of
    ``RopeTable.pair_cos_sin``, ``y`` float32 like ``x``."""
    T = d.T
    rows = T.dynamic("rows")
    half = head_dim // 2

    @T.prim_func
    def rotate(
        x: T.Tensor((rows, heads, head_dim), dtype),
        cos: T.Tensor((rows, half), "float32"),
        sin: T.Tensor((rows, half), "float32"),
        y: T.Tensor((rows, heads, head_dim), "float32"),
    ):
        with T.Kernel(CORES) as core:
            own_x, own_y = T.alloc_shared((heads, head_dim), dtype), T.alloc_shared((heads, head_dim), "float32")
            own_cos, own_sin = T.alloc_shared((half,), "float32"), T.alloc_shared((half,), "float32")
            for step in T.serial(T.ceildiv(rows - core, CORES)):
                T.copy(x[step * CORES + core, :, :], own_x)
                T.copy(cos[step * CORES + core, 0:half], own_cos)
                T.copy(sin[step * CORES + core, 0:half], own_sin)
                with T.SimtVF(threads=_THREADS):
                    for h, i in T.Parallel(heads, half):
                        first, second = T.cast(own_x[h, i], "float32"), T.cast(own_x[h, i + half], "float32")
                        own_y[h, i] = first * own_cos[i] - second * own_sin[i]
                        own_y[h, i + half] = second * own_cos[i] + first * own_sin[i]
                T.copy(own_y, y[step * CORES + core, :, :])

    return rotate


def programs_for(shape: ModelShape) -> list[Program]:
    """What a model of ``shape`` launches: for its queries, for its keys."""
    sizes = dict.fromkeys((shape.heads, shape.kv_heads))
    return [Program("rope", "rotate", shape_config(heads=n, head_dim=shape.head_dim, dtype=shape.dtype), form="asc") for n in sizes]
