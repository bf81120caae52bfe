"""A released FP8 checkpoint of the Llama family runs as the numbers it stands for, to the last bit, on the kernels of any other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from deepinfer.models import resolve_model
from deepinfer.models.llama.forward import LlamaModel
from deepinfer.sampling import SamplingParams
from engine_kit import random_prompts
from exact_kit import SIZES, VOCAB, check_same, config_of, engine_of, run

BLOCK = 128
"""Rows and columns that share a scale in releases; 96 rows are not a whole one."""


def checkpoints(folder: Path, place: str) -> tuple[str, str]:
    """The same weights in FP8 with a scale a block, as released, and expanded."""
    config = config_of("qk_norm", place)
    shapes = LlamaModel.from_config(config, torch.float32, torch.device("cpu")).parameter_shapes()
    generator = torch.Generator().manual_seed(5)
    packed: dict[str, torch.Tensor] = {}
    expanded: dict[str, torch.Tensor] = {}
    for name, shape in shapes.items():
        values = torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=generator) * shape[-1] ** -0.5
        if not name.endswith("_proj.weight"):
            packed[name] = expanded[name] = values.to(torch.bfloat16)
            continue
        rows, columns = shape
        down, across = -(-rows // BLOCK), -(-columns // BLOCK)
        scale = 2 ** torch.randn(down, across, generator=generator) / 448
        wide = scale.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
        packed[name] = (values / wide).clamp(-448, 448).to(torch.float8_e4m3fn)
        packed[f"{name}_scale_inv"] = scale
        expanded[name] = packed[name].float() * wide
    fp8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}
    made = []
    for kind, tensors, more in (("fp8", packed, {"quantization_config": fp8}), ("expanded", expanded, {})):
        where = folder / kind
        where.mkdir()
        (where / "config.json").write_text(json.dumps({**config, **more}))
        save_file(tensors, where / "model.safetensors", {"format": "pt"})
        made.append(str(where))
    return made[0], made[1]


@pytest.mark.parametrize("place", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_fp8_weights_are_the_numbers_they_stand_for(place: str, tmp_path: Path) -> None:
    assert SIZES["cpu"]["intermediate_size"] % BLOCK
    fp8, expanded = checkpoints(tmp_path, place)
    assert resolve_model(fp8).weight_format == "fp8"
    prompts, params = random_prompts((5, 70, 33), vocab=VOCAB), SamplingParams(temperature=0, max_tokens=8, logprobs=-1)
    found = []
    for model in (fp8, expanded):
        with engine_of(place, "qk_norm", model=model, load_format="auto") as engine:
            found.append(run(engine, prompts, params))
    check_same(*found)
