"""Rows of the embedding table on a GPU: a thread copies 8 numbers."""

# Annotations of TileLang functions are values that it reads: no `from __future__ import annotations` here.

from collections.abc import Sequence
from typing import Any

import torch

from ..toolchain import Dialect, ModelShape, Program, shape_config
from ..toolchain.device_code import FILE, let_next_start, prelude, wait_for_previous
from ..toolchain.driver import Launchable
from ..toolchain.loading import require
from ..toolchain.shapes import even_blocks, run_dtype, whole_reads

_WIDE = 8  # numbers of a read


def embedding(d: Dialect, vocab: int, hidden: int, blocks: int, threads: int, dtype: str) -> Any:
    """``x[r] = table[ids[r]]``: ``ids`` int64 ``[rows]``, ``table`` ``[vocab, hidden]`` in ``dtype``, ``x`` float32 ``[rows, hidden]``."""
    T = d.T
    rows = T.dynamic("rows")
    stored = d.stored(dtype)
    shape = (threads, _WIDE)

    @T.prim_func
    def embedding(ids: T.Tensor((rows,), "int64"), table: T.Tensor((vocab, hidden), stored), x: T.Tensor((rows, hidden), "float32")):
        with T.Kernel(rows, blocks, threads=threads, prelude=prelude(d)) as (row, part):
            first = part * threads * _WIDE
            kept = d.acc(shape, stored)
            wide = d.acc(shape, "float32")
            let_next_start(d)
            wait_for_previous(d)
            word = T.max(T.min(ids[row], T.int64(vocab - 1)), T.int64(0))
            for t, v in d.par(*shape):
                if first + t * _WIDE + v < hidden:
                    kept[t, v] = table[word, first + t * _WIDE + v]
            for t, v in d.par(*shape):
                wide[t, v] = T.cast(kept[t, v], "float32")
            for t, v in d.par(*shape):
                if first + t * _WIDE + v < hidden:
                    x[row, first + t * _WIDE + v] = wide[t, v]

    return embedding


class Embedding:
    """``reference.embedding`` on a GPU.

    Args:
        vocab: rows of the table.
        hidden: width of a row, a multiple of 8.
        dtype: of the table, bfloat16 or float16.
        device: a GPU.
        after: see ``toolchain.driver.Kernel``.
        kernels: those of ``programs``, loaded elsewhere.

    Raises ``KernelBuildError`` if there is no such kernel.
    """

    def __init__(
        self,
        vocab: int,
        hidden: int,
        dtype: torch.dtype,
        device: torch.device,
        after: bool = True,
        kernels: Sequence[Launchable] | None = None,
    ) -> None:
        programs = self.programs(vocab, hidden, run_dtype(dtype))
        (self._kernel,) = require(programs, device, after) if kernels is None else kernels
        self._blocks, _ = even_blocks(hidden // _WIDE)

    @staticmethod
    def programs(vocab: int, hidden: int, dtype: str) -> list[Program]:
        """What it launches."""
        blocks, threads = even_blocks(whole_reads(hidden, _WIDE))
        constants = shape_config(vocab=vocab, hidden=hidden, blocks=blocks, threads=threads, dtype=dtype)
        return [Program("embedding", "embedding", constants, (FILE,))]

    def __call__(self, ids: torch.Tensor, table: torch.Tensor, out: torch.Tensor) -> None:
        """``ids`` int64 ``[R]``, ``table`` ``[vocab, hidden]``, ``out`` float32 ``[R, hidden]``; all contiguous."""
        if rows := ids.shape[0]:
            self._kernel.launch((rows, self._blocks), ids, table, out, rows)


def programs_for(shape: ModelShape) -> list[Program]:
    """What a model of ``shape`` launches."""
    return Embedding.programs(shape.vocab, shape.hidden, shape.dtype)
