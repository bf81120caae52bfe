"""What compiling grammars counts, as Prometheus metrics.

Owns: names and helps of these. Never touches: how grammars are compiled (see `deepinfer.structured`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from deepinfer.server.metrics.engine import PREFIX

_COUNTERS = {
    "compiles": "grammars compiled",
    "cache_hits": "grammars found in the cache",
    "cache_misses": "grammars that were not in the cache",
    "joined": "requests that waited for a compilation under way",
    "timeouts": "compilations ended for their time or memory",
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


def families(model: str, stats: Mapping[str, float]) -> Iterator[Metric]:
    """Everything in the counts of `AsyncLLM.structured_stats`; nothing before the model is loaded."""
    if not stats:
        return
    for name, said in _COUNTERS.items():
        counter = CounterMetricFamily(f"{PREFIX}grammar_{name}", said, labels=["model_name"])
        counter.add_metric([model], stats[name])
        yield counter
    for name, said in _GAUGES.items():
        gauge = GaugeMetricFamily(f"{PREFIX}grammar_{name}", said, labels=["model_name"])
        gauge.add_metric([model], stats[name])
        yield gauge
    prefix = f"{_TIME}_le_"
    buckets = [(name.removeprefix(prefix), value) for name, value in stats.items() if name.startswith(prefix)]
    histogram = HistogramMetricFamily(f"{PREFIX}grammar_{_TIME}", "time that compiling a grammar took", labels=["model_name"])
    histogram.add_metric([model], buckets, stats[f"{_TIME}_sum"])
    yield histogram


def unknown(stats: Mapping[str, float]) -> set[str]:
    """Counts that have no metric."""
    known = {*_COUNTERS, *_GAUGES, f"{_TIME}_sum", f"{_TIME}_count"}
    return {name for name in stats if name not in known and not name.startswith(f"{_TIME}_le_")}
