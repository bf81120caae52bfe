"""Attention over a window and selected entries in one softmax."""

from .reference import two_source_attention

__all__ = ["two_source_attention"]
