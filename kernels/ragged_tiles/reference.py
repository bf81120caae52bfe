"""Tiles of one size over groups of any length, none of which holds members of two groups.

Integers only, and nothing is read by the host: how many tiles there can be at most follows from sizes that it knows.
"""

from __future__ import annotations

import torch


def ragged_tiles(first: torch.Tensor, end: torch.Tensor, size: int, most: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Members int64 ``[most, size]`` of every tile, whether there is such a member, bool of the same shape, and its group ``[most]``.

    Group ``g`` has the members ``first[g]`` to ``end[g]`` (int64 ``[groups]``). ``most`` bounds the tiles; those beyond the needed
    ones have no members.
    """
    tiles = (end - first + (size - 1)) // size
    last = tiles.cumsum(0)
    number = torch.arange(most, device=first.device)
    group = torch.searchsorted(last, number, right=True).clamp_max(first.shape[0] - 1)
    local = number - (last - tiles).index_select(0, group)
    member = (first.index_select(0, group) + local * size)[:, None] + torch.arange(size, device=first.device)
    return member, member < end.index_select(0, group)[:, None], group
