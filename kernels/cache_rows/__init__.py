"""How rows of a step and rows of caches are named: which sequence and position a row has, where an entry of it lies.

Owns: the ragged step, the stored form of a row, reading entries through a block table. Never touches: what rows mean.
"""

from .reference import PagedRows, RowKind, StepRows

__all__ = ["PagedRows", "RowKind", "StepRows"]
