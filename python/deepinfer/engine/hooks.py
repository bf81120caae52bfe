"""Where an engine can be extended: methods with empty defaults, called once for each event.

Owns: the names, what they are told, and when they come. Never touches: what an engine does by itself, which does not depend on them.
Derive from `Engine` and override. A hook runs on the step thread, so it must not wait. One that raises within a step fails that step;
one that raises during a hand-over fails that request; for the store it costs what was to be saved.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

StartKind = Literal["nothing", "whole", "slice", "rerun"]
NOTHING = slice(0, 0)
"""Of a state row: not a byte."""

START_KINDS: tuple[StartKind, ...] = ("nothing", "whole", "slice", "rerun")  # by the word in `admitted`


@dataclass(frozen=True, slots=True)
class KvSave:
    """A sequence whose keys, values and state are about to be read; as a ``slice``, its state alone as it stood at a boundary; for the
    ``store``, full blocks of it.

    Attributes:
        request_id: whose it is.
        seq: the core's handle.
        tokens: positions whose KV is valid.
        blocks: int32 ids of the blocks that hold them, first block first.
        state_slot: row of its state; 0 for the store.
        what: ``handover``; ``slice``: ``tokens`` is the boundary and ``blocks`` is empty; ``store``: ``blocks`` are the last ones of the
            first ``tokens`` positions, which the KV store lacks. In the latter two the sequence may have ended.
        key: of a slice, and for the store, the chain hash of the block that ends there, 16 bytes.
    """

    request_id: str
    seq: int
    tokens: int
    blocks: NDArray[np.int32]
    state_slot: int
    what: Literal["handover", "slice", "store"] = "handover"
    key: bytes = b""


@dataclass(frozen=True, slots=True)
class Admission:
    """A sequence that enters a step with positions in place already: from the index, a fork's parent, a swap or another engine.

    Attributes:
        request_id: whose it is.
        seq: the core's handle.
        state_slot: row of its state, of the block table and of its sampling values.
        tokens: leading positions that this step does not compute.
        hit: of models with windows, leading positions whose KV is in place: from ``tokens`` to there rows read it and write none.
        kind: what the state of such a model has at ``tokens``: ``whole``; ``slice``: the encoder's windows, once
            this hook has given them; ``rerun``: none.
        key: of a ``slice``, the chain hash of its boundary, 16 bytes.
    """

    request_id: str
    seq: int
    state_slot: int
    tokens: int
    hit: int
    kind: StartKind
    key: bytes = b""


class EngineHooks:
    """The hooks of `Engine`, each doing nothing."""

    def init_pd_split(self) -> None:
        """Once, at the end of construction; the engine's role is known."""

    def post_schedule(self, slot: int) -> None:
        """A step has been planned into ring slot ``slot``; nothing of it has been launched."""

    def load_state_from_store_to_prefill_cache(self, admission: Admission) -> bytes | None:
        """A sequence begins or resumes with positions in place. Page and state commands of the step are queued, its forward is not.

        Where it begins at a ``slice``: the slice's bytes, or ``None`` = those that the engine's tier has under ``admission.key``. If
        there are none either, the sequence is admitted again without them. Otherwise what is given is not looked at.
        """
        return None

    def pe_prepare_save_kvcache(self, save: KvSave) -> None:
        """A prompt engine's sequence is done there and will be handed over; nothing of its KV has been read.

        Also where blocks that prompts and requests have filled are about to be copied for the KV store (``save.what``).
        """

    def select_state_slice_to_store(self, save: KvSave) -> slice | None:
        """For models with state, in the same hand-over: which bytes of a state row go along; ``None`` = all. The rest arrives as zeros.

        Also where a slice of a state is to be kept (``save.what``), at the last boundary of a prompt and when a request ends: ``None``
        keeps it, `NOTHING` does not. What a slice is, is the model's to say: the stored region of its state.
        """
        return None

    def do_save_kvcache(self, save: KvSave) -> None:
        """In the same hand-over: the KV is being read; blocks and slot stay as they are until the hand-over has ended.

        For the store: the copy is queued, or waits for room.
        """
