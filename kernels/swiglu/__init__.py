"""Gated activation of the feed-forward block."""

from .reference import swiglu

__all__ = ["swiglu"]
