"""Adds looked-up n-gram values to the residual streams behind a gate."""

from .reference import engram_gate

__all__ = ["engram_gate"]
