"""Scales that a checkpoint brings for keys and values in 8-bit floats: a number each, under names that end in ``k_scale`` and ``v_scale``.

Owns: finding and reading them. Never touches: which layer a name belongs to.
"""

from __future__ import annotations

from ...errors import CheckpointError
from .fp8 import Fp8Source
from .source import WeightSource

_ENDINGS = (".k_scale", ".v_scale")
_RANGE = 2.0**-100, 2.0**100
"""Beyond it a scale or its reciprocal is no float32 that products can be made with."""


def read_kv_scales(source: WeightSource | Fp8Source) -> dict[str, float]:
    """Scale of each such name; empty for a checkpoint without. Raises ``CheckpointError`` for what is not one number above 0."""
    stored = source.stored if isinstance(source, Fp8Source) else source
    found: dict[str, float] = {}
    for name in stored.names():
        if not name.endswith(_ENDINGS):
            continue
        tensor = stored.read(name).float()
        if tensor.numel() != 1:
            raise CheckpointError(f"tensor {name!r} in {stored.where(name)} has shape {list(tensor.shape)}; a scale of KV is one number")
        value = float(tensor)
        if not _RANGE[0] <= value <= _RANGE[1]:
            raise CheckpointError(f"tensor {name!r} in {stored.where(name)} is {value:g}, no scale of KV; take kv_cache_dtype='auto'")
        found[name] = value
    return found
