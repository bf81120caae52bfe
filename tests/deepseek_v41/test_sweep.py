"""DeepSeek-V4.1 in random arrangements: each request gets what it gets alone, and nothing is left; see ``sweep``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import pytest

from deepseek_v41.sweep import Case


def sweep(seeds: Iterable[int], dtype: str, plays: int, device: str) -> Counter[str]:
    """What was reached, over all arrangements."""
    reached: Counter[str] = Counter()
    for seed in seeds:
        case = Case.of(seed, dtype)
        for play in case.plays(plays):
            reached.update(case.check(play, device))
    return reached


def test_every_arrangement_gives_what_each_request_gets_alone(device: str) -> None:
    reached = sweep((5, 9), "float32", 3, device)
    names = ("hit_tokens", "start_snapshot", "start_rerun", "drafted", "accepted", "preemptions", "failed")
    assert all(reached[name] > 0 for name in names), reached


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("first", range(100, 140, 4))
def test_every_arrangement_at_length(first: int, dtype: str, device: str) -> None:
    sweep(range(first, first + 4), dtype, 6, device)
