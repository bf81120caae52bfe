"""What crosses the line between text and engine: a request of ids going in, deltas of ids coming out.

Owns: the two records, their small parts, and the surface of an engine that text needs. Never touches: text, tensors, processes.
Everything here pickles, so that the engine may live in another process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from deepinfer.errors import DeepInferError, ErrorData
from deepinfer.models.images import ImageSpan
from deepinfer.outputs import FinishReason
from deepinfer.sampling import SamplingParams
from deepinfer.worker.grammar import Grammar

if TYPE_CHECKING:
    from deepinfer import _core
    from deepinfer.engine.step_log import EngineMetrics


class TokenLogprobs(NamedTuple):
    """Log-probabilities at one position: the token itself first, then the most likely ones in falling order.

    ``ids`` int32 [1 + k], ``values`` float32 [1 + k]; ``rank`` of the first entry, 1 = most likely. The chosen token may
    appear again among the most likely ones, with the identical value.
    """

    ids: NDArray[np.int32]
    values: NDArray[np.float32]
    rank: int


@dataclass(slots=True)
class Timing:
    """Seconds of ``time.monotonic()``; 0.0 = has not happened."""

    arrival: float = 0.0
    scheduled: float = 0.0
    first_token: float = 0.0
    last_token: float = 0.0


@dataclass(slots=True)
class EngineRequest:
    """One prompt for the engine; values are already checked, merged with the model's defaults and tokenised.

    Attributes:
        request_id: unique among unfinished requests.
        prompt_ids: at least one id, all within the vocabulary.
        params: sampling values; ``params.max_tokens`` is not to be read here, see ``max_new``.
        max_new: most tokens to generate; ``len(prompt_ids) + max_new <= max_model_len``.
        eos_ids: the model's end-of-sequence ids, which end a sequence unless ``params.ignore_eos``.
        seeds: one per answer (``params.n``), each in ``[0, 2**63)``, so that an int64 tensor holds it.
        bad_word_ids: token sequences that must not be completed; of each, the last id is masked when the rest precedes it.
        stream: send a delta per step. Requests with stop strings are streamed too, whoever reads them.
        salt: tenant salt of the prefix chain.
        priority: smaller is served first.
        order: place among requests of one priority, smaller first: a request that is made again keeps that of its first run. 0 = behind
            all that the engine has seen.
        arrival: ``time.monotonic()`` of submission.
        images: of the prompt, in order; their positions have the model's image token.
        grammar: makes the matcher of one answer; called once for each. Must pickle if the engine lives in another process. What was asked
            for (``params.structured_outputs``) has been compiled by then, and is left out of ``params``.
    """

    request_id: str
    prompt_ids: list[int]
    params: SamplingParams
    max_new: int
    eos_ids: tuple[int, ...] = ()
    seeds: tuple[int, ...] = (0,)
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    stream: bool = False
    salt: bytes = b""
    priority: int = 0
    order: int = 0
    arrival: float = 0.0
    images: tuple[ImageSpan, ...] = ()
    grammar: Callable[[], Grammar] | None = None


@dataclass(slots=True)
class SequenceDelta:
    """News of one answer of one request since its last delta.

    A request with ``stream=False`` gets exactly one delta per answer, at its end. The token that ended a sequence (an
    end-of-sequence or stop id) is the last of ``new_token_ids``. Nothing follows a delta with a ``finish_reason``.

    Attributes:
        index: which of the ``n`` answers.
        new_token_ids: ids since the last delta, possibly empty.
        logprobs: one entry per new token when ``params.logprobs`` is set.
        prompt_logprobs: with the first delta of answer 0 when ``params.prompt_logprobs`` is set: one entry per prompt
            position, ``None`` for the first.
        cached_tokens: prompt tokens that came from the prefix cache at the first admission.
        cut: ``finish_reason`` is ``"stop"``, and no token ended the answer: its grammar was complete and allowed no other.
        error: message when ``finish_reason`` is ``"error"`` or ``"so_failed"``; ``error_kind``: its class in `deepinfer.errors`, where
            it has one.
        handover: of a prompt engine, with its only delta: the record under which another engine goes on
            (see `deepinfer.kvcache.handover`). Nothing follows it here.
    """

    request_id: str
    index: int
    new_token_ids: list[int]
    finish_reason: FinishReason | None = None
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    cached_tokens: int = 0
    timing: Timing = field(default_factory=Timing)
    cut: bool = False
    error: str | None = None
    error_kind: str | None = None
    handover: bytes | None = None

    def failed(self, error: DeepInferError) -> SequenceDelta:
        """The answer's end with an error, after what was told before this delta."""
        data = ErrorData.of(error)
        return SequenceDelta(self.request_id, self.index, [], "error", timing=self.timing, error=data.message, error_kind=data.kind)


class EngineLike(Protocol):
    """The part of an engine that text needs; `deepinfer.engine.engine.Engine` is the one in use."""

    max_model_len: int
    vocab_size: int

    def add_request(self, request: EngineRequest) -> None:
        """Queues a request. Raises InvalidRequestError if it could never run; nothing else is disturbed."""

    def step(self) -> list[SequenceDelta]:
        """Runs one step; an empty list when there is nothing to tell."""

    def abort(self, request_id: str) -> None:
        """Ends all answers of a request; no more deltas of it follow. Unknown and finished ids are ignored."""

    def stop_at(self, request_id: str, index: int, num_tokens: int) -> None:
        """Ends one answer after its first ``num_tokens`` tokens; the caller drops whatever delta still follows."""

    def has_unfinished(self) -> bool:
        """Whether a step could make progress."""

    def rest(self) -> tuple[int, float] | None:
        """After a step with nothing to do: a descriptor that becomes readable when there is, and the seconds after which to step
        anyway. ``None``: step on."""

    def take_over(self, record: bytes, grammar: Callable[[], Grammar] | None = None) -> None:
        """Goes on with a request that a prompt engine handed over. Raises as ``add_request`` does, or HandoverError."""

    def wake(self) -> None:
        """Of a rank of a group: another one has got work. Others have nothing to do."""

    def core_counts(self) -> _core.Counts:
        """Blocks and state slots by state."""

    def metrics(self) -> EngineMetrics:
        """Everything that is counted, at this moment; cheap, and without waiting for the device."""

    def logits(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """Logits float32 ``[len(token_ids), vocab_size]`` of every position in one forward, outside the running batch."""

    def close(self) -> None:
        """Releases everything; idempotent."""
