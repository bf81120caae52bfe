"""Host memory that victims of preemption are swapped to and snapshots of states lie in, and the copies out of and into the KV tensors.

Owns: the bytes; ids come from the core (host pages count from 0, host slots from 1). Never touches: who is
swapped or kept, and when.

A host page holds the bytes of one page of a group over all its tensors, side by side, so that it travels as one piece. On a GPU pages
are gathered on the device and copied in runs of neighbouring host pages, from and to page-locked memory; the host never waits, once
that is there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from deepinfer.platforms.host_memory import LockedLater
from deepinfer.worker.kv_cache import KVCache, zeros

_STAGED = 64 << 20  # bytes gathered on the device at once


def sort_commands(commands: NDArray[np.int32], host_column: int) -> None:
    """Orders swap commands ``[m, 3]`` in place by group, then by host page, so that each group is one run and neighbours meet."""
    commands[:] = commands[np.lexsort((commands[:, host_column], commands[:, 0]))]


class HostPages:
    """Host copies of pages and state rows.

    Args:
        kv: the device's tensors.
        pages: host pages of each paged group; ``slots``: host slots of state, the unused 0 included.
        pinned: page-locked, as copies from and to a GPU need it; that takes seconds, and happens while others go on (see ``ready``).
    """

    def __init__(self, kv: KVCache, pages: Sequence[int], slots: int, pinned: bool) -> None:
        make = _locked_later if pinned else _plain
        self._pinned = pinned
        self._groups = [_Rows(_byte_rows(members), count, make) for members, count in zip(kv.groups, pages, strict=True)]
        self._states = [_Rows([tensor], slots, make) for tensor in kv.states]

    @property
    def ready(self) -> bool:
        """Whether a copy would begin at once. Before, it waits; where memory cannot be locked it never is, and a copy raises
        ``CapacityError``."""
        return all(rows.ready for rows in (*self._groups, *self._states))

    def close(self) -> None:
        """Ends what is still being made ready; nothing is copied any more."""
        for rows in (*self._groups, *self._states):
            rows.close()

    def num_bytes(self, commands: NDArray[np.int32], states: int) -> int:
        """Bytes that swap commands ``[m, 3]`` of pages, and of so many state rows, move."""
        counts = np.bincount(commands[:, 0], minlength=len(self._groups)).tolist() if len(commands) else []
        moved = sum(n * g.row_bytes for n, g in zip(counts, self._groups, strict=False))
        return moved + states * sum(s.row_bytes for s in self._states)

    def swap_out(self, commands: NDArray[np.int32], device: torch.Tensor) -> None:
        """Copies pages to the host: sorted rows of (group, device page, host page), as known here and on the device."""
        for group, first, end in _by_group(commands):
            self._groups[group].out(device[first:end, 1], commands[first:end, 2])

    def swap_in(self, commands: NDArray[np.int32], device: torch.Tensor) -> None:
        """Copies pages back: sorted rows of (group, host page, device page)."""
        for group, first, end in _by_group(commands):
            self._groups[group].back(device[first:end, 2], commands[first:end, 1])

    def swap_out_states(self, commands: NDArray[np.int32], device: torch.Tensor) -> None:
        """Copies state rows to the host: rows of (state slot, host slot)."""
        for rows in self._states:
            rows.out(device[:, 0], commands[:, 1])

    def swap_in_states(self, commands: NDArray[np.int32], device: torch.Tensor) -> None:
        """Copies state rows back: rows of (host slot, state slot)."""
        for rows in self._states:
            rows.back(device[:, 1], commands[:, 0])

    def copy_some(self, pages: int) -> int:
        """Copies the null page of group 0 out and back so many times, to see how fast that is; gives the bytes one way. Through memory
        of its own, since that of the pages may not be ready."""
        parts, most = self._groups[0].parts, self._groups[0].count
        count = min(pages, most)
        rows = _Rows(parts, count, _pinned if self._pinned else _plain)
        where = np.arange(count, dtype=np.int32)
        null = torch.zeros(count, dtype=torch.int32, device=rows.device)
        rows.out(null, where)
        rows.back(null, where)
        return count * rows.row_bytes


class HostSnapshots:
    """Snapshots of sequences' states: a place holds the replica of one state row over all state groups.

    Args:
        kv: the device's tensors.
        replica_at: of each state group, where in a row the replica of the bytes before it begins.
        places: how many snapshots; ``pinned``: page-locked, as copies from and to a GPU need it.
    """

    def __init__(self, kv: KVCache, replica_at: Sequence[int], places: int, pinned: bool) -> None:
        pairs = list(zip(kv.states, replica_at, strict=True))
        replicas = [rows[:, at : 2 * at] for rows, at in pairs]
        self._rows = _Rows(replicas, places, _pinned if pinned else _plain, into=[rows[:, :at] for rows, at in pairs])

    def out(self, commands: NDArray[np.int32], device: torch.Tensor) -> None:
        """Copies replicas to the host: rows ``[m, 2]`` of (state slot, place), as known here and on the device."""
        self._rows.out(device[:, 0], commands[:, 1])

    def back(self, commands: NDArray[np.int32], device: torch.Tensor) -> None:
        """Copies snapshots to the live bytes of state rows: rows ``[m, 2]`` of (place, state slot). Replicas stay as they are."""
        self._rows.back(device[:, 1], commands[:, 0])


class _Memory(Protocol):
    """Host memory that may still be being made."""

    @property
    def ready(self) -> bool:
        """Whether it is there."""

    def get(self) -> torch.Tensor:
        """uint8 of the shape asked for."""

    def close(self) -> None:
        """Nobody wants it any more."""


@dataclass
class _Made:
    """Memory that is there."""

    host: torch.Tensor
    ready: bool = True

    def get(self) -> torch.Tensor:
        return self.host

    def close(self) -> None: ...


def _plain(shape: tuple[int, int], device: torch.device) -> _Memory:
    """Takes memory once it is written."""
    return _Made(zeros(shape, torch.uint8, torch.device("cpu")))


def _pinned(shape: tuple[int, int], device: torch.device) -> _Memory:
    return _Made(torch.empty(shape, dtype=torch.uint8, pin_memory=True))


def _locked_later(shape: tuple[int, int], device: torch.device) -> _Memory:
    return (
        LockedLater(shape, device, "preempted sequences", "they are computed again; lower swap_space_gib")
        if shape[0]
        else _pinned(shape, device)
    )


class _Rows:
    """Host rows that each hold one row of several device tensors seen as ``uint8 [rows, bytes]``; ``make`` gives their memory;
    ``into``: where they come back."""

    def __init__(
        self,
        parts: list[torch.Tensor],
        count: int,
        make: Callable[[tuple[int, int], torch.device], _Memory],
        into: list[torch.Tensor] | None = None,
    ) -> None:
        self.count, self.parts = count, parts
        self.device = parts[0].device
        self._into = parts if into is None else into
        self.row_bytes = sum(p.shape[1] for p in parts)
        self._memory = make((count, self.row_bytes), self.device)
        self._at_once = max(1, _STAGED // max(1, self.row_bytes))

    @property
    def ready(self) -> bool:
        return self._memory.ready

    def close(self) -> None:
        self._memory.close()

    def out(self, rows: torch.Tensor, host: NDArray[np.int32]) -> None:
        memory = self._memory.get()
        for first in range(0, len(host), self._at_once):
            piece = host[first : first + self._at_once]
            index = rows[first : first + len(piece)].long()
            staged = torch.cat([part.index_select(0, index) for part in self.parts], 1)
            for at, n, page in _runs(piece):
                memory[page : page + n].copy_(staged[at : at + n], non_blocking=True)

    def back(self, rows: torch.Tensor, host: NDArray[np.int32]) -> None:
        memory = self._memory.get()
        for first in range(0, len(host), self._at_once):
            piece = host[first : first + self._at_once]
            index = rows[first : first + len(piece)].long()
            staged = torch.empty((len(piece), self.row_bytes), dtype=torch.uint8, device=self.device)
            for at, n, page in _runs(piece):
                staged[at : at + n].copy_(memory[page : page + n], non_blocking=True)
            for part, source in zip(self._into, staged.split([p.shape[1] for p in self._into], 1), strict=True):
                part.index_copy_(0, index, source)


def _byte_rows(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [t.view(t.shape[0], -1).view(torch.uint8) for t in tensors]


def _by_group(commands: NDArray[np.int32]) -> Iterator[tuple[int, int, int]]:
    """(group, first, end) of each run of one group in sorted commands."""
    first = 0
    groups, counts = np.unique(commands[:, 0], return_counts=True)
    for group, count in zip(groups.tolist(), counts.tolist(), strict=True):
        yield group, first, first + count
        first += count


def _runs(pages: NDArray[np.int32]) -> Iterator[tuple[int, int, int]]:
    """(place, length, first page) of each run of neighbouring pages."""
    borders = np.flatnonzero(np.diff(pages) != 1) + 1
    starts = [0, *borders.tolist()]
    for at, end in zip(starts, [*starts[1:], len(pages)], strict=True):
        yield at, end - at, int(pages[at])
