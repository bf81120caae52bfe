"""Which rank a process is. A leaf: settings hold it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RankPlace:
    """Which rank a process is.

    Attributes:
        rank, size: number of the rank, and how many there are.
        meet: a file in which they find each other, which must not exist before; ``None`` for ranks that step by themselves.
        spread_experts: whether each has a part of the experts only.
        timeout: seconds that a rank waits for another within a step. One whose process ends is noticed at once.
    """

    rank: int
    size: int
    meet: str | None
    spread_experts: bool
    timeout: float

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.size}"
