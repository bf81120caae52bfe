"""RMSNorm on a GPU, with the residual sum before it: one block a row, a fixed order of additions."""

from __future__ import annotations

from typing import Any

from ..toolchain import Dialect


def add_rms_norm(d: Dialect, hidden: int, threads: int, dtype: str) -> Any:
    """``x += delta``, then ``y = rms_norm(x) * weight``: ``x`` float32 ``[rows, hidden]``, ``delta`` and ``y`` in ``dtype``.

    ``threads`` divides ``hidden``.
    """
    T = d.T
    rows = T.dynamic("rows")
    stored = d.stored(dtype)

    @T.prim_func
    def add_rms_norm(
        x: T.Tensor((rows, hidden), "float32"),
        delta: T.Tensor((rows, hidden), stored),
        weight: T.Tensor((hidden,), "float32"),
        y: T.Tensor((rows, hidden), stored),
        eps: T.float32,
    ):
        with T.Kernel(rows, threads=threads) as row:
            value = d.acc((hidden,), "float32")
            square = d.acc((hidden,), "float32")
            total = d.acc((1,), "float32")
            for i in d.par(hidden):
                value[i] = x[row, i] + T.cast(delta[row, i], "float32")
            for i in d.par(hidden):
                x[row, i] = value[i]
                square[i] = value[i] * value[i]
            T.reduce_sum(square, total, dim=0)
            for i in d.par(hidden):
                y[row, i] = T.cast(value[i] * T.rsqrt(total[0] / hidden + eps) * weight[i], stored)

    return add_rms_norm
