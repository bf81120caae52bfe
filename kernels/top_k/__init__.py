"""The largest numbers of each row with a rule for equal ones."""

from .reference import top_k

__all__ = ["top_k"]
