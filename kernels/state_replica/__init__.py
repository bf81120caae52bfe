"""Keeps a copy of a sequence's rings as they stood at the last boundary."""

from .reference import ReplicaRing, save_replica

__all__ = ["ReplicaRing", "save_replica"]
