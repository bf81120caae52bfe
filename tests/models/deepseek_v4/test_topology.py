"""From DeepSeek-V4's configuration to plan and caches: both spellings, and every contradiction refused by the names of both fields."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from deepinfer.errors import UnsupportedConfigError, UnsupportedFormatError
from deepinfer.models import resolve_architecture
from deepinfer.models.deepseek_v4.caches import plan_caches
from deepinfer.models.deepseek_v4.forward import DeepseekV4Model
from deepinfer.models.deepseek_v4.topology import LayerKind, read_topology
from deepinfer.models.sizes import read_sizes

FILE = Path(__file__).resolve().parents[2] / "data" / "deepseek_v41" / "tiny_v4.json"
CSA, HCA = "compressed_sparse_attention", "heavily_compressed_attention"
TABLES = ("rope_scaling", "rope_theta", "compress_rope_theta")


def config(**changes: Any) -> dict[str, Any]:
    """The tiny configuration with fields changed; ``None`` removes one."""
    fields = {**json.loads(FILE.read_text(encoding="utf-8")), **changes}
    return {name: value for name, value in fields.items() if value is not None}


def released(**changes: Any) -> dict[str, Any]:
    """The same spelled as the release does, with its ratios and its widths of caches."""
    spelled: dict[str, Any] = {
        "layer_types": None, "mlp_layer_types": None, "compress_rates": None, "partial_rotary_factor": None,
        "compress_ratios": [0, 0, 4, 128, 4, 0], "num_hash_layers": 2, "num_nextn_predict_layers": 1, "topk_method": "noaux_tc",
    }  # fmt: skip
    return config(**{**spelled, **changes})


def test_the_architecture_leads_to_this_family() -> None:
    assert resolve_architecture("DeepseekV4ForCausalLM") is DeepseekV4Model


def test_layers_and_tables() -> None:
    t = read_topology(config())
    assert [plan.kind.name for plan in t.layers] == ["WINDOW", "WINDOW", "SPARSE", "LONG", "SPARSE"]
    assert [plan.ratio for plan in t.layers] == [0, 0, 4, 32, 4] and [plan.pooled for plan in t.layers] == [0, 0, 8, 32, 8]
    assert [plan.hashed for plan in t.layers] == [True, True, False, False, False]
    assert [plan.decoder for plan in t.layers] == [False] * 4 + [True]
    assert t.page_tokens == 128 and t.attention.rope == 16 and t.max_position == 4096
    assert (t.rope_main.theta, t.rope_main.rope_type) == (10000.0, "default")
    assert (t.rope_compress.theta, t.rope_compress.rope_type, t.rope_compress.attention_factor) == (160000.0, "yarn", 1.0)


def test_both_spellings_give_one_plan() -> None:
    new = read_topology(config(compress_rates={CSA: 4, HCA: 128}))
    assert read_topology(released()) == new
    fields = config(compress_rates={CSA: 4, HCA: 128})
    tables = {
        "main": {"rope_type": "default", "rope_theta": 10000, "partial_rotary_factor": 0.25},
        "compress": {**fields["rope_scaling"], "rope_theta": 160000, "partial_rotary_factor": 0.25, "attention_factor": 1.0},
    }
    as_saved = {**{name: value for name, value in fields.items() if name != "rope_scaling"}, "rope_parameters": tables}
    assert read_topology({**as_saved, "mlp_bias": False, "router_jitter_noise": 0.0, "output_router_logits": False}) == new


def test_pages_follow_the_ratios() -> None:
    assert read_topology(config(compress_rates={CSA: 4, HCA: 64})).page_tokens == 128
    assert read_topology(config(compress_rates={CSA: 4, HCA: 256})).page_tokens == 256


def test_caches() -> None:
    t = read_topology(released())
    plan = plan_caches(t, "bfloat16", 128, 6)
    (paged,), (state,) = plan.kv_groups()
    assert [(source.tensors[0], source.entries_per_page, source.entry_bytes) for source in paged.sources] == [
        ("layers.2.kv", 32, 128), ("layers.2.index", 32, 64), ("layers.3.kv", 1, 128), ("layers.4.kv", 32, 128), ("layers.4.index", 32, 64),
    ]  # fmt: skip
    assert paged.page_bytes == plan.page_bytes == 2 * 32 * (128 + 64) + 128
    window, overlapping, long = 22 * 128, 13 * 2 * 2 * (64 + 32) * 4, 133 * 2 * 64 * 4
    assert (plan.stored.nbytes, plan.dropped.nbytes) == (4 * window + 2 * overlapping, long + window)
    assert {field.name: field.keep for field in (*plan.stored.fields, *plan.dropped.fields) if "pending" in field.name} == {
        "layers.2.pending": 4, "layers.3.pending": 0, "layers.4.pending": 4,
    }  # fmt: skip
    assert state.hits is not None and (state.hits.encoder, state.hits.decoder, state.hits.grain) == (5, 1, 128)


def test_sizes_without_weights() -> None:
    sizes = read_sizes(config(), torch.float32)
    assert sizes.parameters == sum(place.numel() for place in _places()) and sizes.block_tokens == 128
    assert sizes.state[0].cut == 128 and sizes.max_position == 4096


def _places() -> list[torch.Tensor]:
    model = DeepseekV4Model.from_config(config(), torch.float32, torch.device("meta"))
    return [model.parameter(name) for name in model.parameter_shapes()]


def test_a_layer_at_a_time_counts_towards_the_reach_of_hits() -> None:
    long_alone = read_topology(config(layer_types=["sliding_attention", HCA, "sliding_attention", HCA, "sliding_attention"]))
    hits = plan_caches(long_alone, "float32", 128, 6).hits
    assert (hits.encoder, hits.decoder) == (3, 2)
    assert [plan.kind for plan in long_alone.sources] == [LayerKind.LONG] * 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["sliding_attention"] * 4}, "'layer_types' and 'num_hidden_layers' disagree: 4 kinds for 5 layers"),
        ({"layer_types": ["full_attention"] * 5}, "'layer_types' = .* known: sliding_attention"),
        ({"layer_types": ["sliding_attention"] * 5}, "'layer_types' names no layer that makes entries"),
        ({"layer_types": None}, r"'layer_types' \(or 'compress_ratios'\) is missing"),
        ({"mlp_layer_types": None}, r"'mlp_layer_types' \(or 'num_hash_layers'\) is missing"),
        ({"mlp_layer_types": ["moe"] * 6}, "'mlp_layer_types' and 'num_hidden_layers' disagree"),
        ({"num_hash_layers": 3}, "'mlp_layer_types' and 'num_hash_layers' disagree: the first 3 layers"),
        ({"num_hash_layers": 6}, "'num_hash_layers' = 6 must be a number of layers, of which there are 5"),
        ({"compress_ratios": [0, 0, 4, 4, 4]}, "'layer_types' and 'compress_ratios' disagree: layer 3 is heavily"),
        ({"compress_ratios": [0, 0, 4]}, "'compress_ratios' and 'num_hidden_layers' disagree: 3 ratios for 5 layers"),
        ({"compress_ratios": [0, 0, 8, 128, 4]}, "'compress_ratios' gives layer 2 the ratio 8; known: 0, 4 and 128"),
        ({"compress_ratios": [0, 0, 4, 128, 4]}, "'compress_rates' and 'compress_ratios' disagree: heavily_compressed_attention pools 32"),
        ({"compress_rates": {"other": 4}}, "'compress_rates' must map"),
        ({"compress_rates": {HCA: 40}}, "'compress_rates' joins 40 tokens of heavily_compressed_attention"),
        ({"compress_rates": {CSA: 0}}, f"'{CSA}' must be a positive integer"),
        ({"partial_rotary_factor": 0.5}, "'partial_rotary_factor' and 'qk_rope_head_dim' disagree: 0.5 of a head of 64 is 32, not 16"),
        ({"partial_rotary_factor": None, "qk_rope_head_dim": None}, "'qk_rope_head_dim' must be a positive integer"),
        ({"qk_rope_head_dim": 15, "partial_rotary_factor": None}, "'qk_rope_head_dim' = 15 must be even"),
        ({"o_groups": 3}, "'num_attention_heads' = 8 and 'o_groups' = 3 disagree"),
        ({"num_experts_per_tok": 9}, "'num_experts_per_tok' = 9 and 'n_routed_experts' = 8 disagree"),
        ({"num_experts_per_tok": 1}, "'num_experts_per_tok' = 1 is not implemented .*; 2 and more are"),
        ({"sliding_window": 1}, "'sliding_window' = 1 is not implemented .*; 2 and more are"),
        ({"scoring_func": "sigmoid"}, "'scoring_func' = 'sigmoid' is not implemented; 'sqrtsoftplus' is"),
        ({"norm_topk_prob": False}, "'norm_topk_prob' = False is not implemented"),
        ({"engram_layer_ids": [1]}, "not implemented: engram_layer_ids"),
    ],
)  # fmt: skip
def test_contradictions_are_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedConfigError, match=message):
        read_topology(config(**changes))


@pytest.mark.parametrize(
    "changes", [{"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}, {"expert_dtype": "fp4"}]
)
def test_packed_weights_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedFormatError, match="packed weights of this family are not read; use a checkpoint in plain floats"):
        read_topology(config(**changes))
