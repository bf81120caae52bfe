"""Plan of the vision tower and of the aligner that brings its rows to the model's width."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...errors import UnsupportedConfigError
from ..config import check_fields, optional_float, optional_int, required_int
from .fields import token_id

_FIELDS = (
    "num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "patch_size", "rope_theta", "downsample_ratio",
    "max_image_tokens", "min_pixels", "max_wh_ratio",
)  # fmt: skip
CHANNELS = 3
_MOST_LAYERS = 4096
_LEAST_TOKENS = 4
"""What one cell takes: itself, the end of its line, and one token at either end."""


@dataclass(frozen=True)
class VisionTopology:
    """Sizes in elements; an image of ``h × w`` merged patches takes ``h * (w + 1) + 2`` tokens of the prompt."""

    layers: int
    hidden: int
    heads: int
    intermediate: int
    patch: int
    merge: int
    """Patches per side that the aligner joins to one row."""
    rope_theta: float
    max_tokens: int
    min_pixels: int
    image_token: int

    @property
    def patch_values(self) -> int:
        """Numbers in a patch."""
        return CHANNELS * self.patch**2

    @property
    def merged(self) -> int:
        """Width of a row that enters the aligner."""
        return self.hidden * self.merge**2


def read_vision(fields: Mapping[str, Any], vocab: int) -> VisionTopology | None:
    """From ``vision_config`` and ``image_token_id``; None without the former. Raises ``UnsupportedConfigError``."""
    given = fields.get("vision_config")
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise UnsupportedConfigError(f"config field 'vision_config' must be an object, found {given!r}")
    check_fields(given, _FIELDS)
    if given.get("max_wh_ratio") is not None:
        raise UnsupportedConfigError(f"config field 'vision_config.max_wh_ratio' = {given['max_wh_ratio']!r} is not implemented; null is")
    if fields.get("image_token_id") is None:
        raise UnsupportedConfigError("config fields 'vision_config' and 'image_token_id' belong together: the second one is missing")
    hidden, heads = required_int(given, "hidden_size"), required_int(given, "num_attention_heads")
    if hidden % heads or hidden // heads % 4:
        raise UnsupportedConfigError(
            f"config fields 'vision_config.hidden_size' = {hidden} and 'vision_config.num_attention_heads' = {heads} disagree: "
            "a head is turned along two axes in halves, so its width must be a multiple of 4"
        )
    tokens = optional_int(given, "max_image_tokens", 1024)
    if tokens < _LEAST_TOKENS:
        raise UnsupportedConfigError(
            f"config field 'vision_config.max_image_tokens' = {tokens} holds no image; the least is {_LEAST_TOKENS}"
        )
    return VisionTopology(
        layers=required_int(given, "num_hidden_layers", _MOST_LAYERS),
        hidden=hidden,
        heads=heads,
        intermediate=required_int(given, "intermediate_size"),
        patch=required_int(given, "patch_size"),
        merge=optional_int(given, "downsample_ratio", 3),
        rope_theta=optional_float(given, "rope_theta", 10000.0),
        max_tokens=tokens,
        min_pixels=required_int(given, "min_pixels"),
        image_token=token_id(fields, "image_token_id", vocab),
    )
