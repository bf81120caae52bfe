"""Keys and values as a cache of 8-bit floats keeps them."""

from .reference import FP8, LARGEST, CacheScales, decode, encode

__all__ = ["FP8", "LARGEST", "CacheScales", "decode", "encode"]
