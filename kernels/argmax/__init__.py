"""The token of each row's largest logit."""

from .reference import argmax

__all__ = ["argmax"]
