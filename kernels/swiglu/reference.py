"""SwiGLU (Shazeer 2020): ``silu(gate) * up``."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..activations import silu


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """``gate_up`` ``[T, 2 I]`` (gate first) → ``[T, I]`` in the same dtype; elementwise, so rows are independent."""
    gate, up = gate_up.chunk(2, dim=-1)
    if gate.dtype == torch.float32 and gate.device.type == "cpu":
        # torch's own rounds the last few numbers of a thread's piece in another way; narrower types hide that
        return silu(gate).mul_(up)
    return F.silu(gate).mul_(up)
