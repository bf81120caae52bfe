"""How many rows may share one product of index scores here: found by comparing bits once.

As for attention (``paged_attention.census``): that a library computes a row of a product alike for every row count is no promise,
so it is checked and tiles shrink where it does not hold.
"""

from __future__ import annotations

import torch

from ..paged_attention import row_quantum

ROW_TILE = 16
"""Most rows of a tile."""
_KEYS = (64, 512)  # columns of a product
_BATCHES = (1, 5)  # the number of products in a batch may choose the kernel, too

_found: dict[tuple[torch.device, int, int, int], int] = {}


def safe_row_tile(device: torch.device, heads: int, depth: int) -> int:
    """Most rows (a power of two ≤ ``ROW_TILE``) of ``heads`` each whose products keep the bits they have alone.

    Reads results back from the device: call it when a model is loaded.
    """
    key = (device, heads, depth, torch.get_num_threads())
    if key not in _found:
        tile = 1
        while tile < ROW_TILE and _same_bits(device, heads, depth, 2 * tile):
            tile *= 2
        _found[key] = tile
    return _found[key]


def row_tile(device: torch.device, heads: int, depth: int) -> int:
    """What a step uses: what was found at load; on a CPU it is found now, elsewhere ``ROW_TILE`` is taken unchecked."""
    if device.type == "cpu":
        return safe_row_tile(device, heads, depth)
    return _found.get((device, heads, depth, torch.get_num_threads()), ROW_TILE)


def _same_bits(device: torch.device, heads: int, depth: int, tile: int) -> bool:
    """Whether the first and the last row of a tile equal products of that row alone, in every shape a step may use."""
    quantum = row_quantum(device)
    few, many = (-(-rows * heads // quantum) * quantum for rows in (1, tile))
    g = torch.Generator().manual_seed(0)
    left = torch.randn(many, depth, generator=g).to(device)
    right = torch.randn(depth, max(_KEYS), generator=g).to(device)

    def product(rows: torch.Tensor, keys: int, batch: int) -> torch.Tensor:
        return torch.bmm(rows.expand(batch, -1, -1).contiguous(), right[:, :keys].expand(batch, -1, -1).contiguous())[-1, :, : min(_KEYS)]

    first, last = (product(rows, min(_KEYS), 1) for rows in (left[:few], left[many - few :]))
    wholes = [product(left, keys, batch) for keys in _KEYS for batch in _BATCHES]
    return all(torch.equal(whole[:few], first) and torch.equal(whole[-few:], last) for whole in wholes)
