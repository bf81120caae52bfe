"""The device's queue: work is handed over in order, runs in order, and is waited for step by step.

Owns: order, the wait for a step, where a failure of a step surfaces, and when each step ran. Never touches: what the work is.

On a GPU the queue is the current stream: handing over means launching. On a CPU it is one thread, so that the step loop plans
while the processor computes; with ``overlap=False`` it is the calling thread itself. Whatever reads or writes device memory (KV,
block table, sampling state) is work; what looks at the core or at requests is done before, by the launching thread.
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeVar

import torch

from deepinfer.errors import EngineDeadError

T = TypeVar("T")
Work = Callable[[], None]

_LOOK = 1.0
"""Seconds between two looks whether the thread that is waited for still runs."""


class StepTimes(NamedTuple):
    """Seconds by the device's clock: idle before the step, its commands (0 if its forward is its first work), forward, and the rest."""

    idle: float
    commands: float
    forward: float
    sample: float


class Ticket:
    """One step (or one piece of other work) in the queue. Its failure stays with it: later work of the ticket is skipped."""

    __slots__ = ("done", "error", "marks")

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self.done = threading.Event()
        self.marks: list[Any] = []
        """Moments: before the first work, after each work."""


class Handed:
    """Work that was handed over: call it to wait for its end, on any thread; raises what the work raised."""

    __slots__ = ("_queue", "_ticket")

    def __init__(self, to: DeviceQueue, ticket: Ticket) -> None:
        self._queue, self._ticket = to, ticket

    def __call__(self) -> None:
        self._queue.wait(self._ticket)

    @property
    def done(self) -> bool:
        """Whether the call would return at once."""
        return self._queue.done(self._ticket)


class DeviceQueue(Protocol):
    """What runs the worker's device half. Calls come from one thread at a time."""

    def submit(self, ticket: Ticket, work: Work, *, last: bool) -> None:
        """Hands over the next work of a ticket; ``last`` closes it. An exception of the work is kept in the ticket."""

    def wait(self, ticket: Ticket) -> None:
        """Returns when the ticket's last work is done.

        Raises:
            BaseException: what its work raised.
        """

    def done(self, ticket: Ticket) -> bool:
        """Whether a wait for the ticket, whose last work has been handed over, would return at once."""

    def times(self, ticket: Ticket, before: Ticket | None) -> StepTimes | None:
        """When a waited-for step ran; ``before`` is the step ahead of it. ``None`` if it did not run to its end."""

    def close(self) -> None:
        """Waits for the work at hand, drops the rest (its tickets fail); idempotent. Later work fails."""


def make_queue(device: torch.device, overlap: bool) -> DeviceQueue:
    """The queue of a device."""
    if device.type == "cuda":
        return StreamQueue(device)
    return ThreadQueue() if overlap else InlineQueue()


def run_in_order(to: DeviceQueue, work: Callable[[], T]) -> T:
    """Runs something behind all that was handed over, and waits for its result."""
    result: list[T] = []
    ticket = Ticket()
    to.submit(ticket, lambda: result.append(work()), last=True)
    to.wait(ticket)
    return result[0]


def _perform(ticket: Ticket, work: Work) -> None:
    if ticket.error is not None:
        return
    if not ticket.marks:
        ticket.marks.append(time.perf_counter())
    work()
    ticket.marks.append(time.perf_counter())


def _host_times(ticket: Ticket, before: Ticket | None) -> StepTimes | None:
    if len(ticket.marks) < 3 or ticket.error is not None:
        return None
    begin, commands, forward, end = ticket.marks[0], *ticket.marks[-3:]
    idle = begin - before.marks[-1] if before is not None and before.marks else 0.0
    return StepTimes(max(idle, 0.0), commands - begin, forward - commands, end - forward)


class InlineQueue:
    """Work is done where it is handed over. An interrupt goes straight to the caller."""

    def submit(self, ticket: Ticket, work: Work, *, last: bool) -> None:
        """See :class:`DeviceQueue`."""
        try:
            _perform(ticket, work)
        except Exception as e:
            ticket.error = e
        if last:
            ticket.done.set()

    def wait(self, ticket: Ticket) -> None:
        """See :class:`DeviceQueue`."""
        if ticket.error is not None:
            raise ticket.error

    def done(self, ticket: Ticket) -> bool:
        """See :class:`DeviceQueue`."""
        return ticket.done.is_set()

    def times(self, ticket: Ticket, before: Ticket | None) -> StepTimes | None:
        """See :class:`DeviceQueue`."""
        return _host_times(ticket, before)

    def close(self) -> None:
        """See :class:`DeviceQueue`."""


class _Shared:
    """What the thread and its owner both see; the thread must not keep its owner alive."""

    __slots__ = ("closing", "tasks")

    def __init__(self) -> None:
        self.tasks: queue.SimpleQueue[tuple[Ticket, Work, bool] | None] = queue.SimpleQueue()
        self.closing = False


class ThreadQueue:
    """One thread that does the work in order. It ends with :meth:`close`, with its owner, or with the interpreter."""

    def __init__(self) -> None:
        self._shared = _Shared()
        self._thread = threading.Thread(
            target=_serve, args=(self._shared, torch.get_num_threads()), name="deepinfer-device-queue", daemon=True
        )
        self._thread.start()
        self._end = weakref.finalize(self, _end, self._shared, self._thread)

    def submit(self, ticket: Ticket, work: Work, *, last: bool) -> None:
        """See :class:`DeviceQueue`."""
        if self._shared.closing:
            ticket.error = ticket.error or EngineDeadError("the device queue is closed")
            ticket.done.set()
            return
        self._shared.tasks.put((ticket, work, last))

    def wait(self, ticket: Ticket) -> None:
        """See :class:`DeviceQueue`."""
        while not ticket.done.wait(_LOOK):
            if not self._thread.is_alive() and not ticket.done.is_set():
                ticket.error = ticket.error or EngineDeadError("the thread of the device queue has ended")
                break
        if ticket.error is not None:
            raise ticket.error

    def done(self, ticket: Ticket) -> bool:
        """See :class:`DeviceQueue`."""
        return ticket.done.is_set()

    def times(self, ticket: Ticket, before: Ticket | None) -> StepTimes | None:
        """See :class:`DeviceQueue`."""
        return _host_times(ticket, before)

    def close(self) -> None:
        """See :class:`DeviceQueue`."""
        try:
            self._end()
        except KeyboardInterrupt:
            self._thread.join()  # it ends after the work at hand, whatever the user wants
            raise


def _end(shared: _Shared, thread: threading.Thread) -> None:
    shared.closing = True
    shared.tasks.put(None)
    if thread is not threading.current_thread():  # the last reference to the owner may have been a piece of work
        thread.join()


def _serve(shared: _Shared, num_threads: int) -> None:
    try:
        torch.set_num_threads(num_threads)  # of OpenMP each thread has a number of its own
        _perform_all(shared)
    finally:  # whatever ended it: nobody waits for a thread that is gone
        shared.closing = True
        while not shared.tasks.empty():
            if (task := shared.tasks.get()) is not None:
                task[0].error = task[0].error or EngineDeadError("the device queue has ended")
                task[0].done.set()


def _perform_all(shared: _Shared) -> None:
    while (task := shared.tasks.get()) is not None:
        ticket, work, last = task
        if shared.closing:
            ticket.error = ticket.error or EngineDeadError("the device queue is closed")
        else:
            try:
                _perform(ticket, work)
            except BaseException as e:
                ticket.error = e
        if last:
            ticket.done.set()
        del task, ticket, work  # while it waits, the thread holds nothing of the step before


class StreamQueue:
    """The current stream of a GPU, whichever is the calling thread's. Work launches kernels and copies; events tell when they are through.

    A Python error of a launch stays with its step; an error of the device itself surfaces at the next wait and is final.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._spare: list[torch.cuda.Event] = []

    def _mark(self, ticket: Ticket) -> None:
        event = self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True)
        event.record()
        ticket.marks.append(event)

    def submit(self, ticket: Ticket, work: Work, *, last: bool) -> None:
        """See :class:`DeviceQueue`."""
        with torch.cuda.device(self._device):
            try:
                if ticket.error is None:
                    if not ticket.marks:
                        self._mark(ticket)
                    work()
            except Exception as e:
                ticket.error = e
            self._mark(ticket)  # also of a failed step: its copies may still read the ring
        if last:
            ticket.done.set()

    def wait(self, ticket: Ticket) -> None:
        """See :class:`DeviceQueue`."""
        if ticket.marks:
            ticket.marks[-1].synchronize()
        if ticket.error is not None:
            raise ticket.error

    def done(self, ticket: Ticket) -> bool:
        """See :class:`DeviceQueue`."""
        return ticket.done.is_set() and all(mark.query() for mark in ticket.marks[-1:])

    def times(self, ticket: Ticket, before: Ticket | None) -> StepTimes | None:
        """See :class:`DeviceQueue`."""
        if len(ticket.marks) < 3 or ticket.error is not None:
            return None
        begin, commands, forward, end = ticket.marks[0], *ticket.marks[-3:]
        idle = before.marks[-1].elapsed_time(begin) if before is not None and before.marks else 0.0
        pieces = (begin.elapsed_time(commands), commands.elapsed_time(forward), forward.elapsed_time(end))
        found = StepTimes(max(idle, 0.0) / 1e3, *(ms / 1e3 for ms in pieces))
        if before is not None:
            self._spare += before.marks
            before.marks = []
        return found

    def close(self) -> None:
        """See :class:`DeviceQueue`."""
        with torch.cuda.device(self._device):
            end = torch.cuda.Event()
            end.record()
        end.synchronize()
