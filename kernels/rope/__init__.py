"""Rotary position embedding with its length scalings."""

from .reference import RopeParameters, RopeTable, apply_rope, rotate_pairs, yarn_band

__all__ = ["RopeParameters", "RopeTable", "apply_rope", "rotate_pairs", "yarn_band"]
