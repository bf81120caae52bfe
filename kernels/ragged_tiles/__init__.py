"""Ragged groups cut into tiles of one size."""

from .reference import ragged_tiles

__all__ = ["ragged_tiles"]
