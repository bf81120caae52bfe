"""What tenants have used of their limits, counted by several front processes together.

Owns: the file that they share, and that one of them writes at a time. Never touches: what limits mean (see `tenants`).

The parent of the fronts makes the file, which has no name, and every front inherits it. Clocks are those of the machine, so that times
of one process mean the same in another one.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager

_ENTRY = struct.Struct("<32s4d")
_PATIENCE = 0.05
"""Seconds to wait for another front, which needs microseconds: one that was stopped half-way holds nobody up for longer."""


class Ledger:
    """Four numbers a tenant, all 0 at first.

    Args:
        descriptor: of the file, open for reading and writing; ours from here on.
    """

    def __init__(self, descriptor: int) -> None:
        self._file = descriptor
        self._places: dict[str, int] = {}

    @contextmanager
    def entry(self, name: str) -> Iterator[list[float]]:
        """A tenant's numbers, to be read and changed; no other process does so meanwhile."""
        with self._alone():
            place = self._places.get(name)
            if place is None:
                place = self._places[name] = self._find(name)
            key, *numbers = _ENTRY.unpack(os.pread(self._file, _ENTRY.size, place))
            try:
                yield numbers
            finally:
                os.pwrite(self._file, _ENTRY.pack(key, *numbers), place)

    def _find(self, name: str) -> int:
        """Where a tenant's entry is; a new one at the end."""
        wanted = hashlib.sha256(name.encode()).digest()
        size = os.fstat(self._file).st_size
        for place in range(0, size, _ENTRY.size):
            if os.pread(self._file, len(wanted), place) == wanted:
                return place
        os.pwrite(self._file, _ENTRY.pack(wanted, 0.0, 0.0, 0.0, 0.0), size)
        return size

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Locks the file. A lock of this kind belongs to a process, not to what it inherited, and ends with it."""
        end = time.monotonic() + _PATIENCE
        locked = False
        while not locked:
            try:
                fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                locked = True
            except OSError:
                if time.monotonic() >= end:
                    break
                time.sleep(0.0002)
        try:
            yield
        finally:
            if locked:
                with contextlib.suppress(OSError):
                    fcntl.lockf(self._file, fcntl.LOCK_UN)
