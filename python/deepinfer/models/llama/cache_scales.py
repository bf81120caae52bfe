"""Scales of keys and values by layer, from the names that checkpoints give them."""

from __future__ import annotations

from collections.abc import Mapping

from ...errors import CheckpointError
from ...kernels.fp8_cache import CacheScales

NAMES = ("self_attn.{0}_scale", "self_attn.{0}_proj.{0}_scale")
"""Of a layer's scale of ``k`` or ``v``, behind the layer's prefix: the two spellings of releases."""

OPTIONAL = tuple(f"model.layers.*.{name.format(part)}" for name in NAMES for part in "kv")
"""Patterns of them: what a checkpoint may have, whether or not its KV is kept in 8 bits."""


def layer_scales(found: Mapping[str, float], layers: int) -> tuple[CacheScales, ...]:
    """Scales of each layer; 1 where ``found``, tensor name → scale, has none. Raises ``CheckpointError`` for a name that is no layer's,
    or a scale under both of its names."""
    left = dict(found)

    def of(layer: int, part: str) -> float:
        names = [name for name in (f"model.layers.{layer}.{form.format(part)}" for form in NAMES) if name in left]
        if len(names) > 1:
            raise CheckpointError(f"tensors {names[0]!r} and {names[1]!r} are both there, for one scale; remove one")
        return left.pop(names[0]) if names else 1.0

    scales = tuple(CacheScales(of(layer, "k"), of(layer, "v")) for layer in range(layers))
    if left:
        raise CheckpointError(f"tensor {next(iter(left))!r} is a scale of KV, and of no layer of this model; take kv_cache_dtype='auto'")
    return scales
