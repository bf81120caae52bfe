"""A histogram that takes many observations at once.

Owns: :class:`WeightedHistogram`. Never touches: what is observed.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from prometheus_client import Histogram


class WeightedHistogram(Histogram):
    """As its base, which takes one value for one observation."""

    def observe_many(self, value: float, count: int) -> None:
        """``count`` observations of ``value``: the tokens of one output came at one gap each."""
        self._sum.inc(value * count)
        self._buckets[bisect_left(self._upper_bounds, value)].inc(count)

    def add(self, counts: Sequence[float], total: float) -> None:
        """Observations counted elsewhere, by bucket, and the sum of their values."""
        self._sum.inc(total)
        for bucket, count in zip(self._buckets, counts, strict=True):
            bucket.inc(count)
