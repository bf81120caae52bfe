"""Copies of state slices out of sequences' replicas and back into live state rows.

Owns: which bytes of a row a slice is, and the copies. Never touches: which sequences, where slices are kept.

A slice is the stored region of every state group, one behind the other. Out of a row it is read from the replica, which is the state at a
boundary with the places outside of its windows cleared; back it goes to the live bytes, whose other regions stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from deepinfer.models.base import StateGroup
from deepinfer.platforms import to_device
from deepinfer.worker.device_queue import DeviceQueue, Ticket
from deepinfer.worker.kv_cache import KVCache


class SliceCopy:
    """Slices of some rows on their way to host memory."""

    def __init__(self, queue: DeviceQueue, ticket: Ticket, found: list[torch.Tensor]) -> None:
        self._queue, self._ticket, self._found = queue, ticket, found

    @property
    def done(self) -> bool:
        """Whether :meth:`wait` would return at once."""
        return self._queue.done(self._ticket)

    def wait(self) -> torch.Tensor:
        """uint8 ``[rows, bytes]`` in host memory. Raises what went wrong on the device's way."""
        self._queue.wait(self._ticket)
        return self._found[0]


class SliceCopies:
    """Copies for one device.

    Args:
        kv: the device's tensors; ``state``: the groups of their states, each with a replica.
        queue: the device's; copies go behind what was handed over before them.
        pinned: page-locked host memory, as a GPU needs it.
    """

    def __init__(self, kv: KVCache, state: Sequence[StateGroup], queue: DeviceQueue, pinned: bool) -> None:
        self._rows = list(kv.states)
        self._spans = [(group.stored, group.replica_at) for group in state]
        self._queue, self._pinned = queue, pinned
        self.num_bytes = slice_bytes(state)

    def out(self, slots: Sequence[int]) -> SliceCopy:
        """Begins to copy the slices of state slots to host memory."""
        rows = to_device(torch.tensor(slots, dtype=torch.int64), self._rows[0].device)
        found: list[torch.Tensor] = []

        @torch.inference_mode()
        def work() -> None:
            parts = [r[:, at : at + n].index_select(0, rows) for r, (n, at) in zip(self._rows, self._spans, strict=True)]
            staged = torch.cat(parts, 1)
            if self._pinned:
                host = torch.empty(staged.shape, dtype=torch.uint8, pin_memory=True)
                staged = host.copy_(staged, non_blocking=True)
            found.append(staged)

        ticket = Ticket()
        self._queue.submit(ticket, work, last=True)
        return SliceCopy(self._queue, ticket, found)

    def back(self, data: bytes, slot: int) -> Callable[[], None]:
        """Work that puts a slice of ``num_bytes`` bytes into the live bytes of a row; to be run in the device's order."""
        ready = to_device(torch.frombuffer(bytearray(data), dtype=torch.uint8), self._rows[0].device)

        @torch.inference_mode()
        def work() -> None:
            for row, part in zip(self._rows, ready.split([n for n, _ in self._spans]), strict=True):
                row[slot, : len(part)].copy_(part)

        return work


def slice_bytes(state: Sequence[StateGroup]) -> int:
    """Bytes of one slice."""
    return sum(group.stored for group in state)
