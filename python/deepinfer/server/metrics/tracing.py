"""A span for each call that reached the engine, with OpenTelemetry's names for generative AI.

Owns: which attributes a span has, and where spans go. Never touches: what a request says: prompts, answers, stop strings and ids of
users are never in a span.

Needs the extra ``deepinfer[otel]``. A span is made when its call is over, out of what is then known, so that a request costs nothing
while it runs; ``traceparent`` of the client is its parent.
"""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from deepinfer.errors import ConfigError
from deepinfer.server.records import CLIENT_LEFT, CallRecord, PromptRecord

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer, TracerProvider

OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/v1/completions": "text_completion",
}
"""Routes that are traced, and what they are called."""

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")

Attribute = str | bool | int | float | list[str]


class Tracing:
    """Makes spans.

    Args:
        provider: whose spans they are.
        model: the name under which the model is served.
    """

    def __init__(self, provider: TracerProvider, model: str) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer: Tracer = provider.get_tracer("deepinfer.server")
        self._parent = TraceContextTextMapPropagator()
        self._model = model

    def observe(self, record: CallRecord) -> None:
        """Makes the span of a call that is over."""
        operation = OPERATIONS.get(record.route)
        if operation is None:
            return
        from opentelemetry.trace import SpanKind, Status, StatusCode

        ended = time.time_ns()
        parent = self._parent.extract({"traceparent": record.traceparent} if record.traceparent else {})
        span = self._tracer.start_span(
            f"{operation} {self._model}",
            context=parent,
            kind=SpanKind.SERVER,
            start_time=ended - round((record.ended - record.started) * 1e9),
            attributes=dict(attributes(record, operation, self._model)),
        )
        if record.status >= 500 or record.code == "step_failed":
            span.set_status(Status(StatusCode.ERROR))
        span.end(ended)

    def close(self) -> None:
        """Sends what is still to be sent."""
        shutdown = getattr(self._provider, "shutdown", None)
        if shutdown is not None:
            shutdown()


def attributes(record: CallRecord, operation: str, model: str) -> Iterator[tuple[str, Attribute]]:
    """Everything that a span says."""
    yield "gen_ai.operation.name", operation
    yield "gen_ai.provider.name", "deepinfer"
    yield "gen_ai.request.model", model
    yield "gen_ai.response.model", model
    yield "gen_ai.response.id", record.request_id
    yield "gen_ai.request.id", record.request_id
    yield "gen_ai.request.stream", record.stream
    yield "http.request.method", record.method
    yield "http.route", record.route
    yield "http.response.status_code", record.status
    if record.status >= 400:
        yield "error.type", record.code or ("client_left" if record.status == CLIENT_LEFT else str(record.status))
    if record.tenant:
        yield "deepinfer.tenant", record.tenant
    if record.prompts:
        yield from _request(record.prompts)
        yield from _usage(record.prompts)
        yield from _latency(record)


def _request(prompts: list[PromptRecord]) -> Iterator[tuple[str, Attribute]]:
    p = prompts[0].params
    yield "gen_ai.request.choice.count", p.n
    yield "gen_ai.request.temperature", p.temperature
    yield "gen_ai.request.top_p", p.top_p
    yield "gen_ai.request.top_k", p.top_k
    yield "gen_ai.request.frequency_penalty", p.frequency_penalty
    yield "gen_ai.request.presence_penalty", p.presence_penalty
    if p.max_tokens is not None:
        yield "gen_ai.request.max_tokens", p.max_tokens
    if p.seed is not None:
        yield "gen_ai.request.seed", p.seed


def _usage(prompts: list[PromptRecord]) -> Iterator[tuple[str, Attribute]]:
    yield "gen_ai.usage.input_tokens", sum(p.prompt_tokens for p in prompts)
    yield "gen_ai.usage.output_tokens", sum(p.completion_tokens for p in prompts)
    yield "gen_ai.usage.cache_read.input_tokens", sum(p.cached_tokens for p in prompts)
    yield "gen_ai.usage.num_sequences", sum(p.params.n for p in prompts)
    yield "gen_ai.response.finish_reasons", [reason for p in prompts for reason in p.finish_reasons]


def _latency(record: CallRecord) -> Iterator[tuple[str, Attribute]]:
    """Of the prompt that was first to have a token."""
    begun = [p.metrics for p in record.prompts if p.metrics.first_token_time]
    yield "gen_ai.latency.e2e", record.ended - record.started
    if not begun:
        return
    first = min(begun, key=lambda m: m.first_token_time)
    yield "gen_ai.latency.time_to_first_token", max(0.0, first.first_token_time - record.started)
    if first.time_in_queue is not None:
        yield "gen_ai.latency.time_in_queue", first.time_in_queue
        yield "gen_ai.latency.time_in_model_prefill", max(0.0, first.first_token_time - first.first_scheduled_time)
    if record.stream and record.first_byte:
        yield "gen_ai.response.time_to_first_chunk", max(0.0, record.first_byte - record.started)
    last = max(m.finished_time for m in begun)
    if last:
        yield "gen_ai.latency.time_in_model_decode", max(0.0, last - first.first_token_time)


def provider(endpoint: str | None, environment: Mapping[str, str] = os.environ) -> TracerProvider | None:
    """Where spans go: to ``endpoint`` or those that OpenTelemetry's variables name, else to a provider that the process has been given
    (``opentelemetry-instrument``), else nowhere.

    Raises:
        ConfigError: an endpoint is named and the SDK is not installed.
    """
    named = endpoint is not None or any(environment.get(name) for name in _ENDPOINTS)
    if environment.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    if importlib.util.find_spec("opentelemetry") is None or importlib.util.find_spec("opentelemetry.trace") is None:
        if endpoint is not None:
            raise ConfigError("--otlp-traces-endpoint needs OpenTelemetry's SDK; install it with: pip install 'deepinfer[otel]'")
        return None
    from opentelemetry import trace

    given = trace.get_tracer_provider()
    if not isinstance(given, trace.ProxyTracerProvider):
        return given
    return _exporting(endpoint) if named else None


def _exporting(endpoint: str | None) -> TracerProvider:
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider as SdkProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        raise ConfigError("traces need OpenTelemetry's SDK and exporter; install them with: pip install 'deepinfer[otel]'") from None
    made = SdkProvider(resource=Resource.create({"service.name": os.environ.get("OTEL_SERVICE_NAME", "deepinfer")}))
    made.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    return made


def tracing(endpoint: str | None, model: str) -> Tracing | None:
    """The spans of a server, or ``None`` where there is nowhere for them to go. Raises ConfigError as :func:`provider` does."""
    found = provider(endpoint)
    return None if found is None else Tracing(found, model)
