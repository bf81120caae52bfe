"""Copies the state of sequences that pass a multiple of ``cut`` tokens, as a run that stopped there would have left it.

All fields of a state are rings addressed by ``position mod places``. A step may have written rows past the boundary (drafts that
were or were not taken, the rest of a chunk), so of each ring the ``keep`` rows before the boundary are copied and every other
place is zeroed: the copy is a function of the tokens before the boundary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class ReplicaRing:
    """One field and its copy, ``[slots, places, ...]`` of one dtype, any strides; ``keep`` rows are needed before a boundary."""

    live: torch.Tensor
    replica: torch.Tensor
    keep: int


def save_replica(
    rings: Sequence[ReplicaRing], state_row: torch.Tensor, before: torch.Tensor, after: torch.Tensor, cut: int, reach: int
) -> None:
    """For ``c`` sequences in state slots ``state_row`` int64 ``[c]``; their settled lengths are integers ``[c]``.

    Where ``b``, the last multiple of ``cut`` not above ``after``, is above ``before`` and ``after - b ≤ reach`` (otherwise rows before
    ``b`` are overwritten), the ``keep`` rows before ``b`` go to the replica. Replicas of the others stay; slot 0 is null and may be
    written. Raises ``ValueError`` if a ring is too short for rows before a boundary to outlive ``reach`` rows after it.
    """
    for ring in rings:
        if ring.live.shape[1] < ring.keep + (reach if ring.keep else 0):
            raise ValueError(f"a ring of {ring.live.shape[1]} places cannot keep {ring.keep} rows while {reach} newer ones are written")
    boundary = torch.div(after, cut, rounding_mode="floor") * cut
    passes = (boundary > before) & (after - boundary <= reach)
    target = torch.where(passes, state_row, 0)
    held: dict[tuple[int, int], torch.Tensor] = {}
    for ring in rings:
        places, keep = ring.live.shape[1], ring.keep
        if (places, keep) not in held:
            place = torch.arange(places, device=state_row.device)
            newest = boundary.long()[:, None] - 1
            position = newest - (newest - place) % places  # of the newest row before the boundary at each place
            held[places, keep] = position >= (newest - keep + 1).clamp_min(0)
        kept = held[places, keep].view(-1, places, *([1] * (ring.live.dim() - 2)))
        rows = ring.live.index_select(0, state_row)
        ring.replica.index_copy_(0, target, torch.where(kept, rows, torch.zeros((), dtype=rows.dtype, device=rows.device)))
