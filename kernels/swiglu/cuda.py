"""SwiGLU on a GPU: a thread makes 8 numbers of a row.

``gate / (1 + e^-gate) * up`` in float32, rounded once. (torch's own rounds ``silu(gate)`` to the run dtype before the product.)
"""

# Annotations of TileLang functions are values that it reads: no `from __future__ import annotations` here.

from collections.abc import Sequence
from typing import Any

import torch

from ..toolchain import Dialect, ModelShape, Program, shape_config
from ..toolchain.device_code import FILE, let_next_start, prelude, quotient, wait_for_previous
from ..toolchain.driver import Launchable
from ..toolchain.loading import require
from ..toolchain.shapes import even_blocks, run_dtype, whole_reads

_WIDE = 8  # numbers of a read


def swiglu(d: Dialect, intermediate: int, blocks: int, threads: int, dtype: str) -> Any:
    """``y = silu(gate) * up``: ``gate_up`` ``[rows, 2, intermediate]``, gate first, ``y`` ``[rows * blocks, intermediate / blocks]``, both
    in ``dtype``. (With rows of ``y`` and pieces of a row apart the compiler cuts writes of 16 bytes into four.)"""
    T = d.T
    rows, pieces = T.dynamic("rows"), T.dynamic("pieces")
    stored = d.stored(dtype)
    width = intermediate // blocks
    shape = (threads, _WIDE)

    @T.prim_func
    def swiglu(gate_up: T.Tensor((rows, 2, intermediate), stored), y: T.Tensor((pieces, width), stored)):
        with T.Kernel(pieces, threads=threads, prelude=prelude(d)) as piece:
            row, first = piece // blocks, piece % blocks * width
            gate, up, out = d.acc(shape, stored), d.acc(shape, stored), d.acc(shape, stored)
            g, u = d.acc(shape, "float32"), d.acc(shape, "float32")
            let_next_start(d)
            wait_for_previous(d)
            for t, v in d.par(*shape):
                if t * _WIDE + v < width:
                    gate[t, v] = gate_up[row, 0, first + t * _WIDE + v]
                    up[t, v] = gate_up[row, 1, first + t * _WIDE + v]
            for t, v in d.par(*shape):
                g[t, v] = T.cast(gate[t, v], "float32")
                u[t, v] = T.cast(up[t, v], "float32")
            for t, v in d.par(*shape):
                g[t, v] = quotient(d, g[t, v], 1.0 + T.exp(-g[t, v]))
            for t, v in d.par(*shape):
                out[t, v] = T.cast(g[t, v] * u[t, v], stored)
            for t, v in d.par(*shape):
                if t * _WIDE + v < width:
                    y[piece, t * _WIDE + v] = out[t, v]

    return swiglu


class SwiGlu:
    """``y = silu(gate) * up`` in float32, rounded once.

    Args:
        intermediate: width of ``y``, a multiple of 8.
        dtype: bfloat16 or float16.
        device: a GPU.
        after: see ``toolchain.driver.Kernel``.
        kernels: those of ``programs``, loaded elsewhere.

    Raises ``KernelBuildError`` if there is no such kernel.
    """

    def __init__(
        self,
        intermediate: int,
        dtype: torch.dtype,
        device: torch.device,
        after: bool = True,
        kernels: Sequence[Launchable] | None = None,
    ) -> None:
        programs = self.programs(intermediate, run_dtype(dtype))
        (self._kernel,) = require(programs, device, after) if kernels is None else kernels
        self._blocks, _ = even_blocks(intermediate // _WIDE)

    @staticmethod
    def programs(intermediate: int, dtype: str) -> list[Program]:
        """What it launches."""
        blocks, threads = even_blocks(whole_reads(intermediate, _WIDE))
        return [Program("swiglu", "swiglu", shape_config(intermediate=intermediate, blocks=blocks, threads=threads, dtype=dtype), (FILE,))]

    def __call__(self, gate_up: torch.Tensor, out: torch.Tensor) -> None:
        """``gate_up`` ``[R, 2 I]``, gate first, ``out`` ``[R, I]``; both contiguous and in the run dtype."""
        if rows := out.shape[0]:
            self._kernel.launch((rows * self._blocks,), gate_up, out, rows, rows * self._blocks)


def programs_for(shape: ModelShape) -> list[Program]:
    """What a model of ``shape`` launches."""
    return SwiGlu.programs(shape.intermediate, shape.dtype)
