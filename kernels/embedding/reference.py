"""Rows of a table, widened to float32."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def embedding(ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Row ``ids[i]`` of ``table`` ``[vocab, hidden]`` as float32 ``[R, hidden]``, for integer ``ids`` ``[R]``.

    Ids outside of the table, which rows that only fill a bucket may hold, give its nearest row.
    """
    return F.embedding(ids.clamp(0, table.shape[0] - 1), table).float()
