"""Rows of tables: of embeddings, widened to float32, and of rotations."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def embedding(ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Row ``ids[i]`` of ``table`` ``[vocab, hidden]`` as float32 ``[R, hidden]``, for integer ``ids`` ``[R]``.

    Ids outside of the table, which rows that only fill a bucket may hold, give its nearest row.
    """
    return F.embedding(ids.clamp(0, table.shape[0] - 1), table).float()


def rotations(position: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows ``position[i]`` of both tables float32 ``[P, half]`` as ``[R, half]``, for integer ``position`` ``[R]``; positions outside of
    them give the nearest row."""
    position = position.clamp(0, cosines.shape[0] - 1)
    return F.embedding(position, cosines), F.embedding(position, sines)
