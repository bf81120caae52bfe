"""Rows of the embedding table as the start of the residual stream, and the rotations of their positions."""

from .reference import embedding, rotations

__all__ = ["embedding", "rotations"]
