"""``y = x Wᵀ + b`` whose rows do not depend on the number of rows."""

from .packed import PackedLinear, pack_linear
from .reference import ROW_QUANTUM, linear, pad_rows, row_bucket, row_classes, row_quantum

__all__ = ["ROW_QUANTUM", "PackedLinear", "linear", "pack_linear", "pad_rows", "row_bucket", "row_classes", "row_quantum"]
