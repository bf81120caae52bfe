"""Several residual streams, mixed by coefficients computed from the streams themselves."""

from .reference import collapse, expand, head_coefficients, mix_coefficients

__all__ = ["collapse", "expand", "head_coefficients", "mix_coefficients"]
