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
        CheckpointError, match=r"1 tensors have no place in it: layers\.7\.attn\.compressor\.wkv\.weight \(BF16 \[64, 256\]\)"
    ):
        check_tensors(specs, found, "here")


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
