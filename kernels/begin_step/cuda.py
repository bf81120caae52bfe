"""``begin_step`` on a GPU as one kernel: a thread a row, and a thread a table delta."""

# Annotations of TileLang functions are values that it reads: no `from __future__ import annotations` here.

from typing import Any

import torch

from ..toolchain import Dialect, ModelShape, Program, imported, shape_config
from ..toolchain.device_code import let_next_start, wait_for_previous
from ..toolchain.driver import Launchable
from .reference import DecodeFields
from .words import DELTAS, HEAD, IDS, ROWS, SEQ_LEN, SLOTS, SOURCE, StepWords

_THREADS = 128

_IMPORTED = f"""
DEVICE int begin_step_part(int* words, int* newest, int* table, int64_t* wide, int* seq_len, int part, int threads,
                           int rows, int deltas, int stride, int fields, int width) {{
  for (int t = THREAD; t < threads; t += THREADS) {{
    int i = part * threads + t;
    if (i < rows) {{  // words of padding are there, too: nothing is read later for knowing that they do not count
      int* field = words + {HEAD} + i;
      int source = field[{SOURCE} * stride], length = field[{SEQ_LEN} * stride], id = field[{IDS} * stride];
      bool own = i < words[{ROWS}];
      if (own && source >= 0) id = newest[source];
      seq_len[i] = own ? length : 1;
      wide[i] = own ? id : 0;
      for (int f = {IDS} + 1; f < fields; ++f) {{
        int value = field[f * stride];
        if (!own || (f >= {SLOTS} && value < 0)) value = 0;
        wide[(f - {IDS}) * stride + i] = value;
      }}
    }}
    if (i < deltas && i < words[{DELTAS}]) {{
      int* delta = words + {HEAD} + fields * stride + 3 * i;
      table[(int64_t)delta[0] * width + delta[1]] = delta[2];
    }}
  }}
  return 0;
}}
"""


def begin_step(d: Dialect, threads: int) -> Any:
    """See ``reference.begin_step``; ``words`` as ``StepWords`` says, ``wide`` ``[3 + maps, stride]``. ``fields``: of a row, ``5 + maps``;
    ``width``: of the table. Grid: ``ceil(max(rows, deltas) / threads)``."""
    T = d.T
    text = imported.prelude(d, _IMPORTED)
    sizes = [T.dynamic(name) for name in ("all_words", "all_newest", "cells", "all_wide", "lengths")]

    @T.prim_func
    def begin_step(
        words: T.Tensor((sizes[0],), "int32"),
        newest: T.Tensor((sizes[1],), "int32"),
        table: T.Tensor((sizes[2],), "int32"),
        wide: T.Tensor((sizes[3],), "int64"),
        seq_len: T.Tensor((sizes[4],), "int32"),
        rows: T.int32,
        deltas: T.int32,
        stride: T.int32,
        fields: T.int32,
        width: T.int32,
    ):
        with T.Kernel(T.ceildiv(T.max(rows, deltas), threads), threads=threads, prelude=text) as part:
            let_next_start(d)
            wait_for_previous(d)
            places = [T.address_of(t[0]) for t in (words, newest, table, wide, seq_len)]
            imported.call(d, "begin_step_part", *places, part, threads, rows, deltas, stride, fields, width)

    return begin_step


class BeginStep:
    """``reference.begin_step`` as one launch, with the same arguments. ``kernel``: that of ``programs``."""

    def __init__(self, kernel: Launchable) -> None:
        self._kernel = kernel

    @staticmethod
    def programs() -> list[Program]:
        """What it launches."""
        return [Program("begin_step", "begin_step", shape_config(threads=_THREADS), (*imported.FILES, "begin_step/words.py"))]

    def __call__(
        self, words: torch.Tensor, layout: StepWords, newest: torch.Tensor, table: torch.Tensor, to: DecodeFields, rows: int, deltas: int
    ) -> None:
        """See ``reference.begin_step``."""
        grid = (-(-max(rows, deltas) // _THREADS),)
        sizes = (rows, deltas, layout.stride, layout.num_fields, table.shape[1])
        self._kernel.launch(grid, words, newest, table.view(-1), to.wide.view(-1), to.seq_len, *sizes)


def programs_for(shape: ModelShape) -> list[Program]:
    """One for all models."""
    return BeginStep.programs()
