"""Ctrl-C between steps instead of inside one, and what must come to its end whatever interrupts it.

Owns: holding back SIGINT for the length of a block, and starting again after an interrupt. Never touches: anything else.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

_TRIES = 100
"""Starts of work that is interrupted each time; more than a hand on the keyboard makes."""


@contextmanager
def hold_interrupts() -> Iterator[None]:
    """Runs the block to its end before a SIGINT takes effect; a second one takes effect at once.

    Only the main thread gets signals, and only a handler set from Python can be restored; elsewhere the block just runs.
    """
    before = signal.getsignal(signal.SIGINT) if threading.current_thread() is threading.main_thread() else None
    if not callable(before):
        yield
        return
    held: list[FrameType | None] = []

    def hold(number: int, frame: FrameType | None) -> None:
        if held:
            before(number, frame)
        held.append(frame)

    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if held:
            before(signal.SIGINT, held[0])


def to_the_end(work: Callable[[], None]) -> None:
    """Runs work that can be run again from its start until it has come to its end.

    What is no ``Exception`` (Ctrl-C, SystemExit, whatever a signal handler raises) is put off: the first of these is raised afterwards.
    """
    first: BaseException | None = None
    for _ in range(_TRIES):
        try:
            work()
        except Exception:
            raise
        except BaseException as e:
            first = first or e
        else:
            break
    if first is not None:
        raise first
