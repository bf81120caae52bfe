"""From configuration to plan: maps of the release, spellings, and every contradiction refused by both names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from deepinfer.errors import UnsupportedConfigError, UnsupportedFormatError, UnsupportedModelError
from deepinfer.kernels.rope import RopeTable, yarn_band
from deepinfer.models import resolve_architecture
from deepinfer.models.deepseek_v41.forward import DeepseekV41Model
from deepinfer.models.deepseek_v41.shared_layers import LayerKind, SharedLayerTopology
from deepinfer.models.deepseek_v41.topology import read_topology

Load = Callable[..., dict[str, Any]]


def test_the_architecture_leads_to_this_family() -> None:
    assert resolve_architecture("DeepseekV41ForCausalLM") is DeepseekV41Model
    with pytest.raises(UnsupportedModelError, match="DeepseekV41ForSomethingElse"):
        resolve_architecture("DeepseekV41ForSomethingElse")


def test_layers_of_the_release(load: Load) -> None:
    t = read_topology(load("full"))
    kinds = {kind: [plan.index for plan in t.layers if plan.kind is kind] for kind in LayerKind}
    assert kinds[LayerKind.WINDOW] == [0, 1]
    assert kinds[LayerKind.FULL] == [2, 8, 14, 20]
    assert kinds[LayerKind.REINDEX] == [24, 28, 32, 36]
    assert len(kinds[LayerKind.REUSE]) == 30
    assert [t.layers[index].kv_source for index in (1, 2, 7, 8, 13, 14, 19, 20, 24, 39)] == [None, 2, 2, 8, 8, 14, 14, 20, 20, 20]
    assert [t.layers[index].index_source for index in (1, 7, 19, 20, 23, 24, 27, 28, 39)] == [None, 2, 14, 20, 20, 24, 24, 28, 36]
    assert t.shared.share_index_key == t.shared.share_kv
    assert [plan.index for plan in t.layers if plan.candidates] == [24, 28, 32, 36]
    assert [plan.index for plan in t.layers if plan.tapped] == [37, 38, 39]
    assert [plan.index for plan in t.layers if plan.engram is not None] == [1, 14]
    assert [plan.index for plan in t.layers if plan.decoder] == list(range(20, 40))
    assert {plan.stretched_rope for plan in t.layers[:2]} == {False} and all(plan.stretched_rope for plan in t.layers[2:])


def test_lengths_of_the_release(load: Load) -> None:
    t = read_topology(load("full"))
    assert (t.max_backtracking, t.ring, t.least_keep) == (6, 134, 134)
    assert t.exact_decoder_tokens == 20 * 127 + 1
    assert t.exact_tokens == 40 * 127 + 1
    tiny = read_topology(load("tiny"))
    assert (tiny.encoder_layers, tiny.ring, tiny.exact_decoder_tokens) == (5, 22, 76)
    assert read_topology(load("tiny128")).ring == 134


def test_rope_tables_of_the_release(load: Load) -> None:
    t = read_topology(load("full"))
    assert (t.rope_main.theta, t.rope_main.rope_type, t.rope_main.head_dim) == (10000.0, "default", 64)
    assert (t.rope_compress.theta, t.rope_compress.rope_type, t.rope_compress.factor) == (160000.0, "yarn", 16.0)
    assert yarn_band(t.rope_compress) == (15, 25)
    table = RopeTable(t.rope_compress, torch.device("cpu"))
    assert table.scale == 1.0
    pair = torch.arange(32, dtype=torch.float64)
    plain = 160000.0 ** (-2 * pair / 64)
    ramp = ((pair - 15) / 10).clamp(0, 1)
    torch.testing.assert_close(table.frequencies.double(), plain / 16 * ramp + plain * (1 - ramp), rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", ["full", "tiny", "tiny128"])
def test_flat_and_nested_are_one(load: Load, flat: Load, name: str) -> None:
    assert read_topology(flat(name)) == read_topology(load(name))


def test_both_spellings_of_the_pad_id(load: Load) -> None:
    short = load("tiny", engram_pad_token_id=None, engram_pad_id=2)
    assert read_topology(short) == read_topology(load("tiny"))
    assert read_topology(load("tiny", engram_pad_id=2)) == read_topology(load("tiny"))
    with pytest.raises(UnsupportedConfigError, match=r"'engram_pad_token_id' = 2 and 'engram_pad_id' = 3"):
        read_topology(load("tiny", engram_pad_id=3))


def test_both_spellings_of_the_angles(load: Load) -> None:
    scaling = load("full")["text_config"]["rope_scaling"]
    tables = {"main": {"rope_type": "default", "rope_theta": 10000}, "compress": {**scaling, "rope_theta": 160000}}
    newer = load("full", rope_scaling=None, rope_theta=None, compress_rope_theta=None, rope_parameters=tables)
    assert read_topology(newer) == read_topology(load("full"))
    both = load("full", rope_parameters={**tables, "compress": {**tables["compress"], "factor": 8}})
    with pytest.raises(UnsupportedConfigError, match=r"'rope_scaling.factor' and 'rope_parameters.compress.factor'"):
        read_topology(both)
    with pytest.raises(UnsupportedConfigError, match=r"'rope_theta' = 10000 and 'rope_parameters.main.rope_theta' = 5"):
        read_topology(load("full", rope_scaling=None, rope_parameters={**tables, "main": {"rope_theta": 5}}))
    with pytest.raises(UnsupportedConfigError, match=r"'mscale' = 0\.7"):
        read_topology(load("full", rope_scaling={**scaling, "mscale": 0.7}))


def test_without_vision_engram_candidates_or_drafts(load: Load) -> None:
    ratios = load("tiny")["text_config"]["compress_ratios"][:10]
    config = load("tiny", engram_layer_ids=[], candidate_source_layer_id=-1, num_nextn_predict_layers=0, compress_ratios=ratios)
    del config["vision_config"]
    t = read_topology(config)
    assert t.engram is None and t.vision is None and t.drafts.stages == 0
    assert (t.max_backtracking, t.ring) == (1, 17)
    assert not any(plan.candidates or plan.tapped for plan in t.layers)


def test_weights_without_quantisation(load: Load) -> None:
    config = load("tiny")
    assert read_topology(config).quantised_weights
    del config["quantization_config"]
    assert not read_topology(config).quantised_weights


CONTRADICTIONS: list[tuple[dict[str, Any], str, str]] = [
    ({"num_hidden_layers": 9}, "compress_ratios", "num_hidden_layers"),
    ({"compress_ratios": [0, 0, 2, 2, 2, 1, 1, 1, 1, 1, 0, 0, 1]}, "compress_ratios", "num_nextn_predict_layers"),
    ({"compress_ratios": [0, 2, 2, 2, 2, 1, 1, 1, 1, 1, 0, 0, 0]}, "compress_ratios", "kv_source_layer_ids"),
    ({"compress_ratios": [0, 0, 2, 1, 2, 1, 1, 1, 1, 1, 0, 0, 0]}, "compress_ratios", "kv_source_layer_ids"),
    ({"compress_ratios": [0, 0, 2, 2, 2, 1, 1, 1, 0, 1, 0, 0, 0]}, "compress_ratios", "kv_source_layer_ids"),
    ({"kv_source_layer_ids": [1, 2, 4, 5], "index_source_layer_ids": [1, 2, 4, 5]}, "kv_source_layer_ids", "compress_ratios"),
    ({"kv_source_layer_ids": [2, 3, 5]}, "kv_source_layer_ids", "index_source_layer_ids"),
    ({"kv_source_layer_ids": [2, 4, 5, 12]}, "kv_source_layer_ids", "num_hidden_layers"),
    ({"index_source_layer_ids": [1, 2, 4, 5, 7, 9]}, "index_source_layer_ids", "compress_ratios"),
    ({"index_source_layer_ids": [2, 4, 5, 7, 10]}, "index_source_layer_ids", "num_hidden_layers"),
    ({"candidate_source_layer_id": 6}, "candidate_source_layer_id", "index_source_layer_ids"),
    ({"candidate_source_layer_id": 4}, "candidate_source_layer_id", "kv_source_layer_ids"),
    ({"candidate_topk_blocks": 2}, "candidate_topk_blocks", "index_topk"),
    ({"engram_layer_ids": [1, 6]}, "engram_layer_ids", "kv_source_layer_ids"),
    ({"engram_layer_ids": [1, 16]}, "engram_layer_ids", "num_hidden_layers"),
    ({"engram_num_embeddings": [6126]}, "engram_num_embeddings", "engram_layer_ids"),
    ({"engram_num_embeddings": [6126, 6331]}, "engram_num_embeddings", "engram_vocab_size"),
    ({"engram_vocab_size": 1010}, "engram_num_embeddings", "engram_vocab_size"),
    ({"engram_compressed_vocab_size": 2049}, "engram_compressed_vocab_size", "vocab_size"),
    ({"engram_compressed_vocab_size": 2000}, "x_engram_token_map", "engram_compressed_vocab_size"),
    ({"engram_pad_token_id": 2048}, "engram_pad_token_id", "vocab_size"),
    ({"engram_head_dim": 40}, "engram_head_dim", "quantization_config"),
    ({"dspark_target_layer_ids": [7, 8, 10]}, "dspark_target_layer_ids", "num_hidden_layers"),
    ({"dspark_target_layer_ids": [4, 8, 9]}, "dspark_target_layer_ids", "kv_source_layer_ids"),
    ({"dspark_noise_token_id": 2048}, "dspark_noise_token_id", "vocab_size"),
    ({"dspark_num_experts_per_tok": 5}, "dspark_num_experts_per_tok", "dspark_n_routed_experts"),
    ({"num_experts_per_tok": 9}, "num_experts_per_tok", "n_routed_experts"),
    ({"moe_intermediate_size": 100}, "moe_intermediate_size", "quantization_config.expert_dtype"),
    ({"o_groups": 3}, "num_attention_heads", "o_groups"),
    ({"qk_rope_head_dim": 34}, "qk_rope_head_dim", "index_head_dim"),
    ({"vocab_size": 2046, "engram_compressed_vocab_size": 2046, "dspark_noise_token_id": 1}, "image_token_id", "vocab_size"),
    ({"image_token_id": 5}, "image_token_id", "text_config.image_token_id"),
]


@pytest.mark.parametrize(("changes", "first", "second"), CONTRADICTIONS)
def test_contradictions_name_both_fields(load: Load, changes: dict[str, Any], first: str, second: str) -> None:
    with pytest.raises(UnsupportedConfigError) as caught:
        read_topology(load("tiny", **changes))
    assert f"'{first}'" in str(caught.value) and f"'{second}'" in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"compress_ratios": [0, 0, 4, 4, 4, 1, 1, 1, 1, 1, 0, 0, 0]}, "'compress_ratios' gives layer 2 the ratio 4"),
        ({"kv_source_layer_ids": [4, 2, 5]}, "'kv_source_layer_ids'"),
        ({"kv_source_layer_ids": []}, "'kv_source_layer_ids' is empty"),
        ({"index_source_layer_ids": None}, "'index_source_layer_ids'"),
        ({"qk_rope_head_dim": 15}, "'qk_rope_head_dim' = 15 must be even"),
        ({"scoring_func": "sigmoid"}, "'scoring_func' = 'sigmoid'"),
        ({"tie_word_embeddings": True}, "'tie_word_embeddings'"),
        ({"num_hash_layers": 3}, "'num_hash_layers' = 3"),
        ({"num_key_value_heads": 2}, "'num_key_value_heads' = 2"),
        ({"x_cache_quant": "fp8"}, "'x_cache_quant' = 'fp8'"),
        ({"q_norm_per_head": True}, "q_norm_per_head"),
        ({"swiglu_limit": "ten"}, "'swiglu_limit'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"dspark_target_layer_ids": [8, 7, 9]}, "'dspark_target_layer_ids'"),
    ],
)
def test_fields_that_are_refused(load: Load, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedConfigError) as caught:
        read_topology(load("tiny", **changes))
    assert named in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"weight_block_size": [128, 128]}, "quantization_config.weight_block_size"),
        ({"scale_fmt": None}, "quantization_config.scale_fmt"),
        ({"expert_dtype": "fp8"}, "quantization_config.expert_dtype"),
        ({"moe_quant_algo": "NVFP4"}, "quantization_config.moe_quant_algo"),
    ],
)
def test_other_weight_formats_are_refused(load: Load, changes: dict[str, Any], named: str) -> None:
    config = load("tiny")
    config["quantization_config"].update(changes)
    with pytest.raises(UnsupportedConfigError, match=named):
        read_topology(config)


def test_foreign_formats_are_named(load: Load) -> None:
    config = load("tiny")
    config["quantization_config"] = {"quant_method": "awq"}
    with pytest.raises(UnsupportedFormatError, match="AWQ"):
        read_topology(config)


def test_vision_needs_its_token(load: Load) -> None:
    config = load("tiny")
    del config["image_token_id"]
    with pytest.raises(UnsupportedConfigError, match="'vision_config' and 'image_token_id'"):
        read_topology(config)
    config = load("tiny")
    config["vision_config"]["num_attention_heads"] = 5
    with pytest.raises(UnsupportedConfigError, match=r"vision_config.hidden_size.*vision_config.num_attention_heads"):
        read_topology(config)


def test_reindex_layers_without_a_candidate_source_score_everything() -> None:
    shared = SharedLayerTopology.derive(6, 0, [0, 1, 1, 1, 1, 1], [1], [1, 3, 5], None)
    assert shared.kinds[3] is LayerKind.REINDEX and not shared.uses_candidates(3)
    narrowed = SharedLayerTopology.derive(6, 0, [0, 1, 1, 1, 1, 1], [1], [1, 3, 5], 3)
    assert [layer for layer in range(6) if narrowed.uses_candidates(layer)] == [5]
