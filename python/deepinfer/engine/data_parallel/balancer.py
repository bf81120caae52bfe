"""Which rank gets the next request.

Owns: the choice, from what each rank has. Never touches: ranks, requests' contents.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(slots=True)
class RankLoad:
    """What a rank has to do.

    Attributes:
        tokens: in KV, of its unfinished requests: prompts and what was generated so far.
        requests: unfinished.
        capacity: tokens that its KV holds.
        lanes: most sequences that run at once.
    """

    capacity: int
    lanes: int
    tokens: int = 0
    requests: int = 0

    def has_room(self, tokens: int, sequences: int) -> bool:
        """Whether so many more would run without waiting for others."""
        return self.tokens + tokens <= self.capacity and self.requests + sequences <= self.lanes


class Balancer(Protocol):
    """A rule."""

    def choose(self, ranks: Sequence[RankLoad], tokens: int, sequences: int) -> int:
        """Index of the rank for a request whose prompt has so many tokens and of which so many answers are wanted."""


class FewestTokens:
    """Fewest KV tokens among the ranks with room, of all where none has; then fewest requests, then the lowest rank."""

    def choose(self, ranks: Sequence[RankLoad], tokens: int, sequences: int) -> int:
        """See :class:`Balancer`."""
        roomy = [index for index, rank in enumerate(ranks) if rank.has_room(tokens, sequences)]
        return min(roomy or range(len(ranks)), key=lambda index: (ranks[index].tokens, ranks[index].requests, index))
