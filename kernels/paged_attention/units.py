"""Which rows of a step a block of attention on a GPU works on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from deepinfer.platforms import to_device


@dataclass(frozen=True)
class Units:
    """A step's rows as ``PagedAttention`` works on them; all on the device, made once a step.

    ``table`` int32 ``[*, W]`` pages of sequences, whose rows may lie apart; ``position`` int64 ``[T]`` of the rows; ``first``, ``count``
    int32 ``[U]`` and ``row`` int64 ``[U]``: rows of each unit, consecutive ones of one sequence, and the sequence's row of ``table``. A
    unit of 0 rows is nothing. ``single``: each row is a unit, in order. ``wide``: of up to twice as many rows, which one kernel takes.
    """

    table: torch.Tensor
    position: torch.Tensor
    first: torch.Tensor
    count: torch.Tensor
    row: torch.Tensor
    single: bool = False
    wide: bool = False


def one_row_units(
    table: torch.Tensor, position: torch.Tensor, row: torch.Tensor, counting: tuple[torch.Tensor, torch.Tensor] | None = None
) -> Units:
    """Each row by itself: ``position`` and ``row`` int64 ``[R]``. ``counting``: int32 0, 1, 2, … and ones, if they are at hand."""
    if counting is None:
        first = torch.arange(position.shape[0], dtype=torch.int32, device=position.device)
        counting = first, torch.ones_like(first)
    return Units(table, position, *counting, row, True)


def unit_arrays(cu_q: ArrayLike, tokens: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Units of at most ``tokens`` rows of a step whose sequence ``i`` has rows ``cu_q[i] … cu_q[i + 1] - 1``: (first row, rows, sequence)
    of each."""
    borders = np.asarray(cu_q, np.int64)
    pieces = -(-np.diff(borders) // tokens)
    sequence = np.repeat(np.arange(len(pieces)), pieces)
    nth = np.arange(len(sequence)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    order = np.argsort(-nth, kind="stable")  # those that see most keys begin first
    sequence = sequence[order]
    first = borders[sequence] + nth[order] * tokens
    return first, np.minimum(tokens, borders[sequence + 1] - first), sequence


def most_units(rows: int, sequences: int, tokens: int) -> int:
    """Most units of a step of up to ``rows`` rows of up to ``sequences`` sequences."""
    return min(rows, sequences + rows // tokens)


def step_units(table: torch.Tensor, position: torch.Tensor, cu_q: Sequence[int], tokens: int, wide: bool = False) -> Units:
    """Units of at most ``tokens`` rows, ``wide`` or not; rows ``cu_q[i] … cu_q[i + 1] - 1`` are those of row ``i`` of ``table``."""
    packed = torch.from_numpy(np.stack(unit_arrays(cu_q, tokens)))
    on_device = to_device(packed, position.device)
    return Units(table, position, on_device[0].int(), on_device[1].int(), on_device[2], wide=wide)
