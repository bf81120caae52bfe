"""Attention over one image: no mask, and rotary embedding in two dimensions.

Half of a head's angles follow the patch's row and half its column: with ``f_i = theta^(-2 i / (d / 2))``, ``i`` in ``0 … d/4 - 1``, the
angles of the patch in row ``y`` and column ``x`` are ``y f_0, y f_1, …, x f_0, x f_1, …``; channels that turn together are ``i`` and
``i + d/2``. Images are computed one by one, so that no number of one depends on another.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..rope import RopeParameters, RopeTable, apply_rope


def grid_table(head_dim: int, theta: float, device: torch.device) -> RopeTable:
    """Frequencies of either direction, made once; ``head_dim`` is a multiple of 4."""
    return RopeTable(RopeParameters(head_dim // 2, theta), device)


def grid_angles(high: int, wide: int, table: RopeTable) -> tuple[torch.Tensor, torch.Tensor]:
    """Float32 ``cos`` and ``sin`` ``[high * wide, 1, head_dim]`` of a grid in reading order, as ``rope.apply_rope`` takes them."""
    places = (torch.arange(n, device=table.frequencies.device) for n in (high, wide))
    (row_cos, row_sin), (column_cos, column_sin) = (table.pair_cos_sin(place) for place in places)

    def whole(of_row: torch.Tensor, of_column: torch.Tensor) -> torch.Tensor:
        rows = of_row[:, None].expand(high, wide, -1)
        return torch.cat((rows, of_column[None].expand(high, wide, -1)), -1).flatten(0, 1).unsqueeze(1)

    cos, sin = whole(row_cos, column_cos), whole(row_sin, column_sin)
    return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


def grid_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """``q``, ``k``, ``v`` ``[N, heads, d]`` of one image and its ``grid_angles`` → ``[N, heads, d]`` in the same dtype.

    ``softmax(q kᵀ d^-0.5) v`` over all ``N`` patches, queries and keys turned in float32.
    """
    q, k = (apply_rope(x, cos, sin).to(x.dtype) for x in (q, k))
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v).squeeze(0).transpose(0, 1)
