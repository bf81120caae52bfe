"""``y = x Wᵀ`` whose weight stays in 8-bit floats with scales, as released checkpoints have it."""

from .reference import SCALE_COLUMNS, SCALE_ROWS, PackedWeight, can_pack, can_spread, expand, linear_fp8, scale_shape, spread_scale

__all__ = [
    "SCALE_COLUMNS",
    "SCALE_ROWS",
    "PackedWeight",
    "can_pack",
    "can_spread",
    "expand",
    "linear_fp8",
    "scale_shape",
    "spread_scale",
]
