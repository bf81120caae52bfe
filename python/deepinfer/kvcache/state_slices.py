"""Where state slices live: the parts of sequences' states worth keeping beyond them, as bytes under the hash of their boundary.

Owns: what a keeper of slices offers (`SliceTier`), and the one in host memory. Never touches: tensors, sequences, when slices are cut.

A key is the chain hash of the block that ends at the boundary, 16 bytes. Model, weights, formats, hit policy and salt are inside the hash,
so one tier may serve any number of engines: none finds what another one's configuration made.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

from deepinfer.errors import ConfigError

KEY_BYTES = 16

Told = Callable[[bytes, bool], None]
"""``told(key, present)``: a slice is there, or no longer. It comes on any thread, in the order of events, and must only take note."""


class SliceTier(Protocol):
    """A keeper of slices. Every method may be called from any thread and must not wait for long: engines call them on their step thread.

    What a tier says is a hint: a slice it told of may be gone when it is asked for, which costs time, never right results.
    """

    @property
    def kind(self) -> Literal["host", "store"]:
        """What the index calls the place."""

    def put(self, key: bytes, data: bytes) -> bool:
        """Keeps ``data`` unless there is something under ``key``, which stays. Whether it is kept by this call."""

    def get(self, key: bytes) -> bytes | None:
        """The slice, or ``None``."""

    def has(self, key: bytes) -> bool:
        """Whether there is one; does not count as a use."""

    def watch(self, told: Told) -> Callable[[], None]:
        """Tells of every slice there is, and from then on of each that comes or goes. Call the result to hear no more."""


@dataclass(frozen=True)
class SliceCounts:
    """Totals of a tier since it was made, and what it holds now (``slices``, ``bytes``).

    ``kept`` by ``put``; ``evicted`` for room; ``refused``: larger than the tier; ``differing``: put again with other bytes (the first
    ones stayed): under ``replay`` they depend on where a hit ended, under ``exact`` something is wrong; ``hits`` and ``misses`` of ``get``.
    """

    slices: int
    bytes: int
    kept: int
    evicted: int
    refused: int
    differing: int
    hits: int
    misses: int


class HostSlices:
    """Slices in host memory, at most ``capacity`` bytes of them; the one used longest ago goes first.

    Engines of one process may share one. Raises ``ConfigError`` for a capacity below 1.
    """

    kind: Literal["host", "store"] = "host"

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ConfigError(f"a tier of slices needs room for at least 1 byte, got {capacity}; leave it out for none")
        self.capacity = capacity
        self._lock = threading.Lock()
        self._slices: OrderedDict[bytes, bytes] = OrderedDict()
        self._told: list[Told] = []
        self._bytes = self._kept = self._evicted = self._refused = self._differing = self._hits = self._misses = 0

    def put(self, key: bytes, data: bytes) -> bool:
        """See `SliceTier.put`. Makes room by giving up the slices used longest ago; one larger than the tier is not kept."""
        _check_key(key)
        with self._lock:
            there = self._slices.get(key)
            if there is not None:
                self._slices.move_to_end(key)
                self._differing += there != data
                return False
            if len(data) > self.capacity:
                self._refused += 1
                return False
            while self._bytes + len(data) > self.capacity:
                self._evicted += 1
                self._forget(next(iter(self._slices)))
            self._slices[key] = data
            self._bytes += len(data)
            self._kept += 1
            self._tell(key, True)
            return True

    def get(self, key: bytes) -> bytes | None:
        """See `SliceTier.get`; it is the one used last from here on."""
        with self._lock:
            data = self._slices.get(key)
            if data is None:
                self._misses += 1
                return None
            self._hits += 1
            self._slices.move_to_end(key)
            return data

    def has(self, key: bytes) -> bool:
        """See `SliceTier.has`."""
        with self._lock:
            return key in self._slices

    def drop(self, key: bytes) -> bool:
        """Gives a slice up. False if there is none."""
        with self._lock:
            there = key in self._slices
            if there:
                self._forget(key)
            return there

    def watch(self, told: Told) -> Callable[[], None]:
        """See `SliceTier.watch`."""
        with self._lock:
            for key in self._slices:
                told(key, True)
            self._told.append(told)

        def unwatch() -> None:
            with self._lock:
                if told in self._told:
                    self._told.remove(told)

        return unwatch

    def counts(self) -> SliceCounts:
        """Everything counted, at this moment."""
        with self._lock:
            return SliceCounts(
                len(self._slices), self._bytes, self._kept, self._evicted, self._refused, self._differing, self._hits, self._misses
            )

    def _forget(self, key: bytes) -> None:
        self._bytes -= len(self._slices.pop(key))
        self._tell(key, False)

    def _tell(self, key: bytes, present: bool) -> None:
        for told in self._told:
            told(key, present)


def _check_key(key: bytes) -> None:
    if not isinstance(key, bytes) or len(key) != KEY_BYTES:
        raise ValueError(f"a slice is named by {KEY_BYTES} bytes, not by {key!r}")
