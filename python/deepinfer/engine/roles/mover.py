"""Threads for what has to wait: copies to finish, the other side to answer.

Owns: running jobs off the step thread, and telling it when one is done. Never touches: what the jobs do. The threads are daemons: a
peer that does not answer never keeps the process from ending.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")
Job = Callable[[], object]


class Mover(Generic[T]):
    """A few threads; results wait for :meth:`finished`. All calls but the jobs come from one thread.

    Attributes:
        wake_fd: readable while results wait.
    """

    def __init__(self, threads: int) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._done: deque[tuple[T, object]] = deque()
        self.wake_fd, self._bell = os.pipe()
        os.set_blocking(self.wake_fd, False)
        os.set_blocking(self._bell, False)
        self._threads = [threading.Thread(target=_serve, args=(self._jobs,), name=f"mover-{i}", daemon=True) for i in range(threads)]
        for thread in self._threads:
            thread.start()
        self._end = weakref.finalize(self, _stop, self._jobs, threads)
        self._closed = False

    def submit(self, key: T, job: Job) -> None:
        """Runs a job; its result, or the exception it raised, comes back under ``key``."""
        done, bell = self._done, self._bell

        def run() -> None:
            try:
                result = job()
            except BaseException as e:  # of whatever kind: the thread goes on, and whoever waits for this job hears of it
                result = e
            done.append((key, result))
            with contextlib.suppress(OSError):  # full: it is readable already; closed: nobody waits any more
                os.write(bell, b"\0")

        self._jobs.put(run)

    def send_off(self, job: Job) -> None:
        """Runs a job whose outcome changes nothing here."""

        def run() -> None:
            with contextlib.suppress(BaseException):
                job()

        self._jobs.put(run)

    def finished(self) -> list[tuple[T, object]]:
        """Keys and results (or exceptions) of the jobs done since the last call."""
        with contextlib.suppress(BlockingIOError):  # also when nothing is done: a bell may come after its result was taken
            while os.read(self.wake_fd, 4096):
                pass
        found = []
        while self._done:
            found.append(self._done.popleft())
        return found

    def close(self, seconds: float = 1.0) -> None:
        """Lets the jobs that were submitted end, for so long at most; idempotent."""
        if self._closed:
            return
        self._closed = True
        self._end()
        deadline = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        # A thread that still waits for a peer may ring once more: its end of the pipe stays open then.
        if not any(thread.is_alive() for thread in self._threads):
            os.close(self.wake_fd)
            os.close(self._bell)


def _serve(jobs: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (job := jobs.get()) is not None:
        job()
        del job  # while it waits, the thread holds nothing of the job before


def _stop(jobs: queue.SimpleQueue[Callable[[], None] | None], threads: int) -> None:
    for _ in range(threads):
        jobs.put(None)
