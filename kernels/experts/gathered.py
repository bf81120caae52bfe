"""Many experts: only what was chosen is computed, and only weights of chosen experts are read.

Pairs of row and expert are sorted by expert on the device and cut into tiles of a fixed number of rows with one expert each. How
many tiles there may be follows from the sizes; those beyond the needed ones are empty. Every tile is one product of a fixed shape
with the weights of its expert, so a row's bits depend neither on its mates nor on where it stands.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from ..paged_attention import row_quantum
from ..ragged_tiles import ragged_tiles


def _bytes_at_once(device: torch.device) -> int:
    """Bytes of gathered weights held at once."""
    return 64 << 20 if device.type == "cpu" else 4 << 30


def _tiles(place: torch.Tensor, experts: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """``place`` int64 ``[P]`` of each pair, negative = none → pairs of every tile int64 ``[m, size]`` (``P`` where there is none) and its
    place ``[m]``."""
    pairs, device = place.shape[0], place.device
    place = torch.where(place < 0, experts, place)  # behind all others
    order = place.argsort(stable=True)
    count = torch.zeros(experts + 1, dtype=torch.int64, device=device).scatter_add_(0, place, torch.ones_like(place))[:experts]
    end = count.cumsum(0)
    member, real, owner = ragged_tiles(end - count, end, size, min(pairs, pairs // size + experts))
    return torch.where(real, order.index_select(0, member.clamp(0, pairs - 1).flatten()).view(member.shape), pairs), owner


def gathered_mlp(
    u: torch.Tensor,
    place: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    inner: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """What each chosen expert gives: float32 ``[T, k, d]``.

    ``u`` ``[T, d]``, ``place`` int64 ``[T, k]`` (negative = nowhere, which gives zeros), ``weights`` float32 ``[T, k]``; ``gate_up``
    ``[P, 2 m, d]`` and ``down`` ``[P, d, m]`` are the experts by place. ``inner`` makes of the first product ``[..., 2 m]`` and weights
    ``[..., 1]`` the rows ``[..., m]`` of the second product.
    """
    chosen = place.shape[1]
    size = row_quantum(u.device)
    tiles, owner = _tiles(place.flatten(), gate_up.shape[0], size)
    pairs = place.numel()
    out = torch.zeros(pairs + 1, u.shape[1], dtype=torch.float32, device=u.device)  # the last row takes what tiles lack
    given = F.pad(weights.flatten(), (0, 1))
    at_once = max(1, _bytes_at_once(u.device) // ((gate_up[0].numel() + down[0].numel()) * gate_up.element_size()))
    for first in range(0, tiles.shape[0], at_once):
        tile, expert = tiles[first : first + at_once], owner[first : first + at_once]
        pair = tile.flatten()
        rows = u.index_select(0, (pair // chosen).clamp_max(u.shape[0] - 1)).unflatten(0, tile.shape)
        weight = given.index_select(0, pair).unflatten(0, tile.shape).unsqueeze(-1)
        row = inner(torch.bmm(rows, gate_up.index_select(0, expert).transpose(1, 2)), weight)
        out.index_copy_(0, pair, torch.bmm(row, down.index_select(0, expert).transpose(1, 2)).float().flatten(0, 1))
    return out[:pairs].unflatten(0, place.shape)
