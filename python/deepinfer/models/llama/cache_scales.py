"""Scales of keys and values by layer, from the names that checkpoints give them."""

from __future__ import annotations

from collections.abc import Mapping

from ...errors import CheckpointError
from ...kernels.fp8_cache import CacheScales

NAMES = ("self_attn.{0}_scale", "self_attn.{0}_proj.{0}_scale", "self_attn.kv_scale")
"""Of a layer's scale of ``k`` or ``v``, behind the layer's prefix: the spellings of releases, the last, of older ones, for both."""

OPTIONAL = tuple(dict.fromkeys(f"model.layers.*.{name.format(part)}" for name in NAMES for part in "kvq"))
"""Patterns of them and of those of queries: what a checkpoint may have, whether or not its KV is kept in 8 bits."""


def layer_scales(found: Mapping[str, float], layers: int) -> tuple[CacheScales, ...]:
    """Scales of each layer; 1 where ``found``, tensor name → scale, has none. Raises ``CheckpointError`` for a name that is no layer's,
    or a scale under two of its names."""
    used: set[str] = set()

    def of(layer: int, part: str) -> float:
        names = [name for name in (f"model.layers.{layer}.{form.format(part)}" for form in NAMES) if name in found]
        if len(names) > 1:
            raise CheckpointError(f"tensors {names[0]!r} and {names[1]!r} are both there, for one scale; remove one")
        used.update(names)
        return found[names[0]] if names else 1.0

    scales = tuple(CacheScales(of(layer, "k"), of(layer, "v")) for layer in range(layers))
    for name in found:
        if name not in used:
            raise CheckpointError(f"tensor {name!r} is a scale of KV, and of no layer of this model; take kv_cache_dtype='auto'")
    return scales
