"""Where the words of a decode step are, in the one block that is copied to the device for it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

HEAD = 16
ROWS, DELTAS = 0, 1
"""Words of the head: rows of the step, table deltas to store. The others are 0."""

SOURCE, SEQ_LEN, IDS, POS, TABLE_ROW, SLOTS = range(6)
"""Fields, in order; from ``SLOTS`` on one for each slot map. ``SOURCE``: place of a row's id among the newest tokens, −1 = it is known."""

_ALIGN = 16  # words; fields begin on cache lines


@dataclass(frozen=True)
class StepWords:
    """Layout of the block: head, fields ``[5 + maps, stride]``, deltas ``[max_deltas, 3]`` as (row, column, page); int32.

    ``max_rows``: most rows of a step; ``maps``: slot maps; ``max_deltas``: most deltas.
    """

    max_rows: int
    maps: int
    max_deltas: int

    @property
    def stride(self) -> int:
        """Words from one field to the next."""
        return -(-self.max_rows // _ALIGN) * _ALIGN

    @property
    def num_fields(self) -> int:
        """Fields of a row."""
        return SLOTS + self.maps

    @property
    def first_delta(self) -> int:
        """Where deltas begin."""
        return HEAD + self.num_fields * self.stride

    @property
    def total(self) -> int:
        """Words of the block."""
        return self.first_delta + 3 * self.max_deltas

    def fields(self, words: torch.Tensor) -> torch.Tensor:
        """View ``[5 + maps, stride]`` of the fields of a block int32 ``[total]``."""
        return words[HEAD : self.first_delta].view(self.num_fields, self.stride)

    def deltas(self, words: torch.Tensor) -> torch.Tensor:
        """View ``[max_deltas, 3]`` of the deltas of a block."""
        return words[self.first_delta : self.total].view(self.max_deltas, 3)
