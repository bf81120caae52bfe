"""Turns a hidden wait for the GPU into an error, for tests of the launch path.

torch's sync debug mode is one process-wide value without nesting, so it is set and restored here, and what it does not see
(event, stream and device waits asked for by Python) is patched for the time of the guard.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn
from unittest.mock import patch

import torch


class HiddenSyncError(AssertionError):
    """Something on the launch path waited for the device."""


def _refuse(*_: Any, **__: Any) -> NoReturn:
    raise HiddenSyncError("the launch path waited for the device")


@contextmanager
def forbid_sync() -> Iterator[None]:
    """Within it, waits for the GPU raise: implicit ones (`.item()`, boolean masks, blocking copies) and explicit ones."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with (
            patch.object(torch.cuda, "synchronize", _refuse),
            patch.object(torch.cuda.Event, "synchronize", _refuse),
            patch.object(torch.cuda.Stream, "synchronize", _refuse),
        ):
            yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
