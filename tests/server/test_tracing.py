"""Spans of calls: what they say, whose children they are, and what is never in them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from deepinfer.errors import ConfigError
from deepinfer.server.metrics import tracing
from deepinfer.server.metrics.tracing import Tracing, provider
from deepinfer.server.settings import ServerSettings
from server_kit import App, scripted

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
BODY = {
    "model": "m",
    "prompt": "a secret",
    "max_tokens": 8,
    "temperature": 0.5,
    "top_p": 0.9,
    "seed": 7,
    "stop": ["secret"],
    "user": "secret",
}


@pytest.fixture
def spans() -> Iterator[InMemorySpanExporter]:
    """Where the spans of :func:`traced` applications go."""
    yield InMemorySpanExporter()


def traced(app: App, spans: InMemorySpanExporter) -> None:
    made = TracerProvider()
    made.add_span_processor(SimpleSpanProcessor(spans))
    app.state.observers.append(Tracing(made, "m").observe)


def only(spans: InMemorySpanExporter) -> ReadableSpan:
    (span,) = spans.get_finished_spans()
    return span


def test_a_span_says_what_was_asked_used_and_how_long_it_took(spans: InMemorySpanExporter) -> None:
    async def call() -> None:
        async with scripted(ServerSettings(served_model_name=("m",))) as app:
            traced(app, spans)
            exchange = app.send("POST", "/v1/completions", BODY, headers={"traceparent": PARENT, "x-request-id": "mine"})
            request_id = await app.front.only()
            app.front.feed(request_id, app.front.ids("hello"), "length")
            assert (await exchange.done()).status == 200
            prompt = len(app.front.submitted[request_id].prompt_ids)
            await app.send("GET", "/health").done()
            span = only(spans)
            assert span.name == "text_completion m" and span.kind is trace.SpanKind.SERVER
            assert span.parent is not None and span.context is not None
            assert f"{span.context.trace_id:032x}" == PARENT.split("-")[1] and f"{span.parent.span_id:016x}" == PARENT.split("-")[2]
            wanted = {
                "gen_ai.operation.name": "text_completion",
                "gen_ai.provider.name": "deepinfer",
                "gen_ai.request.model": "m",
                "gen_ai.request.max_tokens": 8,
                "gen_ai.request.temperature": 0.5,
                "gen_ai.request.top_p": 0.9,
                "gen_ai.request.seed": 7,
                "gen_ai.request.choice.count": 1,
                "gen_ai.response.id": "mine",
                "gen_ai.response.finish_reasons": ("length",),
                "gen_ai.usage.input_tokens": prompt,
                "gen_ai.usage.output_tokens": len(app.front.ids("hello")),
                "gen_ai.usage.cache_read.input_tokens": 0,
                "http.response.status_code": 200,
                "http.route": "/v1/completions",
            }
            assert span.attributes is not None
            assert {key: span.attributes.get(key) for key in wanted} == wanted
            assert "secret" not in repr(dict(span.attributes)) + span.name + repr(span.events)
            assert span.start_time is not None and span.end_time is not None
            took = (span.end_time - span.start_time) / 1e9
            assert took == pytest.approx(span.attributes["gen_ai.latency.e2e"], abs=1e-3)
            assert span.status.status_code is trace.StatusCode.UNSET

    asyncio.run(call())


@pytest.mark.parametrize(
    ("fault", "status", "kind", "error"),
    [("bad", 400, "invalid_value", False), ("leaves", 499, "client_left", False), ("dies", 503, "engine_dead", True)],
)
def test_a_span_of_a_call_that_went_wrong(spans: InMemorySpanExporter, fault: str, status: int, kind: str, error: bool) -> None:
    async def call() -> None:
        async with scripted(ServerSettings(served_model_name=("m",))) as app:
            traced(app, spans)
            exchange = app.send(
                "POST", "/v1/completions", BODY | ({"temperature": -1} if fault == "bad" else {}), headers={"traceparent": "junk"}
            )
            if fault != "bad":
                await app.front.only()
                (exchange.leave if fault == "leaves" else app.front.die)()
            await exchange.done()
            span = only(spans)
            assert span.parent is None and span.attributes is not None
            assert (span.attributes["http.response.status_code"], span.attributes["error.type"]) == (status, kind)
            assert (span.status.status_code is trace.StatusCode.ERROR) == error

    asyncio.run(call())


def test_where_spans_go(monkeypatch: pytest.MonkeyPatch) -> None:
    assert provider(None, {}) is None
    assert provider(None, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9", "OTEL_SDK_DISABLED": "true"}) is None
    made = provider("http://127.0.0.1:9/v1/traces", {})
    assert isinstance(made, TracerProvider) and made.resource.attributes["service.name"] == "deepinfer"
    made.shutdown()
    monkeypatch.setattr(tracing.importlib.util, "find_spec", lambda name: None)
    assert provider(None, {}) is None
    with pytest.raises(ConfigError, match=r"pip install 'deepinfer\[otel\]'"):
        provider("http://127.0.0.1:9/v1/traces", {})
