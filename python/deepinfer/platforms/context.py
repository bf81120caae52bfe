"""The driver's idea of the current device, for calls that go to it directly."""

from __future__ import annotations

import torch


def make_current(device: torch.device) -> None:
    """Makes the context of ``device``, a GPU that is torch's current one, the calling thread's: torch does so at a thread's first call."""
    torch.cuda.current_stream(device).synchronize()
