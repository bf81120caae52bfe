"""Scales that a checkpoint brings for keys and values in 8-bit floats: a number each, or one for both, by the ends of tensors' names.

Owns: finding, reading and refusing them. Never touches: which layer a name belongs to.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from ...errors import CheckpointError
from ...kernels.fp8_cache import LARGEST
from .fp8 import Fp8Source
from .source import WeightSource

_ENDINGS = (".k_scale", ".v_scale", ".kv_scale")
_OF_QUERIES = ".q_scale"
_SMALLEST = 2.0**-100
"""So that a scale, its reciprocal and the factor of scores are normal float32 numbers. Calibration gives as little as 2e-15, to layers
of zeros."""
_LARGEST = 2.0**16
"""By this one everything up to 64 is stored as 0, half of the least stored number being 2^-10: no keys or values are left. A calibrated
scale is the largest number there was by 448, here 3e7."""


class KvScales(NamedTuple):
    """``by_name``: scale of each tensor that is one. ``unused``: names of those of queries, which are not quantised here."""

    by_name: Mapping[str, float]
    unused: tuple[str, ...]


NO_SCALES = KvScales({}, ())
"""Of a checkpoint that has none."""


def read_kv_scales(source: WeightSource | Fp8Source, dtype: torch.dtype) -> KvScales:
    """What a checkpoint has of them, for a model that runs in ``dtype``. Raises ``CheckpointError`` for what is not one number, is none
    that numbers can be scaled by (0, negative, NaN, infinite, beyond 2^16 or below 2^-100), or by which the largest stored number stands
    for one that ``dtype`` does not have."""
    stored = source.stored if isinstance(source, Fp8Source) else source
    found: dict[str, float] = {}
    unused = []
    for name in stored.names():
        if name.endswith(_OF_QUERIES):
            unused.append(name)
        elif name.endswith(_ENDINGS):
            found[name] = _read(stored, name, dtype)
    return KvScales(found, tuple(unused))


def _read(stored: WeightSource, name: str, dtype: torch.dtype) -> float:
    tensor = stored.read(name).float()
    what = f"tensor {name!r} in {stored.where(name)}"
    if tensor.numel() != 1:
        raise CheckpointError(f"{what} has shape {list(tensor.shape)}; a scale of KV is one number")
    value = float(tensor)
    if not _SMALLEST <= value <= _LARGEST:
        raise CheckpointError(f"{what} is {value:g}, no scale of KV, which is above 0 and at most {_LARGEST:g}; take kv_cache_dtype='auto'")
    if LARGEST * value > torch.finfo(dtype).max:
        kind = str(dtype).removeprefix("torch.")
        raise CheckpointError(f"{what} is {value:g}, by which 8-bit floats stand for numbers too large for {kind}; use dtype='bfloat16'")
    return value
