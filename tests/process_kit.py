"""Engine processes seen from outside: whether one has ended, a loop to talk to them from tests, and what a pair still holds."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from deepinfer import PrefillDecodePair

T = TypeVar("T")
Run = Callable[[Coroutine[Any, Any, T]], T]


def gone(pid: int, seconds: float) -> bool:
    """Whether a process ends within that time; a zombie has ended."""
    end = time.monotonic() + seconds
    while True:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        if time.monotonic() >= end:
            return False
        time.sleep(0.02)


@contextmanager
def event_loop(seconds: float) -> Iterator[Run[Any]]:
    """Runs coroutines, each for at most that time, in one event loop that lives as long as the block."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield lambda coroutine: asyncio.run_coroutine_threadsafe(coroutine, loop).result(seconds)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def in_use(counts: Any) -> int:
    """Blocks and slots that somebody holds. What is parked behind the last step is free for the next one."""
    return sum(c["held"] for c in [*counts["groups"], counts["slots"]])


async def at_rest(pair: PrefillDecodePair, seconds: float) -> None:
    """Waits until no block or slot is held on either side."""
    end = time.monotonic() + seconds
    while any(in_use(counts) for counts in (await pair.core_counts()).values()):
        assert time.monotonic() < end, await pair.core_counts()
        await asyncio.sleep(0.02)
    assert not pair._flights and not pair._later and not pair._boxes


def children(pid: int) -> list[int]:
    """Processes that the main thread of a process has started and not waited for."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def pause(pids: list[int]) -> None:
    """Stops processes, and returns when they stand."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    end = time.monotonic() + 10
    while any(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T" for pid in pids):
        assert time.monotonic() < end
        time.sleep(0.005)
