"""Where KV of finished prefixes lives beyond an engine: objects of 128 tokens under their chain hashes, and slices of states.

Owns: what a keeper of such objects offers (`BlockTier`), and one in memory for engines of one process. Never touches: pages, sequences,
when they are saved or looked for. `_core.KvTier` is the keeper on disk, over sockets and through the host's agent (docs/kvstore.md).

A name is a chain hash, 16 bytes, with model, weights, formats, hit policy, block size and tenant inside, so that one keeper may serve any
number of engines. What is present has its ancestors present: a chain is looked up as a prefix.
"""

from __future__ import annotations

import heapq
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from deepinfer.errors import ConfigError
from deepinfer.sampling import TrafficClass

KEY_BYTES = 16
_ROOT = bytes(KEY_BYTES)  # parent of the first object of a chain
Kind = Literal["block", "slice"]
STORED, EXISTS, CONFLICT, NO_PARENT, FAILED = b"secpf"
"""What became of each object of a `BlockTier.put`."""


class BlockTier(Protocol):
    """A keeper of objects. Calls come from any thread and may take their time; engines make them on threads of their own.

    What it says is a hint: an object it told of may be gone when it is asked for. Anything it raises is a miss to an engine.
    """

    def check(self, keys: bytes, slices: int, /) -> tuple[int, list[int], int]:
        """Longest present prefix of a chain of names, 16 bytes each: how many objects; positions of at most ``slices`` of them that have
        a slice, last first; how many objects are in this host's memory. What is found counts as used."""

    def get(self, kind: Kind, keys: bytes, into: Any, each: int, /) -> bytes:
        """Reads objects of ``each`` bytes, object ``i`` into ``into[i * each :]``. One byte for each: 1 = it is there, whole and as it was
        written; else its bytes in ``into`` mean nothing."""

    def put(self, kind: Kind, keys: bytes, parents: bytes, lengths: Sequence[int], data: Any, traffic_class: TrafficClass, /) -> bytes:
        """Keeps objects that lie one behind the other in ``data``, unless there is something under their names. Blocks are neighbours in
        one chain; ``parents``: all names of the chain before them, from its first on. Slices need none. One letter for each: ``s`` stored,
        ``e`` exists, ``c`` exists with other bytes, ``p`` its parent is not there, ``f`` failed."""

    def flush(self, seconds: float, /) -> bool:
        """Waits until all that was put is where it outlives the process, as far as it ever will; whether it is."""

    def stats(self) -> dict[str, int]:
        """Counters, by name."""

    def trouble(self) -> str | None:
        """What the latest read or write that failed failed with, if that is known."""

    def close(self) -> None:
        """Lets go; idempotent. Later calls fail."""


@dataclass(slots=True, eq=False)
class _Block:
    data: bytes
    parent: bytes
    used: int
    children: int = 0


class MemoryTier:
    """Objects in the memory of this process, at most ``capacity`` bytes of them; engines of one process may share it.

    Room is made by slices first, then by blocks without children, those used longest ago first.

    Args:
        capacity: bytes.
        first_stays: bytes may differ from those under the same name (hit policy ``replay``): no conflict.

    Raises:
        ConfigError: a capacity below 1.
    """

    def __init__(self, capacity: int, *, first_stays: bool = False) -> None:
        if capacity < 1:
            raise ConfigError(f"a tier of blocks needs room for at least 1 byte, got {capacity}")
        self.capacity = capacity
        self._other = EXISTS if first_stays else CONFLICT
        self._lock = threading.Lock()
        self._blocks: dict[bytes, _Block] = {}
        self._slices: OrderedDict[bytes, bytes] = OrderedDict()
        self._leaves: list[tuple[int, bytes]] = []  # a heap by last use; entries that no longer hold are skipped
        self._clock = self._bytes = 0
        self._counts = dict.fromkeys(("checks", "hits", "misses", "stored", "exists", "conflicts", "no_parent", "refused", "evicted"), 0)
        self._closed = False

    def check(self, keys: bytes, slices: int, /) -> tuple[int, list[int], int]:
        """See `BlockTier.check`."""
        names = _names(keys)
        with self._lock:
            self._check_open()
            self._counts["checks"] += 1
            found = 0
            for name in names:
                if name not in self._blocks:
                    break
                self._use(name)
                found += 1
            positions = [i for i in range(found - 1, -1, -1) if names[i] in self._slices][:slices]
            return found, positions, 0

    def get(self, kind: Kind, keys: bytes, into: Any, each: int, /) -> bytes:
        """See `BlockTier.get`."""
        target = memoryview(into).cast("B")
        found = []
        with self._lock:
            self._check_open()
            for name in _names(keys):
                found.append(self._read(kind, name))
            hits = bytes(data is not None and len(data) == each for data in found)
            self._counts["hits"] += sum(hits)
            self._counts["misses"] += len(hits) - sum(hits)
        for i, data in enumerate(found):
            if hits[i] and data is not None:
                target[i * each : (i + 1) * each] = data
        return hits

    def put(self, kind: Kind, keys: bytes, parents: bytes, lengths: Sequence[int], data: Any, traffic_class: TrafficClass, /) -> bytes:
        """See `BlockTier.put`. An object larger than the tier fails."""
        source, at, said = memoryview(data).cast("B"), 0, []
        parent = _ROOT if kind == "slice" or not parents else _names(parents)[-1]
        for name, length in zip(_names(keys), lengths, strict=True):
            copy = bytes(source[at : at + length])
            if len(copy) != length:
                raise ValueError(f"{sum(lengths)} bytes were announced and {len(source)} came")
            at += length
            with self._lock:
                self._check_open()
                said.append(self._put(kind, name, parent, copy))
            parent = name
        return bytes(said)

    def flush(self, seconds: float, /) -> bool:
        """See `BlockTier.flush`: memory does not outlive the process."""
        return True

    def stats(self) -> dict[str, int]:
        """What happened, and ``blocks``, ``slices``, ``bytes`` now."""
        with self._lock:
            return {**self._counts, "blocks": len(self._blocks), "slices": len(self._slices), "bytes": self._bytes}

    def trouble(self) -> str | None:
        """See `BlockTier.trouble`: memory has none."""
        return None

    def close(self) -> None:
        """See `BlockTier.close`."""
        with self._lock:
            self._closed = True
            self._blocks.clear()
            self._slices.clear()
            self._leaves.clear()
            self._bytes = 0

    # With the lock held

    def _check_open(self) -> None:
        if self._closed:
            raise ConnectionError("the tier is closed")

    def _read(self, kind: Kind, name: bytes) -> bytes | None:
        if kind == "slice":
            if name in self._slices:
                self._slices.move_to_end(name)
            return self._slices.get(name)
        block = self._blocks.get(name)
        if block is not None:
            self._use(name)
        return None if block is None else block.data

    def _put(self, kind: Kind, name: bytes, parent: bytes, data: bytes) -> int:
        there = self._slices.get(name) if kind == "slice" else (b.data if (b := self._blocks.get(name)) else None)
        if there is not None:
            same = there == data
            self._counts["exists" if same or self._other == EXISTS else "conflicts"] += 1
            return EXISTS if same else self._other
        anchor = name if kind == "slice" else parent
        if anchor != _ROOT and anchor not in self._blocks:
            self._counts["no_parent"] += 1
            return NO_PARENT
        if not self._make_room(len(data), anchor):
            self._counts["refused"] += 1
            return FAILED
        if kind == "slice":
            self._slices[name] = data
        else:
            self._blocks[name] = _Block(data, parent, 0)
            if parent != _ROOT:
                self._blocks[parent].children += 1
            self._use(name)
        self._bytes += len(data)
        self._counts["stored"] += 1
        return STORED

    def _use(self, name: bytes) -> None:
        block = self._blocks[name]
        self._clock += 1
        block.used = self._clock
        if not block.children:
            heapq.heappush(self._leaves, (block.used, name))
            if len(self._leaves) > 4 * len(self._blocks) + 16:
                self._leaves = [(b.used, n) for n, b in self._blocks.items() if not b.children]
                heapq.heapify(self._leaves)

    def _make_room(self, needed: int, kept: bytes) -> bool:
        """Evicts until ``needed`` bytes fit, but not ``kept``."""
        if needed > self.capacity:
            return False
        spared = None
        while self._bytes + needed > self.capacity:
            if self._slices:
                _, data = self._slices.popitem(last=False)
                self._bytes -= len(data)
            elif not self._leaves:
                break
            else:
                used, name = heapq.heappop(self._leaves)
                block = self._blocks.get(name)
                if block is None or block.children or block.used != used:
                    continue
                if name == kept:
                    spared = (used, name)
                    continue
                self._forget(name, block)
            self._counts["evicted"] += 1
        if spared is not None:
            heapq.heappush(self._leaves, spared)
        return self._bytes + needed <= self.capacity

    def _forget(self, name: bytes, block: _Block) -> None:
        del self._blocks[name]
        self._bytes -= len(block.data)
        parent = self._blocks.get(block.parent)
        if parent is not None:
            parent.children -= 1
            if not parent.children:
                heapq.heappush(self._leaves, (parent.used, block.parent))


def _names(keys: bytes) -> list[bytes]:
    if len(keys) % KEY_BYTES:
        raise ValueError(f"names have {KEY_BYTES} bytes each, and {len(keys)} came")
    return [bytes(keys[i : i + KEY_BYTES]) for i in range(0, len(keys), KEY_BYTES)]
