"""The core metrics again under the names that vLLM 0.33 gives them, for boards and load generators made for it.

Owns: which of our metrics is which of theirs. Never touches: what the values are made of.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from deepinfer.server.metrics.engine import PREFIX

THEIRS = "vllm:"

SAME = (
    "prompt_tokens",
    "prompt_tokens_cached",
    "generation_tokens",
    "request_prompt_tokens",
    "request_generation_tokens",
    "request_params_n",
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "request_time_per_output_token_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "request_inference_time_seconds",
)
"""Metrics of the front that mean the same under the same name."""

Labels = dict[str, str]


def _engine(labels: Labels) -> Labels:
    number = "1" if labels["engine"] == "completion" else labels["engine"].removeprefix("rank")
    return {"model_name": labels["model_name"], "engine": number if number.isdecimal() else "0"}


def _position(labels: Labels) -> Labels:
    return _engine(labels) | {"position": str(int(labels["position"]) - 1)}


def _first(labels: Labels) -> Labels | None:
    return _engine(labels) if labels["position"] == "1" else None


def _reason(labels: Labels) -> Labels:
    return {"model_name": labels["model_name"], "engine": "0", "finished_reason": labels["finish_reason"]}


Made = tuple[str, str, Callable[[Labels], Labels | None], Callable[[Iterable[float]], float]]
MADE: tuple[Made, ...] = (
    ("num_requests_running", "running", _engine, sum),
    ("num_requests_waiting", "waiting", _engine, sum),
    ("kv_cache_usage_perc", "kv_usage_ratio", _engine, max),
    ("prefix_cache_queries", "asked_tokens", _engine, sum),
    ("prefix_cache_hits", "hit_tokens", _engine, sum),
    ("num_preemptions", "preemptions", _engine, sum),
    ("request_success", "requests", _reason, sum),
    ("spec_decode_num_drafts", "drafts_at_position", _first, sum),
    ("spec_decode_num_draft_tokens", "drafted", _engine, sum),
    ("spec_decode_num_accepted_tokens", "accepted", _engine, sum),
    ("spec_decode_num_accepted_tokens_per_pos", "drafts_accepted_at_position", _position, sum),
)
"""Theirs, ours, their labels of ours (``None``: not among theirs), and what becomes of several of ours."""


def families(ours: Iterable[Metric]) -> Iterator[Metric]:
    """The same values under the other names."""
    known = {metric.name: metric for metric in ours}
    for name in SAME:
        if (metric := known.get(PREFIX + name)) is not None:
            yield _renamed(metric)
    for theirs, name, labels, together in MADE:
        if (metric := known.get(PREFIX + name)) is not None:
            yield _made(theirs, metric, labels, together)


def _renamed(metric: Metric) -> Metric:
    made = Metric(THEIRS + metric.name.removeprefix(PREFIX), metric.documentation, metric.type)
    for sample in metric.samples:
        made.add_sample(THEIRS + sample.name.removeprefix(PREFIX), sample.labels | {"engine": "0"}, sample.value)
    return made


def _made(theirs: str, metric: Metric, labels: Callable[[Labels], Labels | None], together: Callable[[Iterable[float]], float]) -> Metric:
    values: dict[tuple[tuple[str, str], ...], list[float]] = defaultdict(list)
    for sample in metric.samples:
        if (their_labels := labels(sample.labels)) is not None:
            values[tuple(their_labels.items())].append(sample.value)
    one: tuple[tuple[str, str], ...] = next(iter(values), ())
    names = [name for name, _ in one]
    kind = CounterMetricFamily if metric.type == "counter" else GaugeMetricFamily
    family = kind(THEIRS + theirs, metric.documentation, labels=names)
    for named, several in values.items():
        family.add_metric([value for _, value in named], together(several))
    return family
