"""Joins neighbouring tokens into one entry by a softmax over the group, channel by channel."""

from .reference import compress
from .windows import PoolPlan, pool_windows

__all__ = ["PoolPlan", "compress", "pool_windows"]
