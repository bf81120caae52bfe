"""Drafts that a model makes itself: kept on the device from the step that made them to the step that verifies them.

Owns: the drafts of every state slot, whose they are, and which of a step's draft rows run when not all are paid for. Never touches: how
drafts are made (the model), what counts as right (`verify`), how many are worth their time (the budget, a number of the host's).

A step has draft rows for every decoding sequence before anybody knows their ids: row ``j`` (from 1) behind a sequence's first row carries
``-(1 + j)``. Drafts belong to positions, so a row takes one only if it was made for exactly that position of the sequence that has the
slot now; otherwise some token stands there, which is as good as a wrong guess: it costs a row and counts only if it is what was drawn.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from deepinfer.worker.resolve import StepRows, owner
from deepinfer.worker.verify_lengths import verify_lengths

_UNKNOWN = 0
"""Token of a draft row without a draft."""


@dataclass(frozen=True)
class Chosen:
    """Which rows of a step run; tensors on the device. "Planned" rows are those of the ring, ``T`` of them.

    Attributes:
        runs: bool ``[T]``.
        rows: int64 ``[T']``, planned row of each row that runs, ascending.
        place: int64 ``[T]``, where a planned row runs, of one that does not that of a row before it.
        lengths: int64 ``[d]``, drafts of each decoding sequence that run.
        cuts: int32 ``[n]``, rows of each sequence that do not.
        cu_q: int32 ``[n + 1]`` over the rows that run.
    """

    runs: torch.Tensor
    rows: torch.Tensor
    place: torch.Tensor
    lengths: torch.Tensor
    cuts: torch.Tensor
    cu_q: torch.Tensor


class DraftTable:
    """Newest drafts by state slot, on the device.

    Args:
        slots: state slots, the null slot included.
        count: most drafts of a sequence.
        temperatures: what the confidence logit of each draft is divided by; empty = 1.
        device: where it lives.
    """

    def __init__(self, slots: int, count: int, temperatures: tuple[float, ...], device: torch.device) -> None:
        self.count = count
        self._ids = torch.zeros((slots, count), dtype=torch.int64, device=device)
        self._likely = torch.zeros((slots, count), dtype=torch.float32, device=device)
        self._first = torch.full((slots,), -1, dtype=torch.int64, device=device)  # position of the first one, −1 = there are none
        self._temperatures = torch.tensor(temperatures or (1.0,) * count, dtype=torch.float32, device=device)

    def forget(self, slots: torch.Tensor) -> None:
        """Slots (int64 ``[m]``) that were given to other sequences."""
        self._first.index_fill_(0, slots, -1)

    def put(self, slots: torch.Tensor, position: torch.Tensor, ids: torch.Tensor, confidence: torch.Tensor) -> None:
        """Keeps drafts ``ids`` int64 ``[m, k]`` for positions from ``position`` int64 ``[m]`` on, with the logits ``[m, k]`` of being
        right."""
        self._ids.index_copy_(0, slots, ids)
        self._likely.index_copy_(0, slots, torch.sigmoid(confidence.float() / self._temperatures))
        self._first.index_copy_(0, slots, position)

    def fill(self, ids: torch.Tensor, pos: torch.Tensor, slot: torch.Tensor) -> torch.Tensor:
        """``ids`` integer ``[T]`` with drafts in place of their placeholders; ``pos`` int64 ``[T]``, ``slot`` int64 ``[T]`` of each row."""
        nth = -2 - ids.long()
        wanted = nth >= 0
        nth = nth.clamp(0, self.count - 1)
        found = torch.where(self._first[slot] + nth == pos, self._ids[slot, nth], _UNKNOWN)
        return torch.where(wanted, found.to(ids.dtype), ids)

    def choose(self, rows: StepRows, cu_q: torch.Tensor, state_row: torch.Tensor, decodes: int, cut: int) -> Chosen:
        """Leaves out ``cut`` draft rows, those least likely to make a token.

        ``rows`` are resolved and have their drafts; ``cu_q`` int32 ``[n + 1]``, ``state_row`` int64 ``[n]``; the first ``decodes``
        sequences may have draft rows. What is chosen depends on no draft's own probability (see `verify_lengths`).
        """
        planned = rows.ids.shape[0]
        starts = cu_q[:decodes].long()
        drafted = (cu_q[1 : decodes + 1] - cu_q[:decodes]).long() - 1
        slots = state_row[:decodes]
        made = self._first[slots] == rows.pos.index_select(0, starts) + 1
        likely = torch.where(made[:, None], self._likely[slots], 0.0)
        budget = (drafted.sum() - cut).clamp(min=0)
        lengths = verify_lengths(likely, drafted, budget).lengths
        cuts = torch.zeros_like(state_row)
        cuts[:decodes] = drafted - lengths
        shift = torch.cat([cuts.new_zeros(1), cuts.cumsum(0)])
        row = torch.arange(planned, device=cu_q.device)
        mine = owner(cu_q, planned)
        last = cu_q[1:].long() - cuts  # behind the last row that runs
        runs = row < last[mine]
        upto = runs.long().cumsum(0)
        chosen = torch.searchsorted(upto, torch.arange(1, planned - cut + 1, device=cu_q.device))
        return Chosen(runs, chosen, (upto - 1).clamp(min=0), lengths, cuts.int(), (cu_q - shift).int())
