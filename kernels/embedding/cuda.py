"""Rows of the embedding table on a GPU, and with them those of the table of rotations: a thread copies 8 numbers, or 4."""

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
_TURNS = 4  # float32 numbers of a read


def embedding(d: Dialect, vocab: int, hidden: int, half: int, blocks: int, threads: int, dtype: str) -> Any:
    """``x[r] = table[ids[r]]``: ``table`` ``[vocab, hidden]`` in ``dtype``, ``x`` float32 ``[rows, hidden]``. One more block of each row
    copies ``row_cos[r] = cosines[position[r]]`` and ``row_sin`` from ``sines``, float32 ``[*, half]``."""
    T = d.T
    rows, positions = T.dynamic("rows"), T.dynamic("positions")
    stored = d.stored(dtype)
    shape = (threads, _WIDE)
    turns = (-(-half // (_TURNS * threads)), threads, _TURNS)

    @T.prim_func
    def embedding(
        ids: T.Tensor((rows,), "int64"),
        table: T.Tensor((vocab, hidden), stored),
        x: T.Tensor((rows, hidden), "float32"),
        position: T.Tensor((rows,), "int64"),
        cosines: T.Tensor((positions, half), "float32"),
        sines: T.Tensor((positions, half), "float32"),
        row_cos: T.Tensor((rows, half), "float32"),
        row_sin: T.Tensor((rows, half), "float32"),
    ):
        with T.Kernel(rows, blocks + 1, threads=threads, prelude=prelude(d)) as (row, part):
            first = part * threads * _WIDE
            kept = d.acc(shape, stored)
            wide = d.acc(shape, "float32")
            c, s = d.acc(turns, "float32"), d.acc(turns, "float32")
            let_next_start(d)
            wait_for_previous(d)
            if part < blocks:
                word = T.max(T.min(ids[row], T.int64(vocab - 1)), T.int64(0))
                for t, v in d.par(*shape):
                    if first + t * _WIDE + v < hidden:
                        kept[t, v] = table[word, first + t * _WIDE + v]
                for t, v in d.par(*shape):
                    wide[t, v] = T.cast(kept[t, v], "float32")
                for t, v in d.par(*shape):
                    if first + t * _WIDE + v < hidden:
                        x[row, first + t * _WIDE + v] = wide[t, v]
            else:
                at = T.max(T.min(position[row], T.cast(positions - 1, "int64")), T.int64(0))
                for n, t, v in d.par(*turns):
                    if (n * threads + t) * _TURNS + v < half:
                        c[n, t, v] = cosines[at, (n * threads + t) * _TURNS + v]
                for n, t, v in d.par(*turns):
                    if (n * threads + t) * _TURNS + v < half:
                        s[n, t, v] = sines[at, (n * threads + t) * _TURNS + v]
                for n, t, v in d.par(*turns):
                    if (n * threads + t) * _TURNS + v < half:
                        row_cos[row, (n * threads + t) * _TURNS + v] = c[n, t, v]
                for n, t, v in d.par(*turns):
                    if (n * threads + t) * _TURNS + v < half:
                        row_sin[row, (n * threads + t) * _TURNS + v] = s[n, t, v]

    return embedding


class Embedding:
    """``reference.embedding`` and ``reference.rotations`` on a GPU.

    Args:
        vocab: rows of the table.
        hidden: width of a row, a multiple of 8.
        head_dim: channels of a head, a multiple of 8: twice the width of a row of rotations.
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
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        after: bool = True,
        kernels: Sequence[Launchable] | None = None,
    ) -> None:
        programs = self.programs(vocab, hidden, head_dim, run_dtype(dtype))
        (self._kernel,) = require(programs, device, after) if kernels is None else kernels
        self._blocks, _ = even_blocks(hidden // _WIDE)

    @staticmethod
    def programs(vocab: int, hidden: int, head_dim: int, dtype: str) -> list[Program]:
        """What it launches."""
        whole_reads(head_dim, 2 * _TURNS)
        blocks, threads = even_blocks(whole_reads(hidden, _WIDE))
        constants = shape_config(vocab=vocab, hidden=hidden, half=head_dim // 2, blocks=blocks, threads=threads, dtype=dtype)
        return [Program("embedding", "embedding", constants, (FILE,))]

    def __call__(
        self,
        ids: torch.Tensor,
        table: torch.Tensor,
        out: torch.Tensor,
        position: torch.Tensor,
        rotations: tuple[torch.Tensor, torch.Tensor],
        turned: tuple[torch.Tensor, torch.Tensor],
    ) -> None:
        """``ids`` and ``position`` int64 ``[R]``, ``table`` ``[vocab, hidden]``, ``out`` float32 ``[R, hidden]``; ``rotations``: cosines
        and sines float32 ``[P, head_dim / 2]``, of which ``turned`` ``[R, head_dim / 2]`` gets the rows' own. All contiguous."""
        if rows := ids.shape[0]:
            cosines, sines = rotations
            grid = (rows, self._blocks + 1)
            self._kernel.launch(grid, ids, table, out, position, cosines, sines, *turned, rows, cosines.shape[0])


def programs_for(shape: ModelShape) -> list[Program]:
    """What a model of ``shape`` launches."""
    return Embedding.programs(shape.vocab, shape.hidden, shape.head_dim, shape.dtype)
