"""What a request gives back.

Owns: the output records a user reads. Never touches: how they came to be (see `deepinfer.engine.output_processor`).
A leaf: any layer may import it. Everything here pickles.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "abort", "error", "so_failed"]


@dataclass(frozen=True, slots=True)
class Logprob:
    """Natural log-probability of one token at one position; ``rank`` 1 is the most likely token."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


PositionLogprobs = dict[int, Logprob]
"""Token id → log-probability at one position. The chosen token comes first; it appears once."""


@dataclass(slots=True)
class RequestMetrics:
    """Seconds of ``time.monotonic()`` at which things happened; 0.0 = not (yet)."""

    arrival_time: float = 0.0
    first_scheduled_time: float = 0.0
    first_token_time: float = 0.0
    finished_time: float = 0.0

    @property
    def time_in_queue(self) -> float | None:
        """Seconds between arrival and the first step that worked on the request."""
        return _span(self.arrival_time, self.first_scheduled_time)

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds between arrival and the first generated token."""
        return _span(self.arrival_time, self.first_token_time)

    @property
    def end_to_end(self) -> float | None:
        """Seconds between arrival and the end of the last answer."""
        return _span(self.arrival_time, self.finished_time)


def _span(start: float, end: float) -> float | None:
    return end - start if start and end else None


@dataclass(slots=True)
class CompletionOutput:
    """One answer.

    Attributes:
        index: which of the ``n`` answers, from 0.
        text: the text; empty with ``detokenize=False``.
        token_ids: generated ids, up to and including the one that ended the answer: an end-of-sequence or stop id, or
            the token that completed a stop string. Their number is what usage counts.
        cumulative_logprob: sum over ``token_ids``; ``None`` unless ``logprobs`` was asked for.
        logprobs: one entry per token id; ``None`` unless asked for.
        finish_reason: ``"stop"``, ``"length"``, ``"abort"``, ``"error"``, or ``"so_failed"``: the form that was asked for
            (``structured_outputs``) could not be held to any longer; ``None`` while it goes on.
        stop_reason: the stop string or stop id that ended it; ``None`` for the model's own end-of-sequence ids.
        error: message when ``finish_reason`` is ``"error"`` or ``"so_failed"``.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[PositionLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: str | None = None

    @property
    def finished(self) -> bool:
        """Whether this answer is complete."""
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """All answers to one prompt.

    Attributes:
        request_id: the id it was submitted under.
        prompt: prompt text; ``None`` when ids were given.
        prompt_token_ids: ids the model saw, after truncation.
        prompt_logprobs: one entry per prompt position, ``None`` for the first; ``None`` unless asked for.
        outputs: the answers, by index. In delta mode only those with news, holding only what is new.
        finished: whether every answer is complete.
        num_cached_tokens: prompt tokens whose keys and values came from the prefix cache; of several answers, for the first one.
        num_reruns: how often an answer was made again from its prompt, because a process of a prefill-decode pair had ended; the
            tokens are the same.
        metrics: when things happened.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    num_cached_tokens: int = 0
    num_reruns: int = 0
    metrics: RequestMetrics = field(default_factory=RequestMetrics)

    def __repr__(self) -> str:
        shown = self.prompt if self.prompt is None or len(self.prompt) <= 60 else self.prompt[:57] + "..."
        return (
            f"RequestOutput(request_id={self.request_id!r}, prompt={shown!r}, prompt_tokens={len(self.prompt_token_ids)}, "
            f"cached={self.num_cached_tokens}, finished={self.finished}, outputs={self.outputs!r})"
        )
