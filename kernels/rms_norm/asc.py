"""RMSNorm on Ascend, plain or with the residual sum before it: a core a row, a fixed order of additions."""

# Annotations of TileLang functions are values that it reads: no `from __future__ import annotations` here.

from typing import Any

from ..toolchain import Dialect, ModelShape, Program, shape_config
from ..toolchain.ascend import CORES

_THREADS = 256


def _width(hidden: int) -> int:
    """Numbers of a row with those that make it whole rounds of the threads."""
    return -(-hidden // _THREADS) * _THREADS


def rms_norm(d: Dialect, hidden: int, dtype: str) -> Any:
    """``y = x / sqrt(mean(x²) + eps) * weight``: ``x`` float32 ``[rows, hidden]``, ``y`` in ``dtype``."""
    T = d.T
    rows = T.dynamic("rows")
    width = _width(hidden)

    @T.prim_func
    def rms_norm(
        x: T.Tensor((rows, hidden), "float32"),
        weight: T.Tensor((hidden,), "float32"),
        y: T.Tensor((rows, hidden), dtype),
        eps: T.float32,
    ):
        with T.Kernel(CORES) as core:
            own_x, own_weight = T.alloc_shared((hidden,), "float32"), T.alloc_shared((hidden,), "float32")
            own_y = T.alloc_shared((hidden,), dtype)
            T.copy(weight, own_weight)
            for step in T.serial(T.ceildiv(rows - core, CORES)):
                T.copy(x[step * CORES + core, 0:hidden], own_x)
                with T.SimtVF(threads=_THREADS):
                    value, square = T.alloc_fragment((width,), "float32"), T.alloc_fragment((width,), "float32")
                    total = T.alloc_fragment((1,), "float32")
                    for i in T.Parallel(width):
                        value[i] = T.if_then_else(i < hidden, own_x[i], 0.0)
                    for i in T.Parallel(width):
                        square[i] = value[i] * value[i]
                    T.reduce_sum(square, total, dim=0)
                    for i in T.Parallel(width):
                        if i < hidden:
                            own_y[i] = T.cast(value[i] * T.rsqrt(total[0] / hidden + eps) * own_weight[i], dtype)
                T.copy(own_y, y[step * CORES + core, 0:hidden])

    return rms_norm


def add_rms_norm(d: Dialect, hidden: int, dtype: str) -> Any:
    """``x += delta``, then ``y`` as of ``rms_norm``: ``x`` float32 ``[rows, hidden]``, ``delta`` and ``y`` in ``dtype``."""
    T = d.T
    rows = T.dynamic("rows")
    width = _width(hidden)

    @T.prim_func
    def add_rms_norm(
        x: T.Tensor((rows, hidden), "float32"),
        delta: T.Tensor((rows, hidden), dtype),
        weight: T.Tensor((hidden,), "float32"),
        y: T.Tensor((rows, hidden), dtype),
        eps: T.float32,
    ):
        with T.Kernel(CORES) as core:
            own_x, own_weight = T.alloc_shared((hidden,), "float32"), T.alloc_shared((hidden,), "float32")
            own_delta, own_y = T.alloc_shared((hidden,), dtype), T.alloc_shared((hidden,), dtype)
            T.copy(weight, own_weight)
            for step in T.serial(T.ceildiv(rows - core, CORES)):
                T.copy(x[step * CORES + core, 0:hidden], own_x)
                T.copy(delta[step * CORES + core, 0:hidden], own_delta)
                with T.SimtVF(threads=_THREADS):
                    value, square = T.alloc_fragment((width,), "float32"), T.alloc_fragment((width,), "float32")
                    total = T.alloc_fragment((1,), "float32")
                    for i in T.Parallel(width):
                        value[i] = T.if_then_else(i < hidden, own_x[i] + T.cast(own_delta[i], "float32"), 0.0)
                    for i in T.Parallel(width):
                        square[i] = value[i] * value[i]
                    T.reduce_sum(square, total, dim=0)
                    for i in T.Parallel(width):
                        if i < hidden:
                            own_x[i] = value[i]
                            own_y[i] = T.cast(value[i] * T.rsqrt(total[0] / hidden + eps) * own_weight[i], dtype)
                T.copy(own_x, x[step * CORES + core, 0:hidden])
                T.copy(own_y, y[step * CORES + core, 0:hidden])

    return add_rms_norm


def programs_for(shape: ModelShape) -> list[Program]:
    """What a model of ``shape`` launches."""
    constants = shape_config(hidden=shape.hidden, dtype=shape.dtype)
    return [Program("rms_norm", factory, constants, form="asc") for factory in ("rms_norm", "add_rms_norm")]
