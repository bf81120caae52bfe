"""Scores of compressed entries for each row, and which entries a row attends to."""

from .census import safe_row_tile
from .reference import candidate_blocks, index_scores, select_entries, select_top

__all__ = ["candidate_blocks", "index_scores", "safe_row_tile", "select_entries", "select_top"]
