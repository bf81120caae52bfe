"""The form of ``begin_step`` for a device."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..toolchain import loading
from .reference import begin_step


def begin_step_on(device: torch.device) -> Callable[..., None]:
    """``begin_step`` as one kernel on a GPU that can have it, else the reference."""
    if device.type != "cuda":
        return begin_step
    from .cuda import BeginStep

    kernels = loading.load(BeginStep.programs(), device)
    return begin_step if kernels is None else BeginStep(*kernels)
