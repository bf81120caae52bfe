"""Attention of all patches of an image to all of them, turned by where they stand in its grid."""

from .reference import grid_angles, grid_attention, grid_table

__all__ = ["grid_angles", "grid_attention", "grid_table"]
