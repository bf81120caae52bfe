"""Kernels for Ascend 950, in TileLang's dialect of it: lowered to Ascend C, which only CANN's compiler takes further. Nothing here runs.

There a kernel is a grid of cores. A core copies rows to its own memory (``alloc_shared``), works on them in blocks of vector functions
(``SimtVF``: with threads; loops in parallel exist in such blocks only) and copies answers back; TileLang puts the waits between.
"""

from __future__ import annotations

from typing import Any

from deepinfer.errors import KernelBuildError

from .dialect import Dialect
from .lowering import check_tilelang, last_line, quiet
from .program import Program

CORES = 64
"""Vector cores: each takes every 64th row."""


class AscendDialect(Dialect):
    """What factories in ``asc.py`` are called with."""

    @property
    def T(self) -> Any:
        """``tilelang.ascend.language``."""
        from tilelang.ascend import language

        return language


def lower_for_ascend(program: Program) -> str:
    """Ascend C of ``program``. Raises ``KernelBuildError`` with TileLang's reason for what it refuses."""
    check_tilelang()
    import tilelang
    from tilelang import tvm

    try:
        with quiet(), tvm.target.Target({"kind": "ascend"}) as target:
            return str(tilelang.lower(program.build(AscendDialect()), target=target).kernel_source)
    except Exception as e:  # of any kind: TileLang raises its own, TVM's and Python's
        raise KernelBuildError(last_line(e)) from e
