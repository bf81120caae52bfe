"""Attention over a window and compressed entries, selected ones or all, in one softmax."""

from .reference import full_attention, two_source_attention

__all__ = ["full_attention", "two_source_attention"]
