"""Writes the tiny checkpoints as GGUF files with the gguf package's own writer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from checkpoint_kit import network

NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
TOP = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight", "lm_head.weight": "output.weight"}


def gguf_name(name: str) -> str:
    """GGUF name of a transformers tensor."""
    if name in TOP:
        return TOP[name]
    _, _, layer, rest = name.split(".", 3)
    module, _, kind = rest.rpartition(".")
    return f"blk.{layer}.{NAMES[module]}.{kind}"


def pair_order(values: np.ndarray, heads: int) -> np.ndarray:
    """Row order of q and k in files of architecture llama: the two halves of a head interleaved."""
    out = np.empty_like(values)
    half = values.shape[0] // heads // 2
    for head in range(heads):
        start = head * 2 * half
        out[start : start + 2 * half : 2] = values[start : start + half]
        out[start + 1 : start + 2 * half : 2] = values[start + half : start + 2 * half]
    return out


def write_gguf(
    path: Path,
    variant: str,
    architecture: str,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    metadata: dict[str, Any] | None = None,
    tensors: dict[str, np.ndarray] | None = None,
    drop: Sequence[str] = (),
    split: int = 0,
) -> dict[str, np.ndarray]:
    """Writes ``variant`` with matrices of type ``kind``; gives the values a reader should find, by transformers name."""
    net = network(variant)
    config = net.config
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=split)
    facts: dict[str, Any] = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.freq_base": float(config.rope_parameters["rope_theta"]),
    }
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    facts["attention.key_length"] = facts["attention.value_length"] = facts["rope.dimension_count"] = head_dim
    facts = {**{f"{architecture}.{key}": value for key, value in facts.items()}, **(metadata or {})}
    for key, value in facts.items():
        if key in drop:
            continue
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)]
        add(key, value)
    found: dict[str, np.ndarray] = {}
    for name, parameter in net.state_dict().items():
        if name in drop or (name == "lm_head.weight" and config.tie_word_embeddings):
            continue
        values = parameter.detach().numpy()
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2], 0)
        stored = pair_order(values, heads) if heads and architecture == "llama" else values
        if values.ndim == 1 or kind == gguf.GGMLQuantizationType.F32:
            writer.add_tensor(gguf_name(name), np.ascontiguousarray(stored))
            found[name] = values
        else:
            packed = gguf.quantize(stored, kind)
            writer.add_tensor(gguf_name(name), packed, raw_dtype=kind)
            # rows are quantised one by one, so their order does not matter to their values
            found[name] = gguf.dequantize(gguf.quantize(values, kind), kind)
    for name, values in (tensors or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return found
