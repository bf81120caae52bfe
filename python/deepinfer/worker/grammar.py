"""Grammar rows: which tokens may come next, as bits, and what a step does with them.

A grammar is a matcher of one sequence. The step loop tells it every token the core has kept, asks it for a mask before each token is
drawn, and for the rows behind drafts lets it run ahead and rolls it back. A mask row is int32 words, token ``t`` = bit ``t % 32`` of
word ``t // 32``, 1 = allowed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray


class Grammar(Protocol):
    """A matcher. Its state is a function of the tokens accepted and not rolled back."""

    @property
    def position(self) -> int:
        """Tokens accepted."""

    @property
    def complete(self) -> bool:
        """Whether the answer may end here: what was accepted is a whole text of the grammar."""

    def fill_mask(self, row: NDArray[np.int32]) -> None:
        """Writes the mask of the next token, int32 ``[ceil(vocab / 32)]``. At least one token must be allowed."""

    def accept(self, token: int) -> bool:
        """Moves over one token. False: it is not allowed here, and nothing has changed."""

    def rollback(self, count: int) -> None:
        """Takes the last ``count`` tokens back."""


NO_TOKEN = "the grammar allows no token here"


SLOW_MASK = 0.05
"""Seconds above which a mask is counted as slow: a step waits for it."""
MOST_MASK = 0.5
"""Seconds that one mask may take; above, its sequence ends, so that others do not wait for the next one."""


class DeadEndError(ValueError):
    """A grammar allows no token."""


class SlowMaskError(ValueError):
    """A mask took longer than a step may be held up."""


class MaskClock:
    """Times masks, by what the thread worked: that the machine is busy is no grammar's fault.

    Attributes:
        fills, seconds: masks written, and their time; ``slow``: those above ``SLOW_MASK``; ``too_slow``: those above ``MOST_MASK``.
    """

    def __init__(self, clock: Callable[[], float] = time.thread_time) -> None:
        self._clock = clock
        self.fills = self.slow = self.too_slow = 0
        self.seconds = 0.0

    def fill(self, grammar: Grammar, row: NDArray[np.int32]) -> None:
        """Has a grammar write a mask. Raises SlowMaskError if that took too long."""
        start = self._clock()
        grammar.fill_mask(row)
        took = self._clock() - start
        self.fills += 1
        self.seconds += took
        if took > SLOW_MASK:
            self.slow += 1
            if took > MOST_MASK:
                self.too_slow += 1
                raise SlowMaskError(f"the grammar took {took:.2f} s for one mask, above {MOST_MASK} s; make it less ambiguous or smaller")


def mask_words(vocab_size: int) -> int:
    """Words of a mask row."""
    return -(-vocab_size // 32)


def fill_masks(grammar: Grammar, rows: NDArray[np.int32], drafts: Sequence[int], clock: MaskClock) -> None:
    """Masks of one sequence's sampling rows: the first from where the grammar stands, each further one behind one more draft.

    Rows behind a draft that the grammar refuses allow everything: that draft cannot be drawn, so nothing of theirs is kept. The
    grammar stands afterwards where it stood.

    Args:
        rows: int32 ``[1 + len(drafts), words]``.
        clock: times each mask.

    Raises:
        DeadEndError: no token is allowed at the first row.
        SlowMaskError: a mask took too long.
    """
    ahead = 0
    try:
        for nth, row in enumerate(rows):
            if nth and not grammar.accept(drafts[nth - 1]):
                rows[nth:] = -1
                return
            ahead += bool(nth)
            clock.fill(grammar, row)
            if not row.any():
                if not nth:
                    raise DeadEndError(NO_TOKEN)
                rows[nth:] = -1  # a draft that ends what the grammar describes: nothing may follow it
                return
    finally:
        if ahead:
            grammar.rollback(ahead)


class MaskBuffers:
    """Host memory of masks, one block per ring slot, and the device's copy; made when the first grammar comes."""

    def __init__(self, slots: int, rows: int, vocab_size: int, device: torch.device, pinned: bool) -> None:
        self._shape = (rows, mask_words(vocab_size))
        self._slots, self._device, self._pinned = slots, device, pinned
        self._host: list[torch.Tensor] = []
        self._target: torch.Tensor | None = None

    def prepare(self) -> None:
        """Allocates, outside of any step."""
        if not self._host:
            self._host = [torch.empty(self._shape, dtype=torch.int32, pin_memory=self._pinned) for _ in range(self._slots)]
            if self._device.type != "cpu":
                self._target = torch.empty(self._shape, dtype=torch.int32, device=self._device)

    def host(self, index: int) -> NDArray[np.int32]:
        """Mask rows of ring slot ``index``, in the order of the step's rows that have a grammar."""
        rows: NDArray[np.int32] = self._host[index].numpy()
        return rows

    def upload(self, index: int, count: int) -> torch.Tensor:
        """The first ``count`` rows of a ring slot on the device; part of the step's work."""
        rows = self._host[index][:count]
        if self._target is None:
            return rows
        return self._target[:count].copy_(rows, non_blocking=True)


def apply_masks(logits: torch.Tensor, rows: torch.Tensor, masks: torch.Tensor) -> None:
    """Minus infinity in ``logits`` ``[r, vocab]``, in place, where the mask of a row forbids a token.

    ``rows`` integer ``[m]`` which rows, ``masks`` int32 ``[m, words]``.
    """
    index = rows.long()
    bit = torch.arange(32, dtype=torch.int32, device=logits.device)
    allowed = ((masks.unsqueeze(-1) >> bit) & 1).view(len(masks), -1)[:, : logits.shape[1]]
    logits.index_copy_(0, index, torch.where(allowed != 0, logits.index_select(0, index), -torch.inf))
