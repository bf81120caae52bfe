"""Keys and values as a cache of 8-bit floats keeps them."""

from .reference import FP8, CacheScales, decode, encode

__all__ = ["FP8", "CacheScales", "decode", "encode"]
