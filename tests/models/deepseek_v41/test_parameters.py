"""The census of a checkpoint against the published totals and names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from deepinfer.models.deepseek_v41.parameters import Form, Part, checkpoint_parameters, count
from deepinfer.models.deepseek_v41.topology import read_topology

Load = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def names(load: Load) -> dict[str, tuple[tuple[int, ...], Form]]:
    specs = list(checkpoint_parameters(read_topology(load("full"))))
    found = {spec.name: (spec.shape, spec.form) for spec in specs}
    assert len(found) == len(specs), "a name twice"
    return found


def test_published_totals(load: Load) -> None:
    census = count(read_topology(load("full")))
    assert census.tensors == 96_085
    assert round(census.parameters[Part.BACKBONE] / 1e9) == 552
    assert round(census.parameters[Part.ENGRAM_TABLE] / 1e9, 1) == 196.6
    assert round(census.parameters[Part.DRAFT] / 1e9, 1) == 14.2
    assert census.nbytes[Part.ENGRAM_TABLE] == 768_022_850 * 264
    assert 505e9 < sum(census.nbytes.values()) < 515e9


def test_numbers_of_names_that_pin_the_plan(names: dict[str, Any]) -> None:
    def ending(suffix: str) -> int:
        return sum(name.endswith(suffix) for name in names)

    assert ending("compressor.wkv.weight") == 4
    assert ending("compressor.wgate.weight") == 3
    assert ending("indexer.wq_b.weight") == 8
    assert ending("indexer.wk.weight") == 4
    assert ending("engram.embed.scale") == 2
    assert sum(name.startswith("mtp.") for name in names) == 3 * 798 + 7
    assert sum(name.startswith("layers.0.") for name in names) == 2334
    assert sum(name.startswith(("vision.", "aligner.", "image_")) for name in names) == 266


@pytest.mark.parametrize(
    ("name", "shape", "form"),
    [
        ("embed.weight", (129280, 5120), Form.PLAIN),
        ("layers.7.attn.wq_a.scale", (40, 160), Form.SCALE),
        ("layers.7.attn.wq_b.weight", (32768, 1280), Form.FP8),
        ("layers.7.attn.wo_a.weight", (8192, 4096), Form.FP8),
        ("layers.7.attn.wo_b.weight", (5120, 8192), Form.FP8),
        ("layers.7.attn.attn_sink", (64,), Form.FLOAT32),
        ("layers.20.attn.compressor.wkv.weight", (512, 5120), Form.PLAIN),
        ("layers.24.attn.indexer.wq_b.weight", (4096, 1280), Form.FP8),
        ("layers.24.attn.indexer.weights_proj.weight", (32, 5120), Form.PLAIN),
        ("layers.20.attn.indexer.wk.weight", (128, 512), Form.PLAIN),
        ("layers.0.ffn.experts.383.w1.weight", (2304, 2560), Form.FP4_PAIRS),
        ("layers.0.ffn.experts.383.w2.weight", (5120, 1152), Form.FP4_PAIRS),
        ("layers.0.ffn.experts.383.w2.scale", (5120, 72), Form.SCALE),
        ("layers.0.hc_attn_fn", (24, 20480), Form.FLOAT32),
        ("layers.1.engram.embed.weight", (384006168, 256), Form.FP8),
        ("layers.14.engram.embed.scale", (384016682, 8), Form.SCALE),
        ("layers.14.engram.wkv.weight", (25600, 6144), Form.FP8),
        ("mtp.0.main_proj.weight", (5120, 15360), Form.FP8),
        ("mtp.2.markov_head.head.weight", (129280, 256), Form.PLAIN),
        ("mtp.2.confidence_head.proj.weight", (1, 5376), Form.PLAIN),
        ("mtp.1.ffn.gate.weight", (128, 5120), Form.PLAIN),
        ("vision.patch_embed.proj.weight", (1024, 588), Form.PLAIN),
        ("vision.blocks.31.mlp.w1.weight", (5632, 1024), Form.PLAIN),
        ("aligner.w1.weight", (5120, 9216), Form.PLAIN),
    ],
)
def test_shapes_of_the_release(names: dict[str, Any], name: str, shape: tuple[int, ...], form: Form) -> None:
    assert names[name] == (shape, form)


@pytest.mark.parametrize(
    "absent", ["layers.20.attn.compressor.wgate.weight", "layers.24.attn.indexer.wk.weight", "layers.3.attn.indexer.wq_b.weight"]
)
def test_layers_own_only_what_they_compute(names: dict[str, Any], absent: str) -> None:
    assert absent not in names


def test_small_model_has_its_published_size(load: Load) -> None:
    census = count(read_topology(load("tiny")))
    text = sum(number for part, number in census.parameters.items() if part is not Part.VISION)
    assert round(text / 1e6, 2) == 16.07


def test_plain_weights_have_no_scales_and_the_same_size(load: Load) -> None:
    config = load("tiny")
    quantised = count(read_topology(config))
    del config["quantization_config"]
    plain = read_topology(config)
    assert {spec.form for spec in checkpoint_parameters(plain)} == {Form.PLAIN, Form.FLOAT32}
    assert count(plain).parameters == quantised.parameters
