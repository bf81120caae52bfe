"""A checker of batch invariance for operators on rows, and an operator that must fail it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

ROW_COUNTS = (1, 2, 3, 5, 7, 8, 9, 15, 16, 31, 33, 64, 65, 100, 129)


def depends_on_batch(
    op: Callable[[torch.Tensor], torch.Tensor], rows: torch.Tensor, counts: Sequence[int] = ROW_COUNTS
) -> list[tuple[int, int]]:
    """(rows together, first row) of every cut in which some row of ``op`` differs in bits from the whole batch."""
    whole = op(rows)
    bad = []
    for count in counts:
        for start in {0, (rows.shape[0] - count) // 2, rows.shape[0] - count}:
            part = op(rows[start : start + count].contiguous())
            if not torch.equal(part, whole[start : start + count]):
                bad.append((count, start))
    return bad
