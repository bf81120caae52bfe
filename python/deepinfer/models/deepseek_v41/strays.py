"""Why a tensor of a checkpoint has no place in a plan: what its name would be, and the field of config.json that says otherwise."""

from __future__ import annotations

import re

from .shared_layers import LayerKind
from .topology import DeepseekV41Topology

_ADDRESS = re.compile(r"(layers|mtp)\.(\d+)\.(.+)")
_EXPERT = re.compile(r"ffn\.experts\.(\d+)\.")
# Names under which the same weights go in transformers; renamed checkpoints are not read.
_RENAMED = (
    (r"embed_tokens\.", "embed."),
    (r"self_attn\.compressor\.kv_proj", "attn.compressor.wkv"),
    (r"self_attn\.compressor\.gate_proj", "attn.compressor.wgate"),
    (r"self_attn\.compressor\.kv_norm", "attn.compressor.norm"),
    (r"self_attn\.indexer\.q_b_proj", "attn.indexer.wq_b"),
    (r"self_attn\.indexer\.k_proj", "attn.indexer.wk"),
    (r"self_attn\.q_a_proj", "attn.wq_a"),
    (r"self_attn\.q_b_proj", "attn.wq_b"),
    (r"self_attn\.q_a_norm", "attn.q_norm"),
    (r"self_attn\.kv_proj", "attn.wkv"),
    (r"self_attn\.o_a_proj", "attn.wo_a"),
    (r"self_attn\.o_b_proj", "attn.wo_b"),
    (r"self_attn\.sinks", "attn.attn_sink"),
    (r"self_attn\.", "attn."),
    (r"mlp\.gate\.e_score_correction_bias_vl", "ffn.gate.bias_vl"),
    (r"mlp\.gate\.e_score_correction_bias", "ffn.gate.bias"),
    (r"mlp\.shared_experts\.gate_proj", "ffn.shared_experts.w1"),
    (r"mlp\.shared_experts\.up_proj", "ffn.shared_experts.w3"),
    (r"mlp\.shared_experts\.down_proj", "ffn.shared_experts.w2"),
    (r"mlp\.experts\.gate_up_proj", "ffn.experts.<n>.w1 and w3"),
    (r"mlp\.experts\.down_proj", "ffn.experts.<n>.w2"),
    (r"mlp\.", "ffn."),
    (r"input_layernorm", "attn_norm"),
    (r"post_attention_layernorm", "ffn_norm"),
    (r"(attn|ffn)_hc\.", r"hc_\1_"),
)


def _in_layer(t: DeepseekV41Topology, index: int, rest: str) -> str | None:
    if index >= len(t.layers):
        return f"there are {len(t.layers)} layers ('num_hidden_layers')"
    plan = t.layers[index]
    if rest.startswith("attn.compressor.") and plan.kind is not LayerKind.FULL:
        return f"layer {index} makes no cache of its own ('kv_source_layer_ids')"
    if rest.startswith("attn.compressor.wgate"):
        return f"layer {index} pools nothing at ratio {plan.ratio} ('compress_ratios')"
    if rest.startswith(("attn.indexer.wk.", "attn.indexer.k_norm.")) and plan.kind is LayerKind.REINDEX:
        return f"layer {index} uses the index keys of layer {plan.index_key_source} ('kv_source_layer_ids')"
    if rest.startswith("attn.indexer.") and plan.kind not in (LayerKind.FULL, LayerKind.REINDEX):
        return f"layer {index} selects nothing by itself ('index_source_layer_ids')"
    if rest.startswith("engram.") and plan.engram is None:
        return f"layer {index} reads no table ('engram_layer_ids')"
    return _expert(rest, t.moe.experts, "n_routed_experts")


def _in_stage(t: DeepseekV41Topology, stage: int, rest: str) -> str | None:
    last = t.drafts.stages - 1
    if stage > last:
        return f"there are {t.drafts.stages} draft stages ('num_nextn_predict_layers')"
    if rest.startswith(("main_proj.", "main_norm.")):
        return "the first stage has it"
    if rest.startswith(("norm.", "markov_head.", "confidence_head.")):
        return f"the last stage, mtp.{last}, has it"
    if rest.startswith(("attn.compressor.", "attn.indexer.", "engram.")):
        return "draft stages read their window only"
    return _expert(rest, t.drafts.experts, "dspark_n_routed_experts")


def _expert(rest: str, experts: int, field: str) -> str | None:
    found = _EXPERT.match(rest)
    return f"there are {experts} experts ('{field}')" if found and int(found[1]) >= experts else None


def _released_name(name: str) -> str:
    plain = name.removeprefix("model.")
    if plain.startswith("lm_head."):
        return plain.replace("lm_head.", "head.", 1)
    for pattern, ours in _RENAMED:
        plain, changed = re.subn(pattern, ours, plain, count=1)
        if changed:
            break
    return plain


def explain(name: str, topology: DeepseekV41Topology) -> str | None:
    """Why ``name``, which the plan does not have, is not in it; None where nothing is known about such a name."""
    released = _released_name(name)
    if released != name:
        return f"the release calls it {released}; rename it"
    if name.endswith(".scale") and not topology.quantised_weights:
        return "config.json has no 'quantization_config', so nothing is packed"
    if topology.vision is None and name.startswith(("vision.", "aligner.", "image_")):
        return "config.json has no 'vision_config'"
    address = _ADDRESS.fullmatch(name)
    if address is None:
        return None
    kind, index, rest = address[1], int(address[2]), address[3]
    return _in_layer(topology, index, rest) if kind == "layers" else _in_stage(topology, index, rest)
