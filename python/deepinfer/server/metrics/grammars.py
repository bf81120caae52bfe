"""What compiling grammars counts, as Prometheus metrics.

Owns: names and helps of these. Never touches: how grammars are compiled (see `deepinfer.structured`).

Each front process compiles for itself, so its counts are added to metrics that front processes may share.
"""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge

from deepinfer.server.metrics.engine import PREFIX
from deepinfer.server.metrics.weighted import WeightedHistogram
from deepinfer.structured.service import SECONDS_BUCKETS

_COUNTERS = {
    "compiles": "grammars compiled",
    "cache_hits": "grammars found in the cache",
    "cache_misses": "grammars that were not in the cache",
    "joined": "requests that waited for a compilation under way",
    "timeouts": "compilations ended for their time or memory",
    "starved": "compilations that got no processor, or no process, in time",
    "failures": "grammars that are malformed",
    "screened_out": "grammars refused before anything was compiled",
    "refused_again": "grammars refused because they were before",
    "cancelled": "compilations that nobody wanted any more",
    "reported": "grammars with keywords that are not held to",
    "cache_evicted": "grammars given up for newer ones",
    "workers_started": "processes that compile, started",
    "workers_killed": "of these, killed",
}
_GAUGES = {
    "cache_entries": "grammars in the cache",
    "cache_bytes": "bytes of the cache",
    "workers": "processes that compile",
    "queued": "compilations that wait for one",
}
_TIME = "compile_seconds"
_BOUNDS = (*map(str, SECONDS_BUCKETS), "+Inf")


class GrammarMetrics:
    """Metrics that follow the counts of `AsyncLLM.structured_stats`."""

    def __init__(self, registry: CollectorRegistry | None, model: str) -> None:
        labels = ("model_name",)
        name = PREFIX + "grammar_"
        self._counters = {key: Counter(name + key, said, labels, registry=registry).labels(model) for key, said in _COUNTERS.items()}
        self._gauges = {}
        for key, said in _GAUGES.items():
            gauge = Gauge(name + key, said, labels, registry=registry, multiprocess_mode="livesum")
            self._gauges[key] = gauge.labels(model)
        said = "time that compiling a grammar took"
        self._time = WeightedHistogram(name + _TIME, said, labels, registry=registry, buckets=SECONDS_BUCKETS).labels(model)
        self._told: Mapping[str, float] = {}

    def sync(self, stats: Mapping[str, float]) -> None:
        """Adds what was counted since the last time; nothing before the model is loaded."""
        if not stats:
            return

        def rise(name: str) -> float:
            return stats[name] - self._told.get(name, 0.0)

        for key, counter in self._counters.items():
            counter.inc(rise(key))
        for key, gauge in self._gauges.items():
            gauge.set(stats[key])
        below = [rise(f"{_TIME}_le_{bound}") for bound in _BOUNDS]
        self._time.add([now - before for now, before in zip(below, [0.0, *below], strict=False)], rise(f"{_TIME}_sum"))
        self._told = dict(stats)


def unknown(stats: Mapping[str, float]) -> set[str]:
    """Counts that have no metric."""
    known = {*_COUNTERS, *_GAUGES, f"{_TIME}_sum", f"{_TIME}_count", *(f"{_TIME}_le_{bound}" for bound in _BOUNDS)}
    return set(stats) - known
