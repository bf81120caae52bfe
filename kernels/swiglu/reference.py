"""SwiGLU (Shazeer 2020): ``silu(gate) * up``."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """``gate_up`` ``[T, 2 I]`` (gate first) → ``[T, I]`` in the same dtype; elementwise, so rows are independent."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)
