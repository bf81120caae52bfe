"""Drawing tokens: what each id weighs, and kernels that draw by those weights."""

from .reference import weight_power, weights

__all__ = ["weight_power", "weights"]
