"""Nonlinear functions of single numbers whose bits do not depend on where the number stands."""

from .reference import sigmoid, silu, softplus

__all__ = ["sigmoid", "silu", "softplus"]
