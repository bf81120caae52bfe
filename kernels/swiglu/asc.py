"""SwiGLU on Ascend: a core a row."""

# Annotations of TileLang functions are values that it reads: no `from __future__ import annotations` here.

from typing import Any

from ..toolchain import Dialect, ModelShape, Program, shape_config
from ..toolchain.ascend import CORES

_THREADS = 256


def swiglu(d: Dialect, intermediate: int, dtype: str) -> Any:
    """``y = gate / (1 + e^-gate) * up`` in float32, rounded once: ``gate_up`` ``[rows, 2 * intermediate]``, gate first, ``y``
    ``[rows, intermediate]``, both in ``dtype``."""
    T = d.T
    rows = T.dynamic("rows")

    @T.prim_func
    def swiglu(gate_up: T.Tensor((rows, 2 * intermediate), dtype), y: T.Tensor((rows, intermediate), dtype)):
        with T.Kernel(CORES) as core:
            gate, up, out = (T.alloc_shared((intermediate,), dtype) for _ in range(3))
            for step in T.serial(T.ceildiv(rows - core, CORES)):
                T.copy(gate_up[step * CORES + core, 0:intermediate], gate)
                T.copy(gate_up[step * CORES + core, intermediate : 2 * intermediate], up)
                with T.SimtVF(threads=_THREADS):
                    for i in T.Parallel(intermediate):
                        g = T.cast(gate[i], "float32")
                        out[i] = T.cast(g / (1.0 + T.exp(-g)) * T.cast(up[i], "float32"), dtype)
                T.copy(out, y[step * CORES + core, 0:intermediate])

    return swiglu


def programs_for(shape: ModelShape) -> list[Program]:
    """What a model of ``shape`` launches."""
    return [Program("swiglu", "swiglu", shape_config(intermediate=shape.intermediate, dtype=shape.dtype), form="asc")]
