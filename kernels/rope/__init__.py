"""Rotary position embedding with its length scalings."""

from .reference import RopeParameters, RopeTable, apply_rope

__all__ = ["RopeParameters", "RopeTable", "apply_rope"]
