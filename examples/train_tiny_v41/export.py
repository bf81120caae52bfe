"""Writes and reads weights as the release lays its own out: FP8 blocks, MXFP4 experts, safetensors shards, index, config, tokenizer.

Owns: the form of the files. Never touches: training. Names, shapes and formats come from the engine's own census of tensors, so what
is written is what ``deepinfer.LLM(model=DIR)`` reads.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from tokenizers import Tokenizer

from deepinfer.kernels.block_formats import (
    FP8_ROWS,
    decode_fp8_weight,
    decode_mxfp4_weight,
    decode_rows,
    encode_fp8_weight,
    encode_mxfp4_weight,
    encode_rows,
)
from deepinfer.models.deepseek_v41.made_tokenizer import save_tokenizer
from deepinfer.models.deepseek_v41.parameters import Form, Part, Weight, weights
from deepinfer.models.deepseek_v41.topology import read_topology
from deepinfer.models.loaders.safetensors_writer import StoredTensor, write_sharded

SHARD_BYTES = 12_000_000


def _encoded(weight: Weight, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What is stored of a float32 value: elements and scales, as bytes."""
    form = weight.stored.form
    if form is Form.FP8 and weight.stored.part is Part.ENGRAM_TABLE:
        records = encode_rows(value, FP8_ROWS)
        return records[:, : value.shape[1]].contiguous(), records[:, value.shape[1] :].contiguous()
    if form is Form.FP8:
        return encode_fp8_weight(value)
    if form is Form.FP4_PAIRS:
        return encode_mxfp4_weight(value)
    return (value.bfloat16() if form is Form.PLAIN else value.float()), None


def export(config: Mapping[str, Any], values: Mapping[str, torch.Tensor], tokenizer: Path, directory: Path) -> int:
    """Writes ``values`` (float32 by checkpoint name) to ``directory``; gives the bytes of all tensors.

    Raises ``KeyError`` if one is missing, ``ValueError`` if one has another shape or is not finite.
    """
    topology = read_topology(config)
    directory.mkdir(parents=True, exist_ok=True)
    stored: dict[str, tuple[StoredTensor, torch.Tensor]] = {}
    for weight in weights(topology):
        value = values[weight.name]
        if tuple(value.shape) != weight.shape or not bool(value.isfinite().all()):
            raise ValueError(f"{weight.name} must be {list(weight.shape)} finite numbers, found {list(value.shape)}")
        elements, scales = _encoded(weight, value)
        for spec, part in ((weight.stored, elements), (weight.scale, scales)):
            if spec is not None and part is not None:
                stored[spec.name] = (StoredTensor(spec.name, spec.form.value[0], spec.shape), part)

    def pieces(name: str) -> Iterator[memoryview]:
        yield stored[name][1].contiguous().flatten().view(torch.uint8).numpy().data.cast("B")

    write_sharded(directory, [tensor for tensor, _ in stored.values()], pieces, SHARD_BYTES)
    save_tokenizer(Tokenizer.from_file(str(tokenizer)), directory, topology.max_position)
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return sum(tensor.nbytes for tensor, _ in stored.values())


def _decoded(weight: Weight, elements: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
    """The float32 value of what is stored."""
    if scales is None:
        return elements.float()
    shape = (weight.shape[0], weight.shape[1])
    if weight.stored.part is Part.ENGRAM_TABLE:
        return decode_rows(torch.cat((elements.view(torch.uint8), scales.view(torch.uint8)), 1), FP8_ROWS, shape[1])
    decode = decode_fp8_weight if weight.stored.form is Form.FP8 else decode_mxfp4_weight
    return decode(elements, scales, shape, name=weight.name)


def read_released(directory: Path) -> dict[str, torch.Tensor]:
    """float32 weights by checkpoint name of what ``export`` wrote to ``directory``; ``KeyError`` if one is missing."""
    topology = read_topology(json.loads((directory / "config.json").read_text(encoding="utf-8")))
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            tensors |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (no mapping)
    return {
        weight.name: _decoded(weight, tensors[weight.name], None if weight.scale is None else tensors[weight.scale.name])
        for weight in weights(topology)
    }
