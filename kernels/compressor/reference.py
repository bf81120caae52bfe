"""Pooling of disjoint groups of ``r`` tokens, ``j r … j r + r - 1`` for entry ``j`` (DeepSeek-V4.1's compressor; no overlap, no bias).

``entry_j = sum_t softmax_t(z_t) c_t`` per channel, float32. The entry is made by the row of the group's last token. Raw ``(c, z)`` rows
are kept in a ring deep enough that a group may close, be taken back and close again.
"""

from __future__ import annotations

import torch

from ..window_rows import WindowPlan


def compress(c: torch.Tensor, z: torch.Tensor, plan: WindowPlan, pending: torch.Tensor) -> torch.Tensor:
    """``c``, ``z`` float32 ``[T, D]`` (values and gates) → float32 ``[T, D]``: entries in the rows that close a group, zeros elsewhere.

    ``plan`` has windows of ``r`` rows on rings of ``P`` places. Members come from the step's rows or from ``pending`` float32
    ``[slots, P, 2, D]``, whose places of the newest ``P`` rows of every sequence then become those of this step.
    """
    rows = torch.stack((c, z), 1)
    known = plan.assemble(pending, rows)
    members = [known.index_select(0, place) for place in plan.index.unbind(1)]
    top = members[0][:, 1]
    for member in members[1:]:
        top = torch.maximum(top, member[:, 1])
    total, pooled = torch.zeros_like(c), torch.zeros_like(c)
    for member in members:
        weight = (member[:, 1] - top).exp_()
        total += weight
        pooled += weight.mul_(member[:, 0])
    plan.store(pending, rows)
    closes = (plan.step.pos + 1) % plan.window == 0
    return torch.where(closes[:, None], pooled.div_(total), 0.0)
