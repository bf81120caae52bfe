"""What is known of one call when it is over: for logs, metrics and traces.

Owns: the record. Never touches: how it is counted or shown. A request's text is never in it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from deepinfer.outputs import FinishReason, RequestMetrics
from deepinfer.sampling import SamplingParams

CLIENT_LEFT = 499
"""Status of a call whose client went away; never sent."""


@dataclass(slots=True)
class PromptRecord:
    """One prompt that the engine took in; ``finish_reasons`` of its answers that ended; ``last_token``: when each answer of a stream had
    its newest, in seconds of ``time.monotonic()``."""

    params: SamplingParams
    prompt_tokens: int
    cached_tokens: int = 0
    completion_tokens: int = 0
    finish_reasons: list[FinishReason] = field(default_factory=list)
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
    last_token: dict[int, float] = field(default_factory=dict)


@dataclass(slots=True)
class CallRecord:
    """One HTTP request.

    Attributes:
        route: path as in the table of routes, never as the client wrote it.
        status: as sent; CLIENT_LEFT where nobody was there to read it.
        code: short name of the error, if it ended with one.
        traceparent: header of that name, for traces.
        started, first_byte, ended: ``time.monotonic()``; 0.0 = has not happened.
    """

    method: str
    route: str
    request_id: str
    tenant: str = ""
    model: str = ""
    stream: bool = False
    status: int = 0
    code: str | None = None
    traceparent: str | None = None
    started: float = 0.0
    first_byte: float = 0.0
    ended: float = 0.0
    prompts: list[PromptRecord] = field(default_factory=list)
