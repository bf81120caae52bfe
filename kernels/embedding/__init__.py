"""Rows of the embedding table as the start of the residual stream."""

from .reference import embedding

__all__ = ["embedding"]
