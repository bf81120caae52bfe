"""Stores entries of a step in paged KV tensors."""

from .reference import kv_write

__all__ = ["kv_write"]
