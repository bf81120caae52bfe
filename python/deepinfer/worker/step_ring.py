"""Memory of the step ring: one int32 tensor per slot, named views into it, and one copy of a step's inputs on the device.

The core writes a step's plan into a slot and reads the output fields back. The worker adds fields of its own for what it
derives on the host, so that everything the device needs travels in one copy. Output fields lie behind the inputs and are
not part of that copy. What a step with few needs reads lies ahead of the rest: it then copies no more than that; what only some steps
read lies behind it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

OUTPUT_FIELDS = ("tokens", "accepted", "verified")
_ALIGN = 16  # words; keeps every field on its own cache line

# Words of the header, see docs/architecture.md.
H_KIND, H_STEP_LO, H_STEP_HI, H_ROWS, H_SEQS, H_DECODES, H_SAMPLES, H_DELTAS = range(8)
H_BLOCK_CLONES, H_STATE_CLONES, H_ZEROES, H_ADMITTED, H_MAX_Q, H_MAX_LEN, H_GRAMMAR, H_PROMPT_LOGPROBS = range(8, 16)
H_AGREED_ROWS, H_SWAP_OUT, H_SWAP_IN, H_SWAP_OUT_STATES, H_SWAP_IN_STATES, H_DRAFT_ROWS, H_UNRESOLVED = range(16, 23)
H_AGREED_TYPE, H_SNAPSHOT_OUT, H_SNAPSHOT_IN, H_VERIFIED = range(23, 27)
ADMITTED_WORDS = 6  # (state slot, index, generation, start, end of the hit, kind of start)
START_NOTHING, START_WHOLE, START_SLICE, START_RERUN = range(4)
KIND_IDLE, KIND_PREFILL, KIND_DECODE, KIND_MIXED, KIND_DUMMY = range(5)

FLAG_SAMPLES, FLAG_PROMPT_LOGPROBS, FLAG_PREFILL, FLAG_GRAMMAR = 1, 2, 4, 8


class Header(NamedTuple):
    """A step's counts as Python integers; bounds for the launch come from here, never from the device."""

    kind: int
    step: int
    rows: int
    seqs: int
    decodes: int
    samples: int
    deltas: int
    block_clones: int
    state_clones: int
    zeroes: int
    admitted: int
    max_q: int
    max_len: int
    grammar_rows: int
    prompt_logprobs: int
    agreed_rows: int = 0
    swap_out: int = 0
    swap_in: int = 0
    swap_out_states: int = 0
    swap_in_states: int = 0
    draft_rows: int = 0
    unresolved: int = 0
    agreed_type: int = 0
    snapshot_out: int = 0
    snapshot_in: int = 0
    verified: int = 0  # draft rows that run; of fewer than ``draft_rows`` the device chooses which

    @property
    def cut(self) -> int:
        """Draft rows that do not run."""
        return self.draft_rows - self.verified

    @classmethod
    def read(cls, words: NDArray[np.int32]) -> Header:
        """From the `header` field of a slot."""
        w: list[int] = words[: H_VERIFIED + 1].tolist()
        step = (w[H_STEP_LO] & 0xFFFFFFFF) | ((w[H_STEP_HI] & 0xFFFFFFFF) << 32)
        return cls(w[H_KIND], step, *w[H_ROWS:])


class RingSlot:
    """Views of one slot: `t[name]` is a host tensor, `a[name]` the same memory as a numpy array, `d[name]` the device's copy.

    All slots are copied to the same place, so `d` names the inputs of the step uploaded last: what reads them is launched before
    the next step's upload. Without a copy (`target` is `None`) `d` is `t`.
    """

    def __init__(self, fields: Sequence[tuple[str, int, int]], words: int, target: torch.Tensor | None, pinned: bool) -> None:
        self.host = torch.zeros(words, dtype=torch.int32, pin_memory=pinned)
        self.t = {name: self.host[start : start + n] for name, start, n in fields}
        self.a = {name: view.numpy() for name, view in self.t.items()}
        self.d = self.t
        self._target = target
        self._parts: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        if target is not None:
            self.d = {name: target[start : start + n] for name, start, n in fields if start < len(target)}

    def upload(self, words: int | None = None) -> None:
        """Starts the one copy of this step's inputs to the device, or of their first ``words``; nothing to do where there is no copy."""
        if self._target is None:
            return
        count = len(self._target) if words is None else words
        part = self._parts.get(count)
        if part is None:
            part = self._parts[count] = (self._target[:count], self.host[:count])
        part[0].copy_(part[1], non_blocking=True)


class StepRing:
    """At least three slots, so that memory of a step is not written again before that step has completed.

    Args:
        layout: the core's fields as (name, words), in the order the core names them.
        extra: the worker's own fields as (name, words).
        device: where the forward runs.
        pinned: page-locked host memory, for copies that do not stall the launch.
        slots: number of slots, at least 3.
        front: fields of the worker's own that lie ahead of all others.
        copied: whether the device has a copy of its own; ``None`` = unless it is a CPU.
        back: fields of the worker's own that lie behind all other inputs.

    Attributes:
        front_words: words of the ``front`` fields, ``own_words``: of these and ``extra``, ``usual_words``: of all inputs but the ``back``
            fields, from the beginning of a slot.
    """

    def __init__(
        self,
        layout: Sequence[tuple[str, int]],
        extra: Sequence[tuple[str, int]],
        device: torch.device,
        pinned: bool,
        slots: int = 3,
        front: Sequence[tuple[str, int]] = (),
        copied: bool | None = None,
        back: Sequence[tuple[str, int]] = (),
    ) -> None:
        if slots < 3:
            raise ValueError(f"a step ring needs at least 3 slots, got {slots}")
        self.core_fields = tuple(name for name, _ in layout)
        placed_front, self.front_words = _place(front, 0)
        placed_own, self.own_words = _place(extra, self.front_words)
        placed, self.usual_words = _place([f for f in layout if f[0] not in OUTPUT_FIELDS], self.own_words)
        placed_back, input_words = _place(back, self.usual_words)
        placed_out, words = _place([f for f in layout if f[0] in OUTPUT_FIELDS], input_words)
        fields = [*placed_front, *placed_own, *placed, *placed_back, *placed_out]
        copied = device.type != "cpu" if copied is None else copied
        target = torch.zeros(input_words, dtype=torch.int32, device=device) if copied else None
        self.slots = [RingSlot(fields, words, target, pinned) for _ in range(slots)]

    def registration(self) -> list[dict[str, torch.Tensor]]:
        """What the core registers: per slot its own fields by name."""
        return [{name: slot.t[name] for name in self.core_fields} for slot in self.slots]


def _place(fields: Iterable[tuple[str, int]], start: int) -> tuple[list[tuple[str, int, int]], int]:
    placed = []
    for name, words in fields:
        placed.append((name, start, words))
        start += -(-max(words, 1) // _ALIGN) * _ALIGN
    return placed, start
