"""The fields of a configuration file, brought into one form and checked one by one.

Accepted: everything at the top or text fields under ``text_config``; ``engram_pad_token_id`` or ``engram_pad_id``;
``rope_scaling`` beside ``rope_theta`` and ``compress_rope_theta``, or ``rope_parameters`` with ``main`` and ``compress``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ...errors import UnsupportedConfigError
from ...kernels.rope import RopeParameters
from ..config import check_fields, optional_float, refuse_foreign_format, required_int
from ..rope_config import read_rope

_SIZES = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "qk_rope_head_dim",
    "q_lora_rank", "o_lora_rank", "o_groups", "max_position_embeddings", "sliding_window",
)  # fmt: skip
_EXPERTS = (
    "moe_intermediate_size", "n_routed_experts", "n_shared_experts", "num_experts_per_tok", "scoring_func", "topk_method",
    "norm_topk_prob", "routed_scaling_factor", "gate_temp", "swiglu_limit", "hidden_act",
)  # fmt: skip
_SHARING = (
    "compress_ratios", "kv_source_layer_ids", "index_source_layer_ids", "index_n_heads", "index_head_dim", "index_topk",
    "candidate_source_layer_id", "candidate_topk_blocks", "candidate_block_size",
)  # fmt: skip
_REST = (
    "rms_norm_eps", "attention_bias", "tie_word_embeddings", "rope_theta", "compress_rope_theta", "rope_scaling", "rope_parameters",
    "hc_mult", "hc_sinkhorn_iters", "hc_eps", "num_hash_layers", "expert_dtype", "enable_confidence_head", "sample_from_anchor",
    "vision_config", "image_token_id", "x_cache_quant", "x_engram_token_map", "x_index_tie",
)  # fmt: skip
_ENGRAM = (
    "engram_layer_ids", "engram_num_embeddings", "engram_max_ngram_size", "engram_vocab_size", "engram_n_heads", "engram_head_dim",
    "engram_pad_token_id", "engram_compressed_vocab_size",
)  # fmt: skip
_DRAFTS = (
    "num_nextn_predict_layers", "dspark_block_size", "dspark_noise_token_id", "dspark_target_layer_ids", "dspark_markov_rank",
    "dspark_n_routed_experts", "dspark_num_experts_per_tok",
)  # fmt: skip
_PER_LEVEL = {"model_type", "architectures", "dtype", "torch_dtype", "transformers_version", "_name_or_path"}
"""Fields that the outer and the text configuration both have, with values of their own."""

_FIXED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",), "scoring_func": ("sqrtsoftplus",), "topk_method": ("noaux_tc",), "attention_bias": (False,),
    "tie_word_embeddings": (False,), "num_key_value_heads": (1,), "n_shared_experts": (1,), "num_hash_layers": (0,),
    "enable_confidence_head": (True,), "sample_from_anchor": (True,), "x_index_tie": ("low_index",),
}  # fmt: skip
_QUANTISATION: dict[str, Any] = {
    "quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 32], "scale_fmt": "ue8m0", "expert_dtype": "fp4",
}  # fmt: skip


def _merge(outer: Mapping[str, Any]) -> dict[str, Any]:
    inner = outer.get("text_config")
    if inner is None:
        return {name: value for name, value in outer.items() if name != "text_config"}
    if not isinstance(inner, Mapping):
        raise UnsupportedConfigError(f"config field 'text_config' must be an object, found {inner!r}")
    merged = {name: value for name, value in outer.items() if name != "text_config"}
    for name, value in inner.items():
        if name in _PER_LEVEL:
            merged.setdefault(name, value)
        elif merged.get(name) is None:
            merged[name] = value
        elif value is not None and merged[name] != value:
            raise UnsupportedConfigError(f"config fields {name!r} = {merged[name]!r} and 'text_config.{name}' = {value!r} disagree")
    return merged


def read_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """All fields in flat form; ``UnsupportedConfigError`` names what is unknown, contradictory or not implemented."""
    fields = _merge(config)
    pad, short = fields.get("engram_pad_token_id"), fields.pop("engram_pad_id", None)
    if pad is None:
        fields["engram_pad_token_id"] = short
    elif short is not None and short != pad:
        raise UnsupportedConfigError(f"config fields 'engram_pad_token_id' = {pad!r} and 'engram_pad_id' = {short!r} disagree")
    refuse_foreign_format(fields)
    check_fields(fields, (*_SIZES, *_EXPERTS, *_SHARING, *_ENGRAM, *_DRAFTS, *_REST))
    check_fixed(fields, _FIXED)
    return fields


def check_fixed(fields: Mapping[str, Any], fixed: Mapping[str, tuple[Any, ...]]) -> None:
    """``fixed``: what a field may say where it is present, the usual value first."""
    for name, allowed in fixed.items():
        value = fields.get(name)
        if value is not None and not any(value == other and type(value) is type(other) for other in allowed):
            raise UnsupportedConfigError(f"config field {name!r} = {value!r} is not implemented; {allowed[0]!r} is")


def check_multiple(fields: Mapping[str, Any], name: str, other: str) -> None:
    """``name`` must be a multiple of ``other``."""
    value, divisor = required_int(fields, name), required_int(fields, other)
    if value % divisor:
        raise UnsupportedConfigError(f"config fields {name!r} = {value} and {other!r} = {divisor} disagree: the first must be a multiple")


def check_most(fields: Mapping[str, Any], name: str, other: str) -> None:
    """``name`` must not be larger than ``other``."""
    value, most = required_int(fields, name), required_int(fields, other)
    if value > most:
        raise UnsupportedConfigError(f"config fields {name!r} = {value} and {other!r} = {most} disagree: the first must not be larger")


def check_heads(fields: Mapping[str, Any]) -> None:
    """Groups of the output and turned channels must fit the widths of heads."""
    check_multiple(fields, "num_attention_heads", "o_groups")
    check_most(fields, "qk_rope_head_dim", "head_dim")
    check_most(fields, "qk_rope_head_dim", "index_head_dim")
    if required_int(fields, "qk_rope_head_dim") % 2:
        raise UnsupportedConfigError(f"config field 'qk_rope_head_dim' = {fields['qk_rope_head_dim']} must be even")


def read_limit(fields: Mapping[str, Any]) -> float:
    """``swiglu_limit``; 0 = none."""
    limit = fields.get("swiglu_limit", 10.0)
    if isinstance(limit, bool) or not isinstance(limit, int | float | None):
        raise UnsupportedConfigError(f"config field 'swiglu_limit' must be a number, found {limit!r}")
    return max(float(limit or 0.0), 0.0)


def read_quantised(fields: Mapping[str, Any]) -> bool:
    """True for weights in the released formats (FP8 in 32×32 blocks, MXFP4 experts), False for plain ones."""
    quantisation = fields.get("quantization_config")
    outer = fields.get("expert_dtype")
    if not quantisation:
        if outer is not None:
            raise UnsupportedConfigError(f"config fields 'expert_dtype' = {outer!r} and 'quantization_config' (absent) disagree")
        return False
    for name, value in quantisation.items():
        if value is not None and (name not in _QUANTISATION or value != _QUANTISATION[name]):
            wanted = f"; {_QUANTISATION[name]!r} is" if name in _QUANTISATION else ""
            raise UnsupportedConfigError(f"config field 'quantization_config.{name}' = {value!r} is not implemented{wanted}")
    for name in ("weight_block_size", "scale_fmt"):
        if quantisation.get(name) is None:
            raise UnsupportedConfigError(f"config field 'quantization_config.{name}' is missing; this family needs {_QUANTISATION[name]!r}")
    if outer is not None and outer != quantisation.get("expert_dtype", outer):
        raise UnsupportedConfigError(
            f"config fields 'expert_dtype' = {outer!r} and 'quantization_config.expert_dtype' = {quantisation['expert_dtype']!r} disagree"
        )
    if (outer or quantisation.get("expert_dtype", "fp4")) != "fp4":
        raise UnsupportedConfigError(f"config field 'expert_dtype' = {outer!r} is not implemented; 'fp4' is")
    return True


def int_list(fields: Mapping[str, Any], name: str) -> tuple[int, ...]:
    """A list of integers; ``UnsupportedConfigError`` names it if it is absent or something else."""
    value = fields.get(name)
    if not isinstance(value, list) or any(isinstance(item, bool) or not isinstance(item, int) for item in value):
        raise UnsupportedConfigError(f"config field {name!r} must be a list of integers, found {value!r}")
    return tuple(value)


def token_id(fields: Mapping[str, Any], name: str, limit: int, limit_name: str = "vocab_size") -> int:
    """A token id below ``limit``."""
    value = fields.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise UnsupportedConfigError(f"config field {name!r} must be a token id, found {value!r}")
    if value >= limit:
        raise UnsupportedConfigError(f"config fields {name!r} = {value} and {limit_name!r} = {limit} disagree: there is no such token")
    return value


def _table(fields: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    """``rope_parameters.main`` or ``.compress`` in the form of ``read_rope``."""
    given = fields.get("rope_parameters")
    if given is None:
        return None
    if not isinstance(given, Mapping) or set(given) != {"main", "compress"} or not all(isinstance(t, Mapping) for t in given.values()):
        raise UnsupportedConfigError("config field 'rope_parameters' must have the two objects 'main' and 'compress'")
    return dict(given[name])


def read_rope_tables(fields: Mapping[str, Any]) -> tuple[RopeParameters, RopeParameters]:
    """Angles of window-only layers (``main``) and of all others (``compress``).

    Amplitudes stay at 1 whatever the stretching; ``UnsupportedConfigError`` for fields that would say otherwise.
    """
    width, positions = required_int(fields, "qk_rope_head_dim"), required_int(fields, "max_position_embeddings")
    main_theta = optional_float(fields, "rope_theta", 10000.0)
    compress_theta = optional_float(fields, "compress_rope_theta", 160000.0)
    main = _table(fields, "main") or {"rope_type": "default"}
    scaling = fields.get("rope_scaling")
    if scaling is not None and not isinstance(scaling, Mapping):
        raise UnsupportedConfigError(f"config field 'rope_scaling' must be an object, found {scaling!r}")
    compress = _table(fields, "compress")
    if compress is None:
        compress = dict(scaling or {"rope_type": "default"})
    elif scaling is not None:
        for name, value in scaling.items():
            key = "rope_type" if name == "type" else name
            if compress.setdefault(key, value) != value:
                raise UnsupportedConfigError(f"config fields 'rope_scaling.{name}' and 'rope_parameters.compress.{key}' disagree")
    for table, label, theta_name in ((main, "main", "rope_theta"), (compress, "compress", "compress_rope_theta")):
        stated, flat = table.get("rope_theta"), fields.get(theta_name)
        if stated is not None and flat is not None and stated != flat:
            raise UnsupportedConfigError(
                f"config fields {theta_name!r} = {flat} and 'rope_parameters.{label}.rope_theta' = {stated} disagree"
            )
        kind = table.get("rope_type", table.get("type", "default"))
        kinds = ("default",) if label == "main" else ("default", "yarn")
        if kind not in kinds:
            raise UnsupportedConfigError(f"rope_type {kind!r} of the {label} table is not implemented; known: {', '.join(kinds)}")
        for name in ("attention_factor", "mscale", "mscale_all_dim"):
            if table.get(name) not in (None, 1, 1.0):
                raise UnsupportedConfigError(
                    f"rope field {name!r} = {table[name]!r} is not implemented; this family never scales amplitudes"
                )
            table.pop(name, None)
        partial, head = table.pop("partial_rotary_factor", None), required_int(fields, "head_dim")
        if partial is not None and (not isinstance(partial, int | float) or partial * head != width):
            raise UnsupportedConfigError(f"config fields 'partial_rotary_factor' = {partial!r} and 'qk_rope_head_dim' = {width} disagree")
    first, _ = read_rope({"rope_parameters": main}, width, positions, main_theta)
    second, _ = read_rope({"rope_parameters": compress}, width, positions, compress_theta)
    return replace(first, attention_factor=1.0), replace(second, attention_factor=1.0)
