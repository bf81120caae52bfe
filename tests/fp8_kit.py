"""Checkpoints of the Llama family in FP8, as released, beside the same numbers expanded."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from deepinfer.models.llama.forward import LlamaModel

BLOCK = 128
"""Rows and columns that share a scale in releases."""

QUANTIZATION: dict[str, Any] = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}


def write_pair(folder: Path, config: Mapping[str, Any], powers: bool = False, plain: Sequence[str] = ()) -> tuple[str, str]:
    """Two folders with random weights: in FP8 with a scale a block, and the numbers these stand for in float32.

    ``powers``: scales are powers of two, so that no number needs rounding in bfloat16. ``plain``: modules that are not converted.
    """
    shapes = LlamaModel.from_config(config, torch.float32, torch.device("cpu")).parameter_shapes()
    generator = torch.Generator().manual_seed(5)
    packed: dict[str, torch.Tensor] = {}
    expanded: dict[str, torch.Tensor] = {}
    for name, shape in shapes.items():
        values = torch.randn(shape, generator=generator) * shape[-1] ** -0.5
        if len(shape) == 1:
            values += 1.0 if "norm" in name else 0.0
        if not name.endswith("_proj.weight") or name.removesuffix(".weight") in plain:
            packed[name] = expanded[name] = values.to(torch.bfloat16)
            continue
        rows, columns = shape
        down, across = -(-rows // BLOCK), -(-columns // BLOCK)
        scale = 2 ** torch.randn(down, across, generator=generator) / 448
        if powers:
            scale = torch.exp2(scale.log2().round())
        wide = scale.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
        packed[name] = (values / wide).clamp(-448, 448).to(torch.float8_e4m3fn)
        packed[f"{name}_scale_inv"] = scale
        expanded[name] = packed[name].float() * wide
    quantization = {**QUANTIZATION, **({"modules_to_not_convert": ["lm_head", *plain]} if plain else {})}
    made = []
    for kind, tensors, more in (("fp8", packed, {"quantization_config": quantization}), ("expanded", expanded, {})):
        where = folder / kind
        where.mkdir()
        (where / "config.json").write_text(json.dumps({**config, **more}))
        save_file(tensors, where / "model.safetensors", {"format": "pt"})
        made.append(str(where))
    return made[0], made[1]
