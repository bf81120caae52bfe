"""How values that are rounded or chosen are compared between implementations whose float32 sums differ in the last bit."""

from __future__ import annotations

import torch

from deepseek_v41.sequential import Shared


def share_that_differs(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Part of the numbers that are not equal; ``AssertionError`` for other shapes."""
    assert ours.shape == theirs.shape
    return float((ours != theirs).float().mean()) if ours.numel() else 0.0


def check_shared(ours: Shared, theirs: Shared, layer: int, pool: bool, tokens: float = 0.02, values: float = 1e-3) -> None:
    """What ``layer`` shared, made from the same input: roundings may flip by a step here and there (in at most a part ``values``
    of all numbers), and with them choices between nearly equal scores (of at most a part ``tokens`` of all tokens)."""
    assert share_that_differs(ours.windows[layer], theirs.windows[layer]) <= values, layer
    if layer in theirs.entries:
        assert share_that_differs(ours.entries[layer], theirs.entries[layer]) <= values, layer
        assert share_that_differs(ours.index_keys[layer], theirs.index_keys[layer]) <= values, layer
    if layer in theirs.selections:
        assert float((ours.selections[layer] != theirs.selections[layer]).any(1).float().mean()) <= tokens, layer
    if pool:
        assert ours.pool is not None and theirs.pool is not None
        assert float((ours.pool != theirs.pool).any(1).float().mean()) <= tokens, layer
