"""Small floats with a scale per block: cache records, quantised activations and weights."""

from .reference import FP4_ROWS, FP8_ROWS, MXFP4_ROWS, RowFormat, decode_rows, encode_rows, fake_quantise
from .weights import (
    WEIGHT_BLOCK,
    decode_fp8_weight,
    decode_mxfp4_weight,
    encode_fp8_weight,
    encode_mxfp4_weight,
    fp8_scale_shape,
    mxfp4_shapes,
)

__all__ = [
    "FP4_ROWS",
    "FP8_ROWS",
    "MXFP4_ROWS",
    "WEIGHT_BLOCK",
    "RowFormat",
    "decode_fp8_weight",
    "decode_mxfp4_weight",
    "decode_rows",
    "encode_fp8_weight",
    "encode_mxfp4_weight",
    "encode_rows",
    "fake_quantise",
    "fp8_scale_shape",
    "mxfp4_shapes",
]
