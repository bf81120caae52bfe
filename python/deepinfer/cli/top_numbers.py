"""What `deepinfer top` shows, out of two scrapes of a server's metrics.

Owns: rates, shares and quantiles. Never touches: sockets, terminals.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

P = "deepinfer:"
Labels = frozenset[tuple[str, str]]


@dataclass(slots=True)
class Scrape:
    """Samples by name; ``at`` is when they were read, in seconds."""

    at: float
    samples: dict[str, dict[Labels, float]] = field(default_factory=dict)

    @classmethod
    def read(cls, text: str, at: float) -> Scrape:
        """Reads a page of metrics.

        Raises:
            ValueError: the text is none.
        """
        from prometheus_client.parser import text_string_to_metric_families

        made = cls(at)
        for metric in text_string_to_metric_families(text):
            for sample in metric.samples:
                made.samples.setdefault(sample.name, {})[frozenset(sample.labels.items())] = sample.value
        return made

    def values(self, name: str, **labels: str) -> dict[Labels, float]:
        """Samples of a metric that have these labels."""
        wanted = set(labels.items())
        return {key: value for key, value in self.samples.get(P + name, {}).items() if wanted <= key}

    def total(self, name: str, **labels: str) -> float:
        """Their sum."""
        return sum(self.values(name, **labels).values())

    def label(self, name: str, label: str) -> list[str]:
        """Values of one label, in order."""
        return sorted({value for key in self.samples.get(P + name, {}) for what, value in key if what == label})


@dataclass(frozen=True, slots=True)
class Span:
    """Two scrapes of one server; without ``before``, all since its start."""

    now: Scrape
    before: Scrape | None = None

    @property
    def seconds(self) -> float | None:
        """Between the two; ``None`` if there is only one."""
        return None if self.before is None else max(self.now.at - self.before.at, 1e-9)

    def rise(self, name: str, **labels: str) -> float:
        """How much counters have grown; one that fell belongs to a process that was started again."""
        before = {} if self.before is None else self.before.values(name, **labels)
        return sum(_grown(value, before.get(key, 0.0)) for key, value in self.now.values(name, **labels).items())

    def rate(self, name: str, **labels: str) -> float | None:
        """Per second; ``None`` if there is one scrape only."""
        return None if self.seconds is None else self.rise(name, **labels) / self.seconds

    def share(self, part: str, whole: str) -> float | None:
        """Of what came between the two, else of all since the start; ``None`` of nothing."""
        for span in (self, Span(self.now)):
            if (all_ := span.rise(whole)) > 0:
                return span.rise(part) / all_
        return None

    def quantiles(self, name: str, wanted: Iterable[float] = (0.5, 0.9, 0.99)) -> dict[str, float] | None:
        """Of what came between the two, else of all since the start, by interpolation within a bucket; ``None`` of nothing."""
        for span in (self, Span(self.now)):
            buckets = span._buckets(name)
            if buckets and buckets[-1][1] > 0:
                return {f"p{q * 100:g}": quantile(buckets, q) for q in wanted}
        return None

    def _buckets(self, name: str) -> list[tuple[float, float]]:
        sums: dict[float, float] = {}
        before = {} if self.before is None else self.before.values(name + "_bucket")
        for key, value in self.now.values(name + "_bucket").items():
            bound = float(dict(key)["le"])
            sums[bound] = sums.get(bound, 0.0) + _grown(value, before.get(key, 0.0))
        return sorted(sums.items())


def _grown(value: float, before: float) -> float:
    return value - before if value >= before else value


def quantile(buckets: list[tuple[float, float]], q: float) -> float:
    """The value below which a part ``q`` of the observations lie; above the last bound, that bound. Buckets are cumulative."""
    wanted = q * buckets[-1][1]
    low, below = 0.0, 0.0
    for bound, count in buckets:
        if count >= wanted and count > below:
            return low if math.isinf(bound) else low + (bound - low) * (wanted - below) / (count - below)
        low, below = bound, count
    return low


def numbers(span: Span) -> dict[str, Any]:
    """Everything that is shown, by group; ``None`` where nothing is known yet."""
    now = span.now
    reasons = now.label("waiting", "reason")
    usage = now.values("kv_usage_ratio")
    steps = span.rise("steps_total")
    made: dict[str, Any] = {
        "model": next(iter(now.label("engine_up", "model_name")), None),
        "up": now.total("engine_up") > 0,
        "snapshot_age_seconds": max(now.values("snapshot_age_seconds").values(), default=None),
        "requests": {
            "running": int(now.total("running")),
            "decoding": int(now.total("decoding")),
            "waiting": int(now.total("waiting")),
            "waiting_for": {reason: count for reason in reasons if (count := int(now.total("waiting", reason=reason)))},
            "in_flight": int(now.total("requests_in_flight")),
            "per_second": span.rate("requests_total"),
            "ended": {
                reason: int(now.total("requests_total", finish_reason=reason)) for reason in now.label("requests_total", "finish_reason")
            },
            "rejected": int(now.total("rejected_requests_total")),
            "disconnected": int(now.total("client_disconnects_total")),
        },
        "tokens_per_second": {"out": span.rate("output_tokens_total"), "in": span.rate("prefill_tokens_total")},
        "kv": {
            "usage": max(usage.values(), default=None),
            "hit_rate": span.share("hit_tokens_total", "asked_tokens_total"),
            "preemptions": int(now.total("preemptions_total")),
        },
        "seconds": {
            "time_to_first_token": span.quantiles("time_to_first_token_seconds"),
            "inter_token_latency": span.quantiles("inter_token_latency_seconds"),
            "e2e_request_latency": span.quantiles("e2e_request_latency_seconds"),
            "queue": span.quantiles("request_queue_time_seconds"),
        },
        "steps": {
            "per_second": span.rate("steps_total"),
            "failed": int(now.total("failed_steps_total")),
            "device_seconds": span.rise("step_device_seconds_sum") / steps if steps else None,
            "bubble": _bubble(span),
            "overlap": span.share("host_hidden_seconds_total", "step_host_seconds_sum"),
            "chunk_fill": span.share("prefill_chunk_rows_total", "prefill_chunk_budget_rows_total"),
        },
        "drafts": {
            "accepted": span.share("accepted_total", "drafted_total"),
            "length": span.share("accepted_length_sum", "accepted_length_count"),
        },
        "grammars": {
            "compiled": int(now.total("grammar_compiles_total")),
            "failed": int(now.total("grammar_failures_total") + now.total("grammar_timeouts_total")),
            "compile_seconds": span.quantiles("grammar_compile_seconds"),
        },
    }
    return made


def _bubble(span: Span) -> float | None:
    for each in (span, Span(span.now)):
        idle, busy = each.rise("bubble_seconds_total"), each.rise("step_device_seconds_sum")
        if idle + busy > 0:
            return idle / (idle + busy)
    return None


Row = tuple[str, str]


def rows(n: Mapping[str, Any]) -> list[Row]:
    """The table: a heading and what stands behind it."""
    requests, tokens, kv, steps, drafts = n["requests"], n["tokens_per_second"], n["kv"], n["steps"], n["drafts"]
    waits = ", ".join(f"{count} for {reason}" for reason, count in requests["waiting_for"].items() if reason != "resources")
    ended = " · ".join(f"{reason} {count}" for reason, count in requests["ended"].items())
    table = [
        ("requests", f"{requests['running']} running, {requests['waiting']} waiting" + (f" ({waits})" if waits else "")),
        ("", f"{requests['in_flight']} in flight, {_number(requests['per_second'])} ended/s"),
        ("ended", ended or "none yet"),
        ("tokens/s", f"{_number(tokens['out'])} out, {_number(tokens['in'])} in"),
        ("KV usage", _bar(kv["usage"])),
        ("hit rate", _bar(kv["hit_rate"])),
    ]
    if requests["rejected"] or requests["disconnected"]:
        table.insert(3, ("", f"rejected {requests['rejected']}, disconnected {requests['disconnected']}"))
    for title, name in (
        ("first token", "time_to_first_token"),
        ("inter-token", "inter_token_latency"),
        ("whole answer", "e2e_request_latency"),
    ):
        table.append((title, _times(n["seconds"][name])))
    table.append(("steps", f"{_number(steps['per_second'])}/s, device {_time(steps['device_seconds'])} each"))
    table.append(
        ("", f"bubble {_percent(steps['bubble'])}, host hidden {_percent(steps['overlap'])}, chunks {_percent(steps['chunk_fill'])}")
    )
    if steps["failed"] or kv["preemptions"]:
        table.append(("", f"failed {steps['failed']}, preemptions {kv['preemptions']}"))
    if drafts["accepted"] is not None:
        table.append(("drafts", f"{_percent(drafts['accepted'])} accepted, {_number(drafts['length'])} a step"))
    grammars = n["grammars"]
    if grammars["compiled"] or grammars["failed"]:
        table.append(("grammars", f"{grammars['compiled']} compiled, {grammars['failed']} failed · {_times(grammars['compile_seconds'])}"))
    return table


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:,.1f}"


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f} %"


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def _times(quantiles: Mapping[str, float] | None) -> str:
    return "none yet" if quantiles is None else ", ".join(f"{name} {_time(value)}" for name, value in quantiles.items())


def _bar(value: float | None, width: int = 20) -> str:
    if value is None:
        return "–"
    full = round(min(max(value, 0.0), 1.0) * width)
    return f"{'█' * full}{'░' * (width - full)} {_percent(value)}"


def render(n: Mapping[str, Any], url: str) -> str:
    """The whole picture."""
    state = "serving" if n["up"] else "ENGINE DOWN"
    age = n["snapshot_age_seconds"]
    late = f" · the engine's numbers are {age:.0f} s old" if age is not None and age > 3 else ""
    lines = [f"deepinfer top · {n['model'] or '?'} · {url} · {state}{late}", ""]
    return "\n".join(lines + [f"{title:<13} {text}" for title, text in rows(n)]) + "\n"
