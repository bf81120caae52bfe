"""GGUF metadata → the fields of a ``config.json``."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ...errors import CheckpointError, UnsupportedConfigError, UnsupportedModelError

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}

_KNOWN_KEYS = {
    "vocab_size", "context_length", "embedding_length", "block_count", "feed_forward_length", "rope.dimension_count",
    "rope.freq_base", "rope.scale_linear", "rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length",
    "rope.scaling.finetuned", "rope.scaling.attn_factor", "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow",
    "rope.scaling.yarn_attn_factor", "attention.head_count", "attention.head_count_kv", "attention.key_length",
    "attention.value_length", "attention.layer_norm_rms_epsilon", "attention.sliding_window", "attention.causal",
    "tensor_data_layout",
}  # fmt: skip


def architecture_name(meta: Mapping[str, Any]) -> str:
    """Registry name for ``general.architecture``; ``UnsupportedModelError`` lists those that are read."""
    name = meta.get("general.architecture")
    if name not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"GGUF architecture {name!r} is not read; known: {', '.join(ARCHITECTURES)} (deepinfer.models.loaders.gguf_config), "
            "other architectures load from safetensors through deepinfer.models.registry"
        )
    return "MistralForCausalLM" if name == "llama" and meta.get("llama.attention.sliding_window") else ARCHITECTURES[name]


def _rope(meta: Mapping[str, Any], prefix: str, frequency_factors: Sequence[float] | None) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": meta.get(prefix + "rope.freq_base", 10000.0)}
    kind = meta.get(prefix + "rope.scaling.type")
    factor = meta.get(prefix + "rope.scaling.factor", 0.0)
    if kind is None and meta.get(prefix + "rope.scale_linear"):
        kind, factor = "linear", meta[prefix + "rope.scale_linear"]
    if kind in (None, "none") or not factor:
        if kind not in (None, "none"):
            raise UnsupportedConfigError(f"GGUF key '{prefix}rope.scaling.type' = {kind!r} comes without a factor")
    elif kind == "linear":
        rope.update(rope_type="linear", factor=factor)
    elif kind == "yarn":
        attention = meta.get(prefix + "rope.scaling.attn_factor", meta.get(prefix + "rope.scaling.yarn_attn_factor", 1.0))
        rope.update(
            rope_type="yarn",
            factor=factor,
            attention_factor=attention * (0.1 * math.log(factor) + 1.0),
            original_max_position_embeddings=meta.get(prefix + "rope.scaling.original_context_length"),
            beta_fast=meta.get(prefix + "rope.scaling.yarn_beta_fast"),
            beta_slow=meta.get(prefix + "rope.scaling.yarn_beta_slow"),
        )
    else:
        raise UnsupportedConfigError(f"GGUF key '{prefix}rope.scaling.type' = {kind!r} is not implemented")
    if frequency_factors is not None:
        rope["frequency_factors"] = list(frequency_factors)
    return rope


def config_from_metadata(
    meta: Mapping[str, Any], tensors: Collection[str], embed_rows: int, frequency_factors: Sequence[float] | None
) -> dict[str, Any]:
    """Configuration from a model's metadata, tensor names, rows of its embedding and ``rope_freqs.weight`` (None = absent).

    Raises ``UnsupportedConfigError`` naming the key for an unknown one, ``CheckpointError`` for a missing one.
    """
    architecture = architecture_name(meta)
    prefix = f"{meta['general.architecture']}."
    unknown = sorted(
        key
        for key, value in meta.items()
        if key.startswith(prefix) and key.removeprefix(prefix) not in _KNOWN_KEYS and value not in (0, None, False)
    )
    if unknown:
        raise UnsupportedConfigError(f"GGUF key {unknown[0]!r} = {meta[unknown[0]]!r} may change the mathematics and is not implemented")

    def need(key: str) -> Any:
        value = meta.get(prefix + key)
        if value is None:
            raise CheckpointError(f"GGUF key {prefix + key!r} is missing")
        if isinstance(value, list):
            if len(set(value)) != 1:
                raise UnsupportedConfigError(f"GGUF key {prefix + key!r} differs by layer, which is not implemented")
            return value[0]
        return value

    if meta.get(prefix + "attention.causal", True) is False:
        raise UnsupportedConfigError(f"GGUF key '{prefix}attention.causal' = false is not implemented")
    if meta.get(prefix + "tensor_data_layout", "Meta AI original pth") not in ("Meta AI original pth", ""):
        raise UnsupportedConfigError(f"GGUF key '{prefix}tensor_data_layout' = {meta[prefix + 'tensor_data_layout']!r} is not implemented")
    heads, hidden = need("attention.head_count"), need("embedding_length")
    head_dim = meta.get(prefix + "attention.key_length", meta.get(prefix + "rope.dimension_count", hidden // heads))
    if meta.get(prefix + "attention.value_length", head_dim) != head_dim:
        raise UnsupportedConfigError(f"GGUF key '{prefix}attention.value_length' differs from key_length, which is not implemented")
    rotated = meta.get(prefix + "rope.dimension_count", head_dim)
    if rotated != head_dim:
        raise UnsupportedConfigError(
            f"GGUF key '{prefix}rope.dimension_count' = {rotated}: partial rotation of {head_dim} is not implemented"
        )
    config: dict[str, Any] = {
        "architectures": [architecture],
        "vocab_size": embed_rows,
        "hidden_size": hidden,
        "intermediate_size": need("feed_forward_length"),
        "num_hidden_layers": need("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": need("attention.head_count_kv") if prefix + "attention.head_count_kv" in meta else heads,
        "head_dim": head_dim,
        "rms_norm_eps": need("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": need("context_length"),
        "rope_parameters": _rope(meta, prefix, frequency_factors),
        "tie_word_embeddings": "output.weight" not in tensors,
    }
    window = meta.get(prefix + "attention.sliding_window")
    if window:
        config["sliding_window"] = window
        if architecture in ("Qwen2ForCausalLM", "Qwen3ForCausalLM"):
            raise UnsupportedConfigError(
                f"GGUF key '{prefix}attention.sliding_window': which layers use it is not stored; load from safetensors"
            )
    if architecture != "Qwen2ForCausalLM" and "blk.0.attn_q.bias" in tensors:
        config["attention_bias"] = True
    if architecture == "LlamaForCausalLM" and "blk.0.ffn_up.bias" in tensors:
        config["mlp_bias"] = True
    for role in ("bos", "eos", "padding"):
        value = meta.get(f"tokenizer.ggml.{role}_token_id")
        if value is not None:
            config["pad_token_id" if role == "padding" else f"{role}_token_id"] = int(value)
    return config


def generation_from_metadata(meta: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a generation_config that GGUF metadata holds: bos, pad and every id that ends a turn."""
    result: dict[str, Any] = {}
    ends = [
        int(meta[key])
        for key in ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
        if key in meta
    ]
    if ends:
        result["eos_token_id"] = list(dict.fromkeys(ends))
    for role, key in (("bos_token_id", "tokenizer.ggml.bos_token_id"), ("pad_token_id", "tokenizer.ggml.padding_token_id")):
        if key in meta:
            result[role] = int(meta[key])
    return result
