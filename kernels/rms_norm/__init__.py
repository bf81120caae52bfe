"""Root-mean-square norm over the last dimension."""

from .reference import rms_norm

__all__ = ["rms_norm"]
