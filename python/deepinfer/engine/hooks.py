"""Where an engine can be extended: methods with empty defaults, called once for each event.

Owns: the names, what they are told, and when they come. Never touches: what an engine does by itself, which does not depend on them.
Derive from `Engine` and override. A hook runs on the step thread, so it must not wait. One that raises within a step fails that step;
one that raises during a hand-over fails that request.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

StartKind = Literal["nothing", "whole", "slice", "rerun"]
START_KINDS: tuple[StartKind, ...] = ("nothing", "whole", "slice", "rerun")  # by the word in `admitted`


@dataclass(frozen=True, slots=True)
class KvSave:
    """A sequence whose keys, values and state are about to be read.

    Attributes:
        request_id: whose it is.
        seq: the core's handle.
        tokens: positions whose KV is valid.
        blocks: int32 ids of the blocks that hold them, first block first.
        state_slot: row of its state.
    """

    request_id: str
    seq: int
    tokens: int
    blocks: NDArray[np.int32]
    state_slot: int


@dataclass(frozen=True, slots=True)
class Admission:
    """A sequence that enters a step with positions in place already: from the index, a fork's parent, a swap or another engine.

    Attributes:
        request_id: whose it is.
        seq: the core's handle.
        state_slot: row of its state, of the block table and of its sampling values.
        tokens: leading positions that this step does not compute.
        hit: of models with windows, leading positions whose KV is in place: from ``tokens`` to there rows read it and write none.
        kind: what the state of such a model has at ``tokens``: ``whole``; ``slice``: the encoder's windows are this hook's to put into
            the row; ``rerun``: none.
    """

    request_id: str
    seq: int
    state_slot: int
    tokens: int
    hit: int
    kind: StartKind


class EngineHooks:
    """The hooks of `Engine`, each doing nothing."""

    def init_pd_split(self) -> None:
        """Once, at the end of construction; the engine's role is known."""

    def post_schedule(self, slot: int) -> None:
        """A step has been planned into ring slot ``slot``; nothing of it has been launched."""

    def load_state_from_store_to_prefill_cache(self, admission: Admission) -> None:
        """A sequence begins or resumes with positions in place. Page and state commands of the step are queued, its forward is not."""

    def pe_prepare_save_kvcache(self, save: KvSave) -> None:
        """A prompt engine's sequence is done there and will be handed over; nothing of its KV has been read."""

    def select_state_slice_to_store(self, save: KvSave) -> slice | None:
        """For models with state, in the same hand-over: which bytes of a state row go along; ``None`` = all. The rest arrives as zeros."""
        return None

    def do_save_kvcache(self, save: KvSave) -> None:
        """In the same hand-over: the KV is being read; blocks and slot stay as they are until the hand-over has ended."""
