"""How many query rows one product may have here: found by comparing bits once, when a model is loaded.

The operator counts on a library computing a row of a product alike for every row count it uses. That held on every machine
tried, but it is no promise of the library, so it is checked, and prefill blocks shrink if it does not hold.
"""

from __future__ import annotations

from functools import cache

import torch

from .plan import KEY_TILE, QUERY_BLOCK
from .reference import row_quantum

_BATCHES = (1, 5)  # the number of products in a batch may choose the kernel, too


def safe_query_block(device: torch.device, head_dim: int, group: int, invariant: bool = True) -> int:
    """Most prefill rows to compute together (≤ ``QUERY_BLOCK``) so that a row keeps the bits it has as a decoding row.

    ``group`` is the number of query heads of one KV head. Reads results back from the device: not for the path of a step. Without
    ``invariant`` nothing is compared.
    """
    if not invariant:
        return QUERY_BLOCK
    return _census(device, head_dim, group, torch.get_num_threads())


@cache
def _census(device: torch.device, head_dim: int, group: int, threads: int) -> int:
    quantum = row_quantum(device)

    def padded(rows: int) -> int:
        return -(-rows * group // quantum) * quantum

    g = torch.Generator().manual_seed(0)
    left = torch.randn(padded(QUERY_BLOCK), head_dim, generator=g).to(device)
    keys = torch.randn(KEY_TILE, head_dim, generator=g).to(device)
    for rows in range(1, QUERY_BLOCK + 1):
        if rows > 1 and padded(rows) != padded(rows - 1) and not _same_bits(left, keys, padded(1), padded(rows)):
            return rows - 1
    return QUERY_BLOCK


def _same_bits(left: torch.Tensor, keys: torch.Tensor, few: int, many: int) -> bool:
    """Whether the first and the last ``few`` of ``many`` rows equal products of ``few`` rows, for both products."""

    def both(rows: torch.Tensor, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
        scores = torch.bmm(rows.expand(batch, -1, -1).contiguous(), keys.expand(batch, -1, -1).contiguous().transpose(1, 2))
        return scores[-1], torch.bmm(scores, keys.expand(batch, -1, -1).contiguous())[-1]

    for batch in _BATCHES:
        for whole, first, last in zip(both(left[:many], batch), both(left[:few], 1), both(left[many - few : many], 1), strict=True):
            if not torch.equal(whole[:few], first) or not torch.equal(whole[-few:], last):
                return False
    return True
