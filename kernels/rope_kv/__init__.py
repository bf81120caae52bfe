"""Rotation of queries and keys, with their norms head by head where a model has them, and the write of keys and values to the cache."""

from .reference import rope_kv

__all__ = ["rope_kv"]
