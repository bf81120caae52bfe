"""Finding stop strings in text that arrives in pieces.

Owns: the matcher. Never touches: tokens, requests, the engine.

An Aho-Corasick automaton over characters (Aho, Corasick 1975): its depth is the length of the longest suffix of the text
that is a proper prefix of a stop string, exactly what must be held back. The match taken is the one that ends first; of
several that end at the same character, the longest. So the result does not depend on how the text was cut into pieces.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple


class StopMatch(NamedTuple):
    """``text[start:end]`` of the whole text fed so far is the stop string ``stop``."""

    start: int
    end: int
    stop: str


class StopStrings:
    """The automaton of a set of stop strings; immutable, one may serve many texts."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.next: list[dict[str, int]] = [{}]
        self.fail = [0]
        self.depth = [0]
        self.ends: list[str | None] = [None]
        for stop in stops:
            self._insert(stop)
        self._link()

    def _insert(self, stop: str) -> None:
        node = 0
        for c in stop:
            if c not in self.next[node]:
                self.next[node][c] = len(self.next)
                self.next.append({})
                self.fail.append(0)
                self.depth.append(self.depth[node] + 1)
                self.ends.append(None)
            node = self.next[node][c]
        self.ends[node] = stop

    def _link(self) -> None:
        queue = deque(self.next[0].values())
        while queue:
            node = queue.popleft()
            for c, child in self.next[node].items():
                self.fail[child] = self.step(self.fail[node], c)
                queue.append(child)
            if self.ends[node] is None:
                self.ends[node] = self.ends[self.fail[node]]  # a shorter stop may end here too

    def step(self, node: int, c: str) -> int:
        """The node reached from ``node`` by ``c``."""
        while node and c not in self.next[node]:
            node = self.fail[node]
        return self.next[node].get(c, 0)


class StopMatcher:
    """Position of one text in the automaton."""

    __slots__ = ("_automaton", "_node", "_seen")

    def __init__(self, automaton: StopStrings) -> None:
        self._automaton = automaton
        self._node = 0
        self._seen = 0

    @property
    def held(self) -> int:
        """Characters at the end of the text that may be the beginning of a stop string."""
        return self._automaton.depth[self._node]

    def feed(self, piece: str, *, ignore: bool = False) -> StopMatch | None:
        """Takes in more text; gives the first match that ends in it. ``ignore`` passes over matches that end in this piece."""
        a, node = self._automaton, self._node
        for c in piece:
            self._seen += 1
            node = a.step(node, c)
            stop = a.ends[node]
            if stop is None:
                continue
            if not ignore:
                self._node = node
                return StopMatch(self._seen - len(stop), self._seen, stop)
            while not a.next[node]:
                node = a.fail[node]  # a whole stop string that was passed over begins no other
        self._node = node
        return None
