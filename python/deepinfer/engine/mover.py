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
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")
Job = Callable[[], object]


class Bell:
    """A descriptor that becomes readable when it is rung; several movers may ring the same one.

    Attributes:
        fd: to be read, or slept on, by one thread.
    """

    def __init__(self) -> None:
        self.fd, self._end = os.pipe()
        os.set_blocking(self.fd, False)
        os.set_blocking(self._end, False)
        self._lock = threading.Lock()  # a number that was closed may name another file
        self._closed = False

    def ring(self) -> None:
        """From any thread; nothing after the end."""
        with self._lock:
            if not self._closed:
                with contextlib.suppress(BlockingIOError):  # full: it is readable already
                    os.write(self._end, b"\0")

    def quiet(self) -> None:
        """Takes back what was rung so far."""
        with contextlib.suppress(BlockingIOError, OSError):
            while os.read(self.fd, 4096):
                pass

    def close(self) -> None:
        """Idempotent; threads that still work may ring on."""
        with self._lock:
            if not self._closed:
                self._closed = True
                os.close(self.fd)
                os.close(self._end)


class Mover(Generic[T]):
    """A few threads; results wait for :meth:`finished`. All calls but the jobs come from one thread.

    Args:
        threads: how many.
        bell: rung when results wait, closed by whoever gave it; ``None`` = one of its own.
    """

    def __init__(self, threads: int, bell: Bell | None = None) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._done: deque[tuple[T, object]] = deque()
        self.bell, self._own = (Bell(), True) if bell is None else (bell, False)
        self._threads = [threading.Thread(target=_serve, args=(self._jobs,), name=f"mover-{i}", daemon=True) for i in range(threads)]
        for thread in self._threads:
            thread.start()
        self._end = weakref.finalize(self, _stop, self._jobs, threads)
        self._closed = False

    def submit(self, key: T, job: Job) -> None:
        """Runs a job; its result, or the exception it raised, comes back under ``key``."""
        done, bell = self._done, self.bell

        def run() -> None:
            try:
                result = job()
            except BaseException as e:  # of whatever kind: the thread goes on, and whoever waits for this job hears of it
                result = e
            done.append((key, result))
            bell.ring()

        self._jobs.put(run)

    def send_off(self, job: Job) -> None:
        """Runs a job whose outcome changes nothing here."""

        def run() -> None:
            with contextlib.suppress(BaseException):
                job()

        self._jobs.put(run)

    def finished(self) -> Iterator[tuple[T, object]]:
        """Keys and results (or exceptions) of the jobs done since the last call. Each is gone when it is given."""
        self.bell.quiet()
        while self._done:
            yield self._done.popleft()

    def close(self, seconds: float = 1.0) -> None:
        """Lets the jobs that were submitted end, for so long at most; idempotent."""
        if self._closed:
            return
        self._closed = True
        self._end()
        deadline = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if self._own:
            self.bell.close()


def _serve(jobs: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (job := jobs.get()) is not None:
        job()
        del job  # while it waits, the thread holds nothing of the job before


def _stop(jobs: queue.SimpleQueue[Callable[[], None] | None], threads: int) -> None:
    for _ in range(threads):
        jobs.put(None)
