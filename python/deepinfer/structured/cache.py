"""Compiled grammars by what they were compiled from, within a limit of bytes.

Owns: which of them are kept. Never touches: compilation, whoever waits for one. Not safe to share between threads: `service` has the lock.
"""

from __future__ import annotations

from collections import OrderedDict

from deepinfer.structured.compiler import Compiled


class GrammarCache:
    """The most recently used ones. The limit is hard; one that is larger than it is not kept.

    Args:
        limit: bytes of serialised grammars; 0 = keep nothing.
    """

    def __init__(self, limit: int) -> None:
        self.limit, self.size = limit, 0
        self.evicted = 0
        self._kept: OrderedDict[str, Compiled] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, key: str) -> Compiled | None:
        """What was compiled under this key, if it is still there."""
        found = self._kept.get(key)
        if found is not None:
            self._kept.move_to_end(key)
        return found

    def put(self, key: str, compiled: Compiled) -> None:
        """Keeps a grammar, and lets go of the least recently used ones."""
        size = len(compiled.data)
        if size > self.limit:
            return
        if (old := self._kept.pop(key, None)) is not None:
            self.size -= len(old.data)
        self._kept[key] = compiled
        self.size += size
        while self.size > self.limit:
            _, gone = self._kept.popitem(last=False)
            self.size -= len(gone.data)
            self.evicted += 1

    def clear(self) -> None:
        """Lets go of everything."""
        self._kept.clear()
        self.size = 0
