"""A checkpoint's list of tensors against the plan: nothing is read, everything that is off is named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from deepinfer.errors import CheckpointError
from deepinfer.kernels.block_formats import encode_fp8_weight, encode_mxfp4_weight
from deepinfer.models.deepseek_v41.checkpoint import check_tensors
from deepinfer.models.deepseek_v41.parameters import ParameterSpec, checkpoint_parameters
from deepinfer.models.deepseek_v41.strays import explain
from deepinfer.models.deepseek_v41.topology import read_topology
from deepinfer.models.loaders.safetensors_source import SafetensorsSource

Load = Callable[..., dict[str, Any]]
EXPERT = "layers.3.ffn.experts.5.w1"


@pytest.fixture
def specs(load: Load) -> list[ParameterSpec]:
    return list(checkpoint_parameters(read_topology(load("tiny"))))


@pytest.fixture
def found(specs: list[ParameterSpec]) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {spec.name: (spec.form.value[0], spec.shape) for spec in specs}


def test_a_whole_checkpoint_passes(specs: list[ParameterSpec], found: dict[str, Any]) -> None:
    check_tensors(specs, found, "here")
    found["norm.weight"] = ("F32", found["norm.weight"][1])
    check_tensors(specs, found, "here")


def test_missing_tensors_are_listed_with_what_they_are(specs: list[ParameterSpec], found: dict[str, Any]) -> None:
    for name in [name for name in found if name.startswith("mtp.1.")]:
        del found[name]
    with pytest.raises(CheckpointError) as caught:
        check_tensors(specs, found, "here")
    message = str(caught.value)
    assert message.startswith("here does not fit its config.json. 54 tensors are missing: mtp.1.attn.wq_a.weight (draft: FP8 elements, ")
    assert message.count("mtp.1.") == 10 and message.endswith("; and 44 more")


def test_tensors_of_another_plan_are_listed(specs: list[ParameterSpec], found: dict[str, Any]) -> None:
    found["layers.7.attn.compressor.wkv.weight"] = ("BF16", (64, 256))
    with pytest.raises(
        CheckpointError, match=r"1 tensor has no place in it: layers\.7\.attn\.compressor\.wkv\.weight \(BF16 \[64, 256\]\)"
    ):
        check_tensors(specs, found, "here")


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("layers.10.attn.wkv.weight", "there are 10 layers ('num_hidden_layers')"),
        ("layers.3.attn.compressor.wkv.weight", "layer 3 makes no cache of its own ('kv_source_layer_ids')"),
        ("layers.5.attn.compressor.wgate.weight", "layer 5 pools nothing at ratio 1 ('compress_ratios')"),
        ("layers.7.attn.indexer.wk.weight", "layer 7 uses the index keys of layer 5 ('kv_source_layer_ids')"),
        ("layers.6.attn.indexer.wq_b.scale", "layer 6 selects nothing by itself ('index_source_layer_ids')"),
        ("layers.0.engram.embed.weight", "layer 0 reads no table ('engram_layer_ids')"),
        ("layers.0.ffn.experts.8.w1.weight", "there are 8 experts ('n_routed_experts')"),
        ("mtp.0.ffn.experts.4.w1.weight", "there are 4 experts ('dspark_n_routed_experts')"),
        ("mtp.3.attn.wkv.weight", "there are 3 draft stages ('num_nextn_predict_layers')"),
        ("mtp.1.main_proj.weight", "the first stage has it"),
        ("mtp.0.norm.weight", "the last stage, mtp.2, has it"),
        ("mtp.0.attn.indexer.wk.weight", "draft stages read their window only"),
        ("vision.norm.weight", "config.json has no 'vision_config'"),
        ("image_start", "config.json has no 'vision_config'"),
        ("lm_head.weight", "the release calls it head.weight; rename it"),
        ("model.embed_tokens.weight", "the release calls it embed.weight; rename it"),
        ("model.norm.weight", "the release calls it norm.weight; rename it"),
        ("model.layers.4.self_attn.o_b_proj.weight", "the release calls it layers.4.attn.wo_b.weight; rename it"),
        ("model.layers.4.self_attn.kv_norm.weight", "the release calls it layers.4.attn.kv_norm.weight; rename it"),
        ("model.layers.4.mlp.gate.e_score_correction_bias", "the release calls it layers.4.ffn.gate.bias; rename it"),
        ("model.layers.4.ffn_hc.scale", "the release calls it layers.4.hc_ffn_scale; rename it"),
        ("layers.4.attn.q_proj.weight", None),
        ("something", None),
    ],
)
def test_a_stray_tensor_is_explained(load: Load, name: str, why: str | None) -> None:
    config = load("tiny")
    del config["vision_config"]
    topology = read_topology(config)
    assert name not in {spec.name for spec in checkpoint_parameters(topology)}
    assert explain(name, topology) == why


def test_names_of_transformers_are_those_of_the_plan(load: Load) -> None:
    """What a stray tensor is said to be called is something the plan has."""
    topology = read_topology(load("tiny"))
    names = {spec.name for spec in checkpoint_parameters(topology)}
    renamed = {
        "self_attn.q_a_proj.weight", "self_attn.q_a_norm.weight", "self_attn.q_b_proj.weight", "self_attn.kv_proj.weight",
        "self_attn.o_a_proj.weight", "self_attn.sinks", "self_attn.compressor.kv_proj.weight", "self_attn.compressor.gate_proj.weight",
        "self_attn.compressor.kv_norm.weight", "self_attn.indexer.q_b_proj.weight", "self_attn.indexer.k_proj.weight",
        "self_attn.indexer.k_norm.weight", "self_attn.indexer.weights_proj.weight", "mlp.gate.weight",
        "mlp.gate.e_score_correction_bias_vl", "mlp.shared_experts.gate_proj.weight", "mlp.shared_experts.up_proj.weight",
        "mlp.shared_experts.down_proj.weight", "input_layernorm.weight", "post_attention_layernorm.weight", "attn_hc.fn", "ffn_hc.base",
    }  # fmt: skip
    for name in renamed:
        said = explain(f"model.layers.2.{name}", topology)
        assert said is not None and said.split()[4].removesuffix(";") in names, (name, said)


def test_scales_without_packed_weights_are_explained(load: Load) -> None:
    config = load("tiny")
    del config["quantization_config"]
    assert explain("layers.0.attn.wkv.scale", read_topology(config)) == "config.json has no 'quantization_config', so nothing is packed"


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        ("F8_E4M3", (128, 128)),  # the bytes of FP4 pairs under an FP8 name
        ("F8_E4M3", (128, 256)),
        ("I8", (128, 256)),
        ("BF16", (128, 256)),
    ],
)
def test_an_expert_in_another_form_is_refused(specs: list[ParameterSpec], found: dict[str, Any], kind: str, shape: tuple[int, ...]) -> None:
    found[f"{EXPERT}.weight"] = (kind, shape)
    with pytest.raises(CheckpointError) as caught:
        check_tensors(specs, found, "here")
    assert f"{EXPERT}.weight is {kind} {list(shape)}, not FP4 pairs, I8 or U8 [128, 128]" in str(caught.value)


def test_scales_as_floats_are_refused(specs: list[ParameterSpec], found: dict[str, Any]) -> None:
    found[f"{EXPERT}.scale"] = ("F32", found[f"{EXPERT}.scale"][1])
    with pytest.raises(CheckpointError, match="not ue8m0 scales, F8_E8M0 or U8"):
        check_tensors(specs, found, "here")


def test_encoded_weights_are_what_the_plan_expects(specs: list[ParameterSpec], tmp_path: Path) -> None:
    """Forms and types agree with what the encoders make and what safetensors calls it."""
    linear = "layers.3.attn.wkv"
    tensors: dict[str, torch.Tensor] = {}
    tensors[f"{EXPERT}.weight"], tensors[f"{EXPERT}.scale"] = encode_mxfp4_weight(torch.randn(128, 256))
    tensors[f"{linear}.weight"], tensors[f"{linear}.scale"] = encode_fp8_weight(torch.randn(64, 256))
    save_file(tensors, tmp_path / "model.safetensors")
    source = SafetensorsSource([tmp_path / "model.safetensors"])
    found = {name: (source.dtypes[name], source.shape(name)) for name in source.names()}
    check_tensors([spec for spec in specs if spec.name in tensors], found, "here")
    assert len(found) == 4
