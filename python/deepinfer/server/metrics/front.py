"""What the front counts: calls, requests, tokens, times, tenants.

Owns: these metrics and how a finished call is added to them. Never touches: the engine's counters, sockets.

A call is counted once, at its end; only times to first tokens and gaps between tokens are counted as outputs come, once for each. With
``PROMETHEUS_MULTIPROC_DIR`` set before this module is imported, the values of all front processes lie in that folder and are
added up by whoever is scraped.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from deepinfer.server.metrics.engine import PREFIX
from deepinfer.server.metrics.grammars import GrammarMetrics
from deepinfer.server.metrics.weighted import WeightedHistogram
from deepinfer.server.records import CLIENT_LEFT, CallRecord, PromptRecord

if TYPE_CHECKING:
    from deepinfer.server.state import ServerState

FIRST_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0)
GAP = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0)
WHOLE = (
    0.005,
    0.01,
    0.05,
    0.1,
    0.3,
    0.5,
    0.8,
    1.0,
    1.5,
    2.0,
    2.5,
    5.0,
    10.0,
    15.0,
    20.0,
    30.0,
    40.0,
    50.0,
    60.0,
    120.0,
    240.0,
    480.0,
    960.0,
)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000, 200000, 500000)
ANSWERS = (1, 2, 5, 10, 20)

_METHODS = frozenset({"GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH"})
_TURNED_AWAY = (401, 403, 429, 503)


class FrontMetrics:
    """The front's metrics under one registry.

    Args:
        registry: where they are registered; ``None`` in a front that shares its values by files.
        model: the name under which the model is served.
    """

    def __init__(self, registry: CollectorRegistry | None, model: str) -> None:
        self._model = model

        def labels(more: str) -> tuple[str, ...]:
            return ("model_name", *more.split())

        def counter(name: str, said: str, more: str = "") -> Counter:
            return Counter(PREFIX + name, said, labels(more), registry=registry)

        def gauge(name: str, said: str) -> Any:
            made = Gauge(PREFIX + name, said, labels(""), registry=registry, multiprocess_mode="livesum")
            return made.labels(model)

        def histogram(name: str, said: str, buckets: Iterable[float], more: str = "", kind: type[Histogram] = Histogram) -> Any:
            made = kind(PREFIX + name, said, labels(more), registry=registry, buckets=tuple(buckets))
            return made if more else made.labels(model)

        self._calls = counter("http_requests", "HTTP requests that ended", "endpoint method status")
        self._call_seconds = histogram(
            "http_request_duration_seconds", "from a request's headers to the end of its answer", WHOLE, "endpoint"
        )
        self._left = counter("client_disconnects", "calls whose client went away before the end", "endpoint")
        self._turned_away = counter("rejected_requests", "calls turned away before the engine heard of them, by code", "endpoint code")
        self._answers = counter("requests", "answers that ended (each of n is one), by how", "endpoint finish_reason")
        self._prompts = counter("prompts", "prompts that the engine took in", "endpoint")
        self._prompt_tokens = counter("prompt_tokens", "tokens of prompts")
        self._cached_tokens = counter("prompt_tokens_cached", "of these, tokens that came from the prefix cache")
        self._generation_tokens = counter("generation_tokens", "tokens of answers")
        self._reruns = counter("request_reruns", "answers made again because an engine process had ended")
        self._tenant = {
            name: counter(f"tenant_{name}", said, "tenant")
            for name, said in (
                ("requests", "calls that reached the engine, by tenant"),
                ("rejected_requests", "calls turned away, by tenant"),
                ("prompt_tokens", "tokens of prompts, by tenant"),
                ("prompt_tokens_cached", "of these, tokens that came from the prefix cache"),
                ("generation_tokens", "tokens of answers, by tenant"),
            )
        }
        self._first_token = histogram("time_to_first_token_seconds", "from a request's headers to its first token", FIRST_TOKEN)
        self._gap = histogram("inter_token_latency_seconds", "between two tokens of an answer", GAP, kind=WeightedHistogram)
        self._per_token = histogram("request_time_per_output_token_seconds", "mean time between the tokens of a request", GAP)
        self._whole = histogram("e2e_request_latency_seconds", "from a request's headers to its last token", WHOLE)
        self._queue = histogram("request_queue_time_seconds", "from submission to the first step that worked on it", FIRST_TOKEN)
        self._prefill = histogram("request_prefill_time_seconds", "from that step to the first token", FIRST_TOKEN)
        self._decode = histogram("request_decode_time_seconds", "from the first token to the last", WHOLE)
        self._inference = histogram("request_inference_time_seconds", "from the first step to the last token", WHOLE)
        self._prompt_length = histogram("request_prompt_tokens", "tokens of a prompt", TOKENS)
        self._answer_length = histogram("request_generation_tokens", "tokens of a prompt's answers", TOKENS)
        self._n = histogram("request_params_n", "answers asked for", ANSWERS)
        self._grammars = GrammarMetrics(registry, model)
        self._calls_now = gauge("http_requests_in_flight", "HTTP requests that are being answered, scrapes left out")
        self._answers_now = gauge("requests_in_flight", "answers that were taken in and have not ended")
        self._tokens_now = gauge("tokens_in_flight", "prompt and longest answer tokens of these")
        self._prompt_tokens, self._cached_tokens, self._generation_tokens, self._reruns = (
            c.labels(model) for c in (self._prompt_tokens, self._cached_tokens, self._generation_tokens, self._reruns)
        )

    def first_token(self, seconds: float) -> None:
        """The first token of a stream came, so long after its request."""
        self._first_token.observe(seconds)

    def gap(self, seconds: float, tokens: int) -> None:
        """``tokens`` of an answer came ``seconds`` after what came before them."""
        self._gap.observe_many(seconds / tokens, tokens)

    def observe(self, record: CallRecord) -> None:
        """Counts a call that is over."""
        model, route = self._model, record.route
        self._calls.labels(model, route, record.method if record.method in _METHODS else "OTHER", str(record.status)).inc()
        self._call_seconds.labels(model, route).observe(max(0.0, record.ended - record.started))
        if record.status == CLIENT_LEFT:
            self._left.labels(model, route).inc()
        if record.status in _TURNED_AWAY:
            self._turned_away.labels(model, route, record.code or str(record.status)).inc()
            self._tenant["rejected_requests"].labels(model, record.tenant).inc()
        if record.prompts:
            self._tenant["requests"].labels(model, record.tenant).inc()
        for prompt in record.prompts:
            self._observe_prompt(record, prompt)

    def _observe_prompt(self, record: CallRecord, prompt: PromptRecord) -> None:
        model, route, tenant = self._model, record.route, record.tenant
        self._prompts.labels(model, route).inc()
        for reason in prompt.finish_reasons:
            self._answers.labels(model, route, reason).inc()
        if left := prompt.params.n - len(prompt.finish_reasons):
            self._answers.labels(model, route, "abort").inc(left)
        for name, plain, count in (
            ("prompt_tokens", self._prompt_tokens, prompt.prompt_tokens),
            ("prompt_tokens_cached", self._cached_tokens, prompt.cached_tokens),
            ("generation_tokens", self._generation_tokens, prompt.completion_tokens),
        ):
            plain.inc(count)
            self._tenant[name].labels(model, tenant).inc(count)
        self._prompt_length.observe(prompt.prompt_tokens)
        self._n.observe(prompt.params.n)
        times = prompt.metrics
        if not times.first_token_time:
            return
        self._answer_length.observe(prompt.completion_tokens)
        if not prompt.last_token:  # of a stream it was counted when it came
            self._first_token.observe(max(0.0, times.first_token_time - record.started))
        if (queued := times.time_in_queue) is not None:
            self._queue.observe(queued)
            self._prefill.observe(max(0.0, times.first_token_time - times.first_scheduled_time))
        if not times.finished_time:
            return
        decode = max(0.0, times.finished_time - times.first_token_time)
        self._whole.observe(max(0.0, times.finished_time - record.started))
        self._decode.observe(decode)
        self._inference.observe(max(0.0, times.finished_time - times.first_scheduled_time))
        further = prompt.completion_tokens - prompt.params.n  # tokens behind the first ones
        if further > 0:
            self._per_token.observe(decode * prompt.params.n / further)
            if not record.stream:  # nothing was seen of the gaps but their sum
                self._gap.observe_many(decode * prompt.params.n / further, further)

    def sync(self, state: ServerState) -> None:
        """Sets what is of this moment, and takes over what is counted elsewhere in this process."""
        self._grammars.sync(state.llm.structured_stats())
        self._calls_now.set(sum(call.record.route != "/metrics" for call in state.calls))
        self._answers_now.set(state.admission.answers)
        self._tokens_now.set(state.admission.tokens)
