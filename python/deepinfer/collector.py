"""Python's garbage collector around what is made once and stays.

Owns: when it rests, and what it no longer walks. Never touches: what is made.

torch and what stands on it are half a million objects that live as long as the process. A collector that walks them while they are made
takes a tenth of an import, and each full collection afterwards, of which a start has several, a tenth of a second.
"""

from __future__ import annotations

import atexit
import gc
from collections.abc import Iterator
from contextlib import contextmanager

atexit.register(gc.unfreeze)  # the interpreter's end takes down what is not frozen alone, and some libraries complain of the rest


@contextmanager
def importing() -> Iterator[None]:
    """A block that imports what stays: nothing is collected meanwhile, and later collections do not walk what is there by its end."""
    collects = gc.isenabled()
    gc.collect()  # what is garbage now would be left out of later collections too
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if collects:
            gc.enable()


def settle() -> None:
    """Collects, and leaves what remains out of later collections until ``gc.unfreeze``."""
    gc.collect()
    gc.freeze()
