"""What is known of one step from its launch to its wait.

Owns: the records. Never touches: the device, and what is done with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from deepinfer.models.base import ForwardBatch
from deepinfer.models.images import ImagePiece
from deepinfer.worker.device_queue import Ticket
from deepinfer.worker.input_batch import SampledRows
from deepinfer.worker.logprobs import HostLogprobs
from deepinfer.worker.model_drafts import Places
from deepinfer.worker.resolve import StepTokens
from deepinfer.worker.sampling_state import RowSampling
from deepinfer.worker.state_places import StateCounts
from deepinfer.worker.step_ring import Header, RingSlot


@dataclass(frozen=True)
class PromptLogprobs:
    """Log-probabilities of consecutive prompt tokens of one sequence, the first one at position ``start``."""

    index: int  # of the sequence in the step
    start: int
    values: HostLogprobs


@dataclass
class StepResult:
    """What a step leaves besides the tokens in its ring slot.

    Attributes:
        header: the step's counts.
        logprob_rows: sampling row of each row of ``logprobs``, int64.
        logprob_counts: most likely tokens wanted by each of these rows.
        logprobs: of the tokens drawn, or ``None``.
        prompt_logprobs: one entry per piece of a prompt computed in this step that wants them.
        swapped_bytes: moved between device and host memory for preempted sequences.
    """

    header: Header
    logprob_rows: NDArray[np.intp] = field(default_factory=lambda: np.empty(0, np.intp))
    logprob_counts: list[int] = field(default_factory=list)
    logprobs: HostLogprobs | None = None
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)
    swapped_bytes: int = 0


@dataclass(slots=True)
class Admitted:
    """A sequence given a state slot by a step, as the device half needs it."""

    slot: int
    row: RowSampling
    output: Sequence[int]
    flags: int


@dataclass(slots=True)
class PromptPiece:
    """Rows of a prompt whose log-probabilities are wanted: of ``targets``, each after the row it follows."""

    index: int
    first: int
    start: int
    targets: list[int]
    count: int


@dataclass
class ChosenRows:
    """Counts of sampling rows by need; the rows themselves are in the ring slot."""

    flags: int = 0
    edit: int = 0
    plain: int = 0
    ranked: int = 0
    logprobs: int = 0
    masks: int = 0
    max_top_k: int = 0
    longest: int = 1  # most sampling rows of a sequence

    def parts(self) -> dict[str, int]:
        """Ring field of each selection for the sampler, and its length."""
        return {"edit_rows": self.edit, "plain_rows": self.plain, "ranked_rows": self.ranked}


@dataclass(slots=True)
class GraphStep:
    """How a decode step is a graph's (`worker.decode_step`).

    Attributes:
        rows: its bucket.
        alone: the graph is all that the device has to do before tokens are drawn: nothing is moved, nobody is admitted.
        drawn: rows want more than their most likely token, which follows behind the graph.
    """

    rows: int
    alone: bool
    drawn: bool = False


class Step:
    """A launched step, from its first half to its wait."""

    def __init__(self, index: int, slot: RingSlot, before: Step | None) -> None:
        self.index, self.slot = index, slot
        self.header = Header.read(slot.a["header"])
        self.ticket = Ticket()
        self.result = StepResult(self.header)
        self.chosen = ChosenRows()
        self.admitted: list[Admitted] = []
        self.pieces: list[PromptPiece] = []
        self.images: Sequence[ImagePiece] = ()
        self.before = before  # until its tokens have been taken, so that steps do not chain
        self.before_ticket = None if before is None else before.ticket
        self.stored: bool = False  # its table deltas are written
        self.waited: bool = False
        self.follows = None if before is None or before.waited else before  # planned while that one was in flight
        self.counts: StateCounts | None = None  # of models with state
        self.graph: GraphStep | None = None  # of steps that are to be a graph's
        self.prompts: int = 0  # rows of the graph that a step with prompts is (`worker.prompt_step`); 0 = none
        self.replayed: bool = False  # of decode steps: it was: what it takes from the step before it was there
        self.drafting: Places | None = None  # of models that draft
        self.left: StepTokens | None = None  # what the next step may need, once sampled
        self.batch: ForwardBatch | None = None
        self.hidden: torch.Tensor | None = None
        self.sampled: SampledRows | None = None

    def __repr__(self) -> str:
        return f"Step({self.header.step}, ring slot {self.index})"
