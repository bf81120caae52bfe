"""A page of metrics as tests read it."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def read(text: str) -> Samples:
    """Every sample of a page, by name and labels."""
    return {(s.name, frozenset(s.labels.items())): s.value for f in text_string_to_metric_families(text) for s in f.samples}


def total(samples: Samples, name: str, **labels: str) -> float:
    """Sum of a metric's samples that have these labels; there must be one."""
    found = [value for (n, key), value in samples.items() if n == name and set(labels.items()) <= key]
    assert found, name
    return sum(found)
