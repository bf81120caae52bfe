"""What the host knows of each state slot, and what a step says of it.

A sequence's window rows may begin later than position 0: at its start when it began without state, and in the decoder where the
prefill of a prompt is truncated. These positions never change while a sequence lives and follow its state to other slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from deepinfer.models.base import StateRows
from deepinfer.worker.step_ring import Header, RingSlot


@dataclass(frozen=True)
class StateRules:
    """How a model's state is to be run.

    Args:
        cut: boundaries at which it is copied, in tokens; 0 = never.
        max_draft: by how much positions may fall once the preceding step's drafts are known.
        keep_tokens: last tokens of a prompt whose decoder rows are whole; ``None`` = all.
        compact: whether the others are left out of the decoder, else they are masked.
        history: token ids before a start without state that the model wants told.
    """

    cut: int = 0
    max_draft: int = 0
    keep_tokens: int | None = None
    compact: bool = False
    history: int = 0


_FLOOR, _DECODER_FLOOR, _DECODER_FROM = range(3)


class StatePlaces:
    """Host side of the state slots.

    Args:
        rules: see there.
        slots, host_slots: device and host state slots, the null slots included.
        max_seqs, max_rows: sequences and rows of a step.
    """

    def __init__(self, rules: StateRules, slots: int, host_slots: int, max_seqs: int, max_rows: int) -> None:
        self._rules = rules
        self._known = np.zeros((slots, 3), np.int32)
        self._swapped = np.zeros((host_slots, 3), np.int32)
        self.fields = [
            ("state_floor", 2 * max_seqs),
            ("decoder_from", max_seqs),
            ("crossing", max_seqs),
            ("decoder_rows", max_rows),
            ("decoder_cu_q", max_seqs + 1),
            ("begun", max_seqs * (2 + rules.history)),
        ]
        self._begun: list[list[int]] = []

    # One step's commands in the device's order: states out, admissions, states in and clones

    def move_out(self, slot: RingSlot, header: Header) -> None:
        """States that leave their slots, before others are admitted to them."""
        if header.swap_out_states:
            source, host = slot.a["swap_out_states"][: 2 * header.swap_out_states].reshape(-1, 2).T
            self._swapped[host] = self._known[source]

    def admit(self, slot: int, prompt_tokens: int, encoder_floor: int = 0, decoder_floor: int = 0) -> None:
        """A sequence was given a slot; its window rows begin at these positions."""
        keep = self._rules.keep_tokens
        self._known[slot] = (encoder_floor, decoder_floor, 0 if keep is None else max(0, prompt_tokens - keep))

    def begin(self, slot: int, start: int, before: Sequence[int]) -> None:
        """A sequence that was given a slot begins at ``start`` without state; ``before``: its newest tokens below, oldest first."""
        if self._rules.history:
            known = list(before)[-self._rules.history :]
            self._begun.append([slot, start, *[-1] * (self._rules.history - len(known)), *known])

    def move_in(self, slot: RingSlot, header: Header) -> None:
        """States brought back, and those of forks."""
        a = slot.a
        if header.swap_in_states:
            host, target = a["swap_in_states"][: 2 * header.swap_in_states].reshape(-1, 2).T
            self._known[target] = self._swapped[host]
        if header.state_clones:
            source, target = a["clone_states"][: 2 * header.state_clones].reshape(-1, 2).T
            self._known[target] = self._known[source]

    def describe(self, slot: RingSlot, header: Header) -> StateCounts:
        """Fills the step's own fields; see :class:`~deepinfer.models.base.StateRows`."""
        a, n, rows = slot.a, header.seqs, header.rows
        known = self._known[a["state_row"][:n]]
        a["state_floor"][: 2 * n].reshape(n, 2)[:] = known[:, (_FLOOR, _DECODER_FLOOR)]
        a["decoder_from"][:n] = known[:, _DECODER_FROM]
        count = self._crossing(a, n, header)
        begun, self._begun = self._begun, []
        if begun:
            words = np.asarray(begun, np.int32)
            a["begun"][: words.size] = words.reshape(-1)
        if not self._rules.compact or not known[:, _DECODER_FROM].any():
            return StateCounts(count, begun=len(begun))
        cu_q = a["cu_q"][: n + 1]
        runs = a["pos"][:rows] >= np.repeat(known[:, _DECODER_FROM], np.diff(cu_q))
        chosen = np.flatnonzero(runs)
        if len(chosen) == rows:
            return StateCounts(count, begun=len(begun))
        a["decoder_rows"][: len(chosen)] = chosen
        a["decoder_cu_q"][: n + 1] = np.searchsorted(chosen, cu_q)
        return StateCounts(count, len(chosen), len(begun))

    def _crossing(self, a: dict[str, NDArray[np.int32]], n: int, header: Header) -> int:
        cut = self._rules.cut
        if not cut:
            return 0
        end = a["seq_len"][:n]
        start = end - np.diff(a["cu_q"][: n + 1]) - (self._rules.max_draft if header.unresolved else 0)
        chosen = np.flatnonzero(end // cut > np.maximum(start, 0) // cut)
        a["crossing"][: len(chosen)] = chosen
        return len(chosen)


@dataclass(frozen=True)
class StateCounts:
    """Lengths of a step's own fields; ``decoder_rows`` ``None`` = the decoder runs all rows."""

    crossing: int = 0
    decoder_rows: int | None = None
    begun: int = 0


def state_rows(
    slot: RingSlot, header: Header, counts: StateCounts, row_seq: torch.Tensor, cut: int = 0, cu_q: torch.Tensor | None = None
) -> StateRows:
    """The device's view of what :meth:`StatePlaces.describe` wrote, once the slot has been uploaded.

    ``cut``: draft rows that do not run, with ``cu_q`` over those that do. Rows the decoder leaves out belong to prompts, which come
    behind all draft rows, and drafts are never left out.
    """
    d, n, chosen = slot.d, header.seqs, counts.decoder_rows
    begun = None
    if counts.begun:
        width = len(slot.a["begun"]) // len(slot.a["crossing"])
        begun = d["begun"][: counts.begun * width].view(-1, width).long()
    decoder_rows = decoder_cu_q = None
    if chosen is not None:
        decoder_rows, decoder_cu_q = d["decoder_rows"][:chosen].long(), d["decoder_cu_q"][: n + 1]
        if cut and cu_q is not None:
            place = torch.arange(chosen - cut, device=row_seq.device)
            decoding = place < decoder_cu_q[header.decodes] - cut
            decoder_rows = torch.where(decoding, place, decoder_rows[cut:] - cut)
            decoder_cu_q = decoder_cu_q - (d["cu_q"][: n + 1] - cu_q)
    return StateRows(
        row_seq=row_seq,
        state_row=d["state_row"][:n].long(),
        floor=d["state_floor"][: 2 * n].view(n, 2),
        decoder_from=d["decoder_from"][:n],
        crossing=d["crossing"][: counts.crossing].long(),
        decoder_rows=decoder_rows,
        decoder_cu_q=decoder_cu_q,
        begun=begun,
    )
