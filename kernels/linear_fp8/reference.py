"""A product with a weight of 8-bit floats: what each stored number stands for, and the product of the expanded weight.

A number is ``float32(value) * scale``, rounded once to the run dtype: what expanding a checkpoint when it is loaded gives. A scale here is
that of 16 rows by 128 columns, whatever block a checkpoint has: finer along the rows, so that projections of one input, each with blocks
that begin at its own first row, are one weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

SCALE_ROWS, SCALE_COLUMNS = 16, 128
"""Rows and columns that share a scale."""


def scale_shape(rows: int, columns: int) -> tuple[int, int]:
    """Shape of the scales of a weight ``[rows, columns]``."""
    return -(-rows // SCALE_ROWS), -(-columns // SCALE_COLUMNS)


def can_pack(columns: int, parts: Sequence[int]) -> bool:
    """Whether there are kernels for a weight of ``columns`` columns, whose rows are those of ``parts``, each with scales of its own."""
    return columns % 16 == 0 and sum(parts) % 64 == 0 and all(rows % SCALE_ROWS == 0 for rows in parts)


def can_spread(shape: tuple[int, int], block: tuple[int, int]) -> bool:
    """Whether scales of 16 rows by 128 columns lie within blocks of ``block`` rows and columns of a weight of ``shape``."""
    (rows, columns), (down, across) = shape, block
    return (down % SCALE_ROWS == 0 or down >= rows) and (across % SCALE_COLUMNS == 0 or across >= columns)


def spread_scale(scale: torch.Tensor, shape: tuple[int, int], block: tuple[int, int]) -> torch.Tensor:
    """``scale`` ``[blocks down, blocks across]`` of a weight of ``shape`` (``can_spread``): ``scale_shape(*shape)``, of the same type."""
    down, across = block
    tall, wide = scale_shape(*shape)
    of_rows = torch.arange(tall, device=scale.device) * SCALE_ROWS // down
    of_columns = torch.arange(wide, device=scale.device) * SCALE_COLUMNS // across
    return scale[of_rows][:, of_columns].contiguous()


def expand(values: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``values`` float8_e4m3fn ``[out, in]`` times ``scale`` float32 ``scale_shape(out, in)``, in float32, rounded once to ``dtype``."""
    rows, columns = values.shape
    wide = scale.repeat_interleave(SCALE_ROWS, 0)[:rows].repeat_interleave(SCALE_COLUMNS, 1)[:, :columns]
    return (values.float() * wide).to(dtype)


def linear_fp8(x: torch.Tensor, values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """``x`` ``[R, in]`` times the expanded weight (``expand``) transposed: ``[R, out]`` in ``x.dtype``."""
    return F.linear(x, expand(values, scale, x.dtype))


@dataclass(frozen=True)
class PackedWeight:
    """``values`` float8_e4m3fn ``[out, in]`` and ``scale`` float32 ``scale_shape(out, in)``, both contiguous."""

    values: torch.Tensor
    scale: torch.Tensor

    @property
    def shape(self) -> torch.Size:
        """``[out, in]``."""
        return self.values.shape

    @property
    def nbytes(self) -> int:
        """Of both."""
        return self.values.nbytes + self.scale.nbytes

    def expanded(self, dtype: torch.dtype) -> torch.Tensor:
        """The weight in ``dtype``, ``[out, in]``."""
        return expand(self.values, self.scale, dtype)
