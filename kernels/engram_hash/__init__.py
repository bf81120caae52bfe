"""Rows of n-gram tables, addressed by hashes of the latest token ids."""

from .reference import engram_hash, latest_ids

__all__ = ["engram_hash", "latest_ids"]
