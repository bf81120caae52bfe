"""RMSNorm on a GPU, plain or with the residual sum before it: one block a row, a fixed order of additions.

A thread reads 16 bytes of float32 at a time. Sums of squares: the four of a read in order, a thread's reads in order, then
``device_code.block_sum``. All of it follows from ``hidden`` alone.
"""

# Annotations of TileLang functions are values that it reads: no `from __future__ import annotations` here.

from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from ..toolchain import Dialect, ModelShape, Program, shape_config
from ..toolchain.device_code import FILE, block_sum, let_next_start, prelude, wait_for_previous
from ..toolchain.driver import Launchable
from ..toolchain.loading import require
from ..toolchain.shapes import run_dtype, whole_reads

_WIDE = 4  # float32 numbers of a read
_LARGEST_BLOCK = 256


def block_of(hidden: int) -> tuple[int, int]:
    """(reads of a thread, threads) for rows of ``hidden`` numbers: as few reads as 256 threads allow, then as few warps as those reads
    need; what the last warp has too many is idle. Raises ``KernelBuildError`` unless ``hidden`` is a multiple of 4."""
    reads = whole_reads(hidden, _WIDE)
    steps = -(-reads // _LARGEST_BLOCK)
    return steps, -(-reads // (32 * steps)) * 32


def _spread(d: Dialect, hidden: int, steps: int, threads: int) -> tuple[Any, Any]:
    """Two pieces of both kernels: ``fetch(weight, scale)`` and ``norm(value, scale, row, y, eps)``."""
    T = d.T
    shape = (steps, threads, _WIDE)
    add = block_sum(d, threads)

    @T.macro
    def fetch(weight, scale):
        for s, t, v in d.par(*shape):
            if (s * threads + t) * _WIDE + v < hidden:
                scale[s, t, v] = weight[(s * threads + t) * _WIDE + v]

    @T.macro
    def norm(value, scale, row, y, eps):
        square = d.acc(shape, "float32")
        of_step = d.acc((steps, threads), "float32")
        part = d.acc((threads,), "float32")
        total = d.acc((threads,), "float32")
        for s, t, v in d.par(*shape):
            square[s, t, v] = value[s, t, v] * value[s, t, v]
        T.reduce_sum(square, of_step, dim=2)
        T.reduce_sum(of_step, part, dim=0)
        add(part, total)
        for t in d.par(threads):
            total[t] = T.rsqrt(total[t] / hidden + eps)
        for s, t, v in d.par(*shape):
            if (s * threads + t) * _WIDE + v < hidden:
                y[row, (s * threads + t) * _WIDE + v] = T.cast(value[s, t, v] * total[t] * scale[s, t, v], y.dtype)

    return fetch, norm


def rms_norm(d: Dialect, hidden: int, steps: int, threads: int, dtype: str) -> Any:
    """``y = x / sqrt(mean(x²) + eps) * weight``: ``x`` float32 ``[rows, hidden]``, ``y`` in ``dtype``."""
    T = d.T
    rows = T.dynamic("rows")
    fetch, norm = _spread(d, hidden, steps, threads)

    @T.prim_func
    def rms_norm(
        x: T.Tensor((rows, hidden), "float32"),
        weight: T.Tensor((hidden,), "float32"),
        y: T.Tensor((rows, hidden), d.stored(dtype)),
        eps: T.float32,
    ):
        with T.Kernel(rows, threads=threads, prelude=prelude(d)) as row:
            value = d.acc((steps, threads, _WIDE), "float32")
            scale = d.acc((steps, threads, _WIDE), "float32")
            let_next_start(d)
            fetch(weight, scale)
            wait_for_previous(d)
            for s, t, v in d.par(steps, threads, _WIDE):
                if (s * threads + t) * _WIDE + v < hidden:
                    value[s, t, v] = x[row, (s * threads + t) * _WIDE + v]
                else:
                    value[s, t, v] = 0.0
            norm(value, scale, row, y, eps)

    return rms_norm


def add_rms_norm(d: Dialect, hidden: int, steps: int, threads: int, dtype: str) -> Any:
    """``x += delta``, then ``y`` as of ``rms_norm``: ``x`` float32 ``[rows, hidden]``, ``delta`` and ``y`` in ``dtype``."""
    T = d.T
    rows = T.dynamic("rows")
    fetch, norm = _spread(d, hidden, steps, threads)

    @T.prim_func
    def add_rms_norm(
        x: T.Tensor((rows, hidden), "float32"),
        delta: T.Tensor((rows, hidden), d.stored(dtype)),
        weight: T.Tensor((hidden,), "float32"),
        y: T.Tensor((rows, hidden), d.stored(dtype)),
        eps: T.float32,
    ):
        with T.Kernel(rows, threads=threads, prelude=prelude(d)) as row:
            value = d.acc((steps, threads, _WIDE), "float32")
            scale = d.acc((steps, threads, _WIDE), "float32")
            let_next_start(d)
            fetch(weight, scale)
            wait_for_previous(d)
            for s, t, v in d.par(steps, threads, _WIDE):
                if (s * threads + t) * _WIDE + v < hidden:
                    at = (s * threads + t) * _WIDE + v
                    value[s, t, v] = x[row, at] + T.cast(delta[row, at], "float32")
                else:
                    value[s, t, v] = 0.0
            # a loop of its own: a read may not move over a write that it might see
            for s, t, v in d.par(steps, threads, _WIDE):
                if (s * threads + t) * _WIDE + v < hidden:
                    x[row, (s * threads + t) * _WIDE + v] = value[s, t, v]
            norm(value, scale, row, y, eps)

    return add_rms_norm


class _Norm:
    """A kernel that norms rows; which one is ``factory``.

    Args:
        hidden: width of a row, a multiple of 4.
        eps: added to the mean.
        dtype: of ``y``, bfloat16 or float16.
        device: a GPU.
        after: see ``toolchain.driver.Kernel``.
        kernels: those of ``programs``, loaded elsewhere.

    Raises ``KernelBuildError`` if there is no such kernel.
    """

    factory: ClassVar[str]

    def __init__(
        self,
        hidden: int,
        eps: float,
        dtype: torch.dtype,
        device: torch.device,
        after: bool = True,
        kernels: Sequence[Launchable] | None = None,
    ) -> None:
        programs = self.programs(hidden, run_dtype(dtype))
        (self._kernel,) = require(programs, device, after) if kernels is None else kernels
        self._eps = eps

    @classmethod
    def programs(cls, hidden: int, dtype: str) -> list[Program]:
        """What it launches."""
        steps, threads = block_of(hidden)
        return [Program("rms_norm", cls.factory, shape_config(hidden=hidden, steps=steps, threads=threads, dtype=dtype), (FILE,))]


class RmsNorm(_Norm):
    """``y = x / sqrt(mean(x²) + eps) * weight`` in float32, rounded once; for what it takes see ``_Norm``."""

    factory = "rms_norm"

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
        """``x`` float32 ``[R, hidden]``, ``weight`` float32 ``[hidden]``, ``out`` ``[R, hidden]`` in the run dtype; all contiguous."""
        if rows := x.shape[0]:
            self._kernel.launch((rows,), x, weight, out, self._eps, rows)


class AddRmsNorm(_Norm):
    """``x += delta`` in float32, then as ``RmsNorm``; takes what that takes."""

    factory = "add_rms_norm"

    def __call__(self, x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
        """``x`` float32 ``[R, hidden]``, changed; ``delta`` and ``out`` ``[R, hidden]`` in the run dtype, two tensors; ``weight`` float32
        ``[hidden]``; all contiguous."""
        if rows := x.shape[0]:
            self._kernel.launch((rows,), x, delta, weight, out, self._eps, rows)


def programs_for(shape: ModelShape) -> list[Program]:
    """What a model of ``shape`` launches."""
    return RmsNorm.programs(shape.hidden, shape.dtype) + AddRmsNorm.programs(shape.hidden, shape.dtype)
