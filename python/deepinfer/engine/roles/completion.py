"""What a completion engine does with a sequence that arrives.

Owns: from a hand-over record to the sequence being ready to run, or the request being refused. Never touches: the front, the other engine.

Blocks and slot are reserved first, then a thread fetches the payload into host memory, then it is copied to its pages in the device's
order, and only when that has gone well may the sequence run. Nobody but this engine writes to its pages, so a payload that comes too late
is dropped on the host. Every way out of here, success included, ends in one release at the owner.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from deepinfer.engine.mover import Bell, Mover
from deepinfer.engine.roles.device import PageCopies
from deepinfer.engine.roles.transport import Transport
from deepinfer.errors import DeepInferError, HandoverError, KvLayoutError, NoRoomError, TransferError
from deepinfer.kvcache.handover import Handover
from deepinfer.kvcache.layout import KvLayout

if TYPE_CHECKING:
    from deepinfer import _core
    from deepinfer.worker.runner import ModelRunner

_THREADS = 8
_RETRY = 0.005
"""Seconds between two tries to reserve blocks while nothing runs."""


@dataclass(slots=True)
class _Incoming:
    """A sequence whose KV has not arrived."""

    record: Handover
    handle: int
    order: int  # among those that wait for room
    transfer: _core.Transfer | None = None
    payload: torch.Tensor | None = None
    storing: bool = False  # it is here and on its way to its pages
    wanted: bool = True


class CompletionRole:
    """See the head of this file; one of an engine, on its step thread.

    Args:
        core, runner: the engine's.
        layout: of the runner's KV.
        transport: where payloads are fetched; closed with the role.
        lease: seconds that the core lets a sequence wait for its KV.
        bell: rung when something has moved on.
    """

    def __init__(self, core: _core.Core, runner: ModelRunner, layout: KvLayout, transport: Transport, lease: float, bell: Bell) -> None:
        self._core, self._layout, self._transport, self._lease = core, layout, transport, lease
        self._copies = PageCopies(runner, layout)
        self._mover: Mover[_Incoming] = Mover(_THREADS, bell)
        self._incoming: dict[int, _Incoming] = {}
        self._late: list[_Incoming] = []  # given up while a thread still fetches
        self._tickets: dict[int, bytes] = {}  # by the number that the core knows a request under
        self._numbers = itertools.count(1)
        self._newest = 0

    @property
    def busy(self) -> bool:
        """Whether steps are needed though no request is unfinished: until every block is back and every owner has been told."""
        return bool(self._incoming or self._late or self._tickets)

    def rest(self) -> float:
        """Seconds after which to look although nothing has rung."""
        reserving = any(i.transfer is None for i in self._incoming.values())
        return _RETRY if reserving or (self._tickets and not self._incoming and not self._late) else 1.0

    def check(self, record: Handover, has_grammar: bool) -> None:
        """Refuses a record whose payload this engine cannot read.

        Raises:
            KvLayoutError: its KV means something else here.
            HandoverError: its answer follows a grammar, and none came with it.
        """
        differences = self._layout.differences(record.layout)
        if differences:
            raise KvLayoutError(f"the KV of this request was made by another kind of engine: {'; '.join(differences)}")
        if record.grammar is not None and not has_grammar:
            raise HandoverError(f"the answer follows the grammar {record.grammar!r}, which did not come with the request")

    def refuse(self, ticket: bytes) -> None:
        """Lets the owner of a payload go that no request here waits for."""
        if ticket:
            self._mover.send_off(lambda: self._transport.release(ticket))

    def admit(self, record: Handover, add: Callable[[int], int]) -> int:
        """Adds a checked record's sequence through ``add(number)``, which gives the core's handle or raises; gives the handle."""
        number = next(self._numbers)
        self._tickets[number] = record.ticket
        try:
            handle = add(number)
        except Exception:
            self.refuse(self._tickets.pop(number))
            raise
        order = record.order or self._newest + 1
        self._newest = max(self._newest, order)
        self._incoming[handle] = _Incoming(record, handle, order)
        return handle

    def poll(self) -> list[tuple[int, DeepInferError]]:
        """Moves arrivals on, ahead of the next schedule. Gives handles of sequences that ended here, and why."""
        failed: list[tuple[int, DeepInferError]] = []
        for incoming, result in self._mover.finished():
            error = self._moved(incoming, result)
            if error is not None:
                failed.append((incoming.handle, error))
        for incoming in sorted((i for i in self._incoming.values() if i.transfer is None), key=lambda i: i.order):
            if not self._reserve(incoming):
                break  # room is for the oldest: else small ones that keep coming would hold a large one out for good
        for _, number in self._core.drain_remote_releases():
            self.refuse(self._tickets.pop(number, b""))
        return failed

    def _reserve(self, incoming: _Incoming) -> bool:
        """Takes room for a sequence and has its KV fetched; False while there is none."""
        info = self._core.info(incoming.handle)
        if info is None or info["status"] != "wait_kv":
            return True  # the core has not seen it yet, or has ended it
        record, transport = incoming.record, self._transport
        try:
            transfer = self._core.begin_load(incoming.handle, record.computed)
        except TransferError:
            return False  # its lease bounds how long this is tried
        payload = self._copies.buffer(record.computed)
        incoming.transfer, incoming.payload = transfer, payload
        self._mover.submit(incoming, lambda: transport.pull(record.ticket, [payload]))
        return True

    def _moved(self, incoming: _Incoming, result: object) -> DeepInferError | None:
        """A payload was fetched, or stored, or neither; gives the error that ended it."""
        transfer, payload, record = incoming.transfer, incoming.payload, incoming.record
        assert transfer is not None and payload is not None
        if not incoming.wanted:
            self._late.remove(incoming)
            self._core.transfer_ended(transfer["transfer"], False)
            return None
        error: DeepInferError | None = None
        if isinstance(result, BaseException):
            what = "stored" if incoming.storing else "fetched"
            error = result if isinstance(result, HandoverError) else HandoverError(f"its KV could not be {what}: {result}")
        elif (info := self._core.info(incoming.handle)) is None or info["status"] != "wait_kv":
            error = HandoverError(self._too_late())
        elif not incoming.storing:
            if result == record.digest():
                pages, slot = transfer["pages"], transfer["state_slot"]
                incoming.storing = True
                self._mover.submit(incoming, self._copies.write(record.computed, pages, slot, payload, transfer["present"]))
                return None
            error = HandoverError("the KV that came is that of another request")
        del self._incoming[incoming.handle]
        if error is not None:
            self._core.abort(incoming.handle)  # first, so that the failed load does not have the prompt computed here
        self._core.transfer_ended(transfer["transfer"], error is None)
        return error

    def late(self, handle: int) -> HandoverError | None:
        """What to say of a sequence that the core ended while its KV was on the way; ``None`` if it was not."""
        incoming = self._incoming.get(handle)
        if incoming is None:
            return None
        if incoming.transfer is None:
            return NoRoomError(f"there was no room for its KV within {self._lease:g} s; the sequences that run here need all of it")
        return HandoverError(self._too_late())

    def _too_late(self) -> str:
        return f"its KV did not arrive within {self._lease:g} s"

    def forget(self, handle: int) -> None:
        """A sequence has ended: what is still on the way for it comes too late."""
        incoming = self._incoming.pop(handle, None)
        if incoming is not None:
            incoming.wanted = False
            if incoming.transfer is not None:
                self._late.append(incoming)

    def abort(self, request_id: str) -> None:
        """Its sequences are forgotten one by one."""

    def close(self) -> None:
        """Gives up what is on the way and tells the owners."""
        for ticket in self._tickets.values():
            self.refuse(ticket)
        self._tickets.clear()
        self._mover.close()
        self._transport.close()
