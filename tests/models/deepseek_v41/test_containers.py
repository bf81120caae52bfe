"""Places of the containers against the census: every weight of a checkpoint has one, of its shape."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from deepinfer.models.deepseek_v41.containers import DeepseekV41Parameters
from deepinfer.models.deepseek_v41.parameters import Form, Part, checkpoint_parameters, weights
from deepinfer.models.deepseek_v41.topology import DeepseekV41Topology, read_topology

Load = Callable[..., dict[str, Any]]


def _held(topology: DeepseekV41Topology, name: str, part: Part) -> bool:
    """Whether memory is kept for it: tables stay in files, draft stages and text-only models see no images."""
    no_images = topology.vision is None or name.startswith("mtp.")
    return part is not Part.ENGRAM_TABLE and not (no_images and name.endswith(".bias_vl"))


@pytest.mark.parametrize("which", ["tiny", "full", "text", "plain"])
def test_every_weight_has_a_place_of_its_shape(load: Load, which: str) -> None:
    config = load("full" if which == "full" else "tiny")
    if which == "text":
        del config["vision_config"]
    if which == "plain":
        del config["quantization_config"]
    topology = read_topology(config)
    parameters = DeepseekV41Parameters(topology, torch.bfloat16, "meta")
    wanted = {weight.name: weight.shape for weight in weights(topology) if _held(topology, weight.name, weight.stored.part)}
    assert parameters.parameter_shapes() == wanted
    assert (parameters.vision is None) == (which == "text")


def test_packed_places_are_what_a_checkpoint_stores(load: Load) -> None:
    topology = read_topology(load("tiny"))
    parameters = DeepseekV41Parameters(topology, torch.bfloat16, "cpu", keep_packed=(Form.FP8, Form.FP4_PAIRS))
    stored = {spec.name: spec.shape for spec in checkpoint_parameters(topology) if _held(topology, spec.name, spec.part)}
    assert parameters.parameter_shapes() == stored
    moe, attn = parameters.layers[3].moe, parameters.layers[3].attn
    assert (moe.w13.dtype, moe.w13.shape, moe.scales["w13"].shape) == (torch.uint8, (8, 256, 128), (8, 256, 8))
    assert (moe.w2.shape, moe.scales["w2"].shape) == ((8, 256, 64), (8, 256, 4))
    assert (attn.wq_a.dtype, attn.scales["wq_a"].shape) == (torch.float8_e4m3fn, (3, 8))
    assert set(moe.scales) == {"w13", "w2", "shared_w13", "shared_w2"} and set(attn.scales) == {"wq_a", "wq_b", "wkv", "wo_a", "wo_b"}
    only = DeepseekV41Parameters(topology, torch.bfloat16, "cpu", keep_packed=(Form.FP4_PAIRS,))
    assert set(only.layers[3].moe.scales) == {"w13", "w2"} and not only.layers[3].attn.scales


def test_places_are_parts_of_what_the_forward_reads(load: Load) -> None:
    """Written under checkpoint names, read under attributes: which rows, which group, which expert."""
    p = DeepseekV41Parameters(read_topology(load("tiny")), torch.float32, "cpu")
    for number, (_, place) in enumerate(p.places.items()):
        place.fill_(number)
    of = {name: float(number) for number, name in enumerate(p.parameter_shapes())}
    layer = p.layers[2]
    experts = "layers.2.ffn.experts."
    for expert in range(8):
        assert layer.moe.w13[expert, :128].unique().item() == of[f"{experts}{expert}.w1.weight"]
        assert layer.moe.w13[expert, 128:].unique().item() == of[f"{experts}{expert}.w3.weight"]
        assert layer.moe.w2[expert].unique().item() == of[f"{experts}{expert}.w2.weight"]
    assert layer.moe.shared_w13[:128].unique().item() == of["layers.2.ffn.shared_experts.w1.weight"]
    assert layer.moe.shared_w13[128:].unique().item() == of["layers.2.ffn.shared_experts.w3.weight"]
    assert layer.attn.wo_a.shape == (4, 64, 128) and layer.attn.wo_a.unique().item() == of["layers.2.attn.wo_a.weight"]
    assert layer.hc_ffn.base.unique().item() == of["layers.2.hc_ffn_base"]
    assert layer.compressor is not None and layer.compressor.wgate is not None and layer.indexer is not None
    assert layer.indexer.k_norm is not None and layer.indexer.k_norm.unique().item() == of["layers.2.attn.indexer.k_norm.weight"]
    p.places["layers.2.attn.wo_a.weight"][64:128] = -1
    assert layer.attn.wo_a[1].unique().item() == -1 and layer.attn.wo_a[0].unique().item() != -1


def test_layers_own_what_they_compute(load: Load) -> None:
    p = DeepseekV41Parameters(read_topology(load("tiny")), torch.bfloat16, "meta")
    assert [i for i, layer in enumerate(p.layers) if layer.compressor] == [2, 4, 5]
    assert [i for i, layer in enumerate(p.layers) if layer.compressor and layer.compressor.wgate is not None] == [2, 4]
    assert [i for i, layer in enumerate(p.layers) if layer.indexer] == [2, 4, 5, 7, 9]
    assert [i for i, layer in enumerate(p.layers) if layer.indexer and layer.indexer.wk is not None] == [2, 4, 5]
    assert [i for i, layer in enumerate(p.layers) if layer.engram] == [1, 3]
    assert p.drafts is not None and len(p.drafts.stages) == 3
    assert all(s.moe.bias_vl is None and s.compressor is s.indexer is s.engram is None for s in p.drafts.stages)
    float32 = [p.norm, p.layers[0].attn.sink, p.layers[0].moe.gate, p.layers[0].hc_attn.fn, p.drafts.confidence]
    assert {tensor.dtype for tensor in float32} == {torch.float32}
    pooling, single = p.layers[4].compressor, p.layers[5].compressor
    assert pooling is not None and single is not None
    assert (pooling.wkv.dtype, single.wkv.dtype) == (torch.float32, torch.bfloat16)
    engram = p.layers[1].engram
    assert engram is not None
    with pytest.raises(RuntimeError, match="not opened"):
        _ = engram.table
