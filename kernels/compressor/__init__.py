"""Joins neighbouring tokens into one entry by a softmax over the group, channel by channel."""

from .reference import compress

__all__ = ["compress"]
