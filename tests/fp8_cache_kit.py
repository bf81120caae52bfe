"""Checkpoints of the Llama family with scales for keys and values in 8 bits."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
from safetensors.torch import save_file

from deepinfer.models.llama.forward import LlamaModel
from exact_kit import config_of

SPELLINGS = ("self_attn.{0}_scale", "self_attn.{0}_proj.{0}_scale")


def weights_of(config: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Random weights in float32."""
    shapes = LlamaModel.from_config(config, torch.float32, torch.device("cpu")).parameter_shapes()
    generator = torch.Generator().manual_seed(6)
    found = {}
    for name, shape in shapes.items():
        found[name] = torch.randn(shape, generator=generator) * (shape[-1] ** -0.5 if len(shape) > 1 else 0.1)
        if "norm" in name:
            found[name] += 1
    return found


def scales_of(layers: int, powers: bool = False) -> dict[str, torch.Tensor]:
    """Scales of all layers but the last, which has none, in both spellings; ``powers``: of two."""
    found = {}
    for layer in range(layers - 1):
        for part, value in (("k", 0.03 * (layer + 1)), ("v", 0.011 / (layer + 1))):
            value = 2.0 ** round(torch.tensor(value).log2().item()) if powers else value
            found[f"model.layers.{layer}.{SPELLINGS[layer % 2].format(part)}"] = torch.tensor(value) if layer % 2 else torch.tensor([value])
    return found


def write(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> str:
    """A checkpoint."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(dict(tensors), folder / "model.safetensors", {"format": "pt"})
    return str(folder)


@cache
def scaled_model(kind: str, place: str) -> str:
    """A checkpoint of a kind of ``exact_kit`` with scales."""
    config = config_of(kind, place)
    return write(Path(mkdtemp(prefix=f"scaled-{kind}-")), config, {**weights_of(config), **scales_of(config["num_hidden_layers"])})
