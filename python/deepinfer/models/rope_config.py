"""Reads rotary-embedding fields: ``rope_parameters`` of newer configs, ``rope_theta`` and ``rope_scaling`` of older ones."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import UnsupportedConfigError
from ..kernels.rope import RopeParameters

ROPE_FIELDS = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", "original_max_position_embeddings")
"""Config fields that ``read_rope`` interprets: a family that calls it names them as known."""

_MOST_POSITIONS = 2**31 - 1  # positions are int32 wherever rows carry them
_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")
_COMMON = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "frequency_factors"}
_PER_TYPE: dict[str, set[str]] = {
    "default": {"factor", "original_max_position_embeddings"},
    "linear": {"factor", "original_max_position_embeddings"},
    "dynamic": {"factor", "original_max_position_embeddings"},
    "llama3": {"factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"},
    "yarn": {
        "factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate",
    },
}  # fmt: skip


def _number(fields: Mapping[str, Any], name: str, default: float | None = None) -> float:
    value = fields.get(name)
    if value is None:
        if default is None:
            raise UnsupportedConfigError(f"config field 'rope_parameters.{name}' is missing for rope_type {fields.get('rope_type')!r}")
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= sys.float_info.max:
        raise UnsupportedConfigError(f"config field 'rope_parameters.{name}' must be a positive number, found {value!r}")
    return float(value)


def _stretched(length: int, factor: float) -> int:
    """``length`` positions stretched ``factor`` times."""
    reach = length * factor
    if reach > _MOST_POSITIONS:
        raise UnsupportedConfigError(
            f"config field 'rope_parameters.factor' = {factor!r} stretches {length} positions beyond {_MOST_POSITIONS}"
        )
    return int(reach)


def _optional(fields: Mapping[str, Any], name: str) -> float | None:
    return None if fields.get(name) is None else _number(fields, name)


def _fields(config: Mapping[str, Any]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for source in ("rope_scaling", "rope_parameters"):
        given = config.get(source)
        if given is None:
            continue
        if not isinstance(given, dict):
            raise UnsupportedConfigError(f"config field {source!r} must be an object, found {given!r}")
        if any(isinstance(value, dict) for value in given.values()):
            raise UnsupportedConfigError(f"config field {source!r} differs by layer type, which is not implemented")
        merged.update({name: value for name, value in given.items() if value is not None})
    merged["rope_type"] = merged.get("rope_type", merged.get("type", "default"))
    for name in ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings"):
        if config.get(name) is not None:
            merged.setdefault(name, config[name])
    return merged


def read_rope(config: Mapping[str, Any], head_dim: int, max_position: int, default_theta: float = 10000.0) -> tuple[RopeParameters, int]:
    """Rotary parameters and the longest position they reach (in tokens).

    ``linear``, ``dynamic`` and ``yarn`` reach ``factor`` times the trained length; ``llama3`` states the stretched length
    itself. Raises ``UnsupportedConfigError`` naming the field for other types, partial rotation and unknown fields.
    """
    if max_position > _MOST_POSITIONS:
        raise UnsupportedConfigError(f"config field 'max_position_embeddings' = {max_position} is above {_MOST_POSITIONS}")
    fields = _fields(config)
    kind = fields["rope_type"]
    if kind not in _TYPES:
        raise UnsupportedConfigError(f"config field 'rope_parameters.rope_type' = {kind!r} is not implemented; known: {', '.join(_TYPES)}")
    partial = fields.get("partial_rotary_factor", 1.0)
    if partial != 1.0:
        raise UnsupportedConfigError(f"config field 'partial_rotary_factor' = {partial!r}: partial rotation is not implemented")
    unknown = sorted(set(fields) - _COMMON - _PER_TYPE[kind])
    if unknown:
        raise UnsupportedConfigError(f"config field 'rope_parameters.{unknown[0]}' is not implemented for rope_type {kind!r}")
    theta = _number(fields, "rope_theta", default_theta)
    factors = fields.get("frequency_factors")
    if factors is not None and (not isinstance(factors, Sequence) or len(factors) != head_dim // 2):
        found = len(factors) if isinstance(factors, Sequence) else repr(factors)
        raise UnsupportedConfigError(f"rope frequency factors: expected {head_dim // 2} values, found {found}")
    shared = tuple(_number({"frequency_factors": value}, "frequency_factors") for value in factors) if factors is not None else None
    trained = int(_number(fields, "original_max_position_embeddings", float(max_position)))
    if not 1 <= trained <= _MOST_POSITIONS:
        named = fields["original_max_position_embeddings"]
        raise UnsupportedConfigError(
            f"config field 'rope_parameters.original_max_position_embeddings' = {named!r} must be between 1 and {_MOST_POSITIONS}"
        )
    if kind == "default":
        return RopeParameters(head_dim, theta, frequency_factors=shared), max_position
    factor = _number(fields, "factor", max_position / trained if kind == "yarn" and max_position > trained else None)
    if factor < 1:
        raise UnsupportedConfigError(f"config field 'rope_parameters.factor' = {factor!r} must be at least 1")
    if kind == "linear":
        return RopeParameters(head_dim, theta, kind, factor, frequency_factors=shared), _stretched(max_position, factor)
    if shared is not None:
        raise UnsupportedConfigError(f"rope frequency factors beside rope_type {kind!r} are not implemented")
    if kind == "dynamic":
        return RopeParameters(head_dim, theta, kind, factor, max_position), _stretched(max_position, factor)
    if kind == "llama3":
        low, high = _number(fields, "low_freq_factor"), _number(fields, "high_freq_factor")
        if low >= high:
            raise UnsupportedConfigError(
                f"config field 'rope_parameters.low_freq_factor' = {low!r} must be below high_freq_factor = {high!r}"
            )
        return RopeParameters(head_dim, theta, kind, factor, trained, low_freq_factor=low, high_freq_factor=high), max_position
    parameters = RopeParameters(
        head_dim,
        theta,
        kind,
        factor,
        trained,
        beta_fast=_number(fields, "beta_fast", 32.0),
        beta_slow=_number(fields, "beta_slow", 1.0),
        attention_factor=_optional(fields, "attention_factor"),
        mscale=_optional(fields, "mscale"),
        mscale_all_dim=_optional(fields, "mscale_all_dim"),
        truncate=bool(fields.get("truncate", True)),
    )
    return parameters, max(max_position, _stretched(trained, factor))
