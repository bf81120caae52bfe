"""Tensors of GGUF files under ``transformers`` names, expanded to float32.

The converter that writes ``llama`` files reorders the rows of q and k so that rotation works on neighbouring pairs; that
order is undone here, because this project rotates halves.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, ReaderTensor, dequantize

from ...errors import CheckpointError, UnsupportedFormatError
from .gguf_file import check_parts, metadata, open_gguf

_GLOBAL = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight", "output.weight": "lm_head.weight"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_CONSUMED = {"rope_freqs.weight"}  # read as configuration
_BLOCK = re.compile(r"^blk\.(\d+)\.(\w+)\.(weight|bias)$")
_PIECE = 1 << 21  # elements expanded at a time by one thread: bounds temporary memory


def checkpoint_name(name: str) -> str:
    """``transformers`` name of a GGUF tensor; unknown names are kept, so that they are reported as they are."""
    if name in _GLOBAL:
        return _GLOBAL[name]
    match = _BLOCK.match(name)
    if match and match[2] in _LAYER:
        return f"model.layers.{match[1]}.{_LAYER[match[2]]}.{match[3]}"
    return name


def _check_types(kinds: Mapping[GGMLQuantizationType, tuple[str, Path]]) -> None:
    for kind, (name, path) in kinds.items():
        if kind in (GGMLQuantizationType.F32, GGMLQuantizationType.F16):
            continue
        try:
            dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), dtype=np.uint8), kind)
        except (NotImplementedError, KeyError):
            raise UnsupportedFormatError(
                f"GGUF type {kind.name} (tensor {name!r} in {path}) cannot be expanded; requantise the model to another type"
            ) from None


def expand(tensor: ReaderTensor, pool: ThreadPoolExecutor | None = None) -> torch.Tensor:
    """Values of a stored tensor as float32, row by row over the threads of ``pool``."""
    shape = tuple(int(size) for size in reversed(tensor.shape.tolist()))
    if len(shape) == 1:
        return torch.from_numpy(np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)).view(shape)
    out = np.empty(shape, dtype=np.float32)
    step = max(1, _PIECE // shape[-1])

    def run(start: int) -> None:
        out[start : start + step] = dequantize(tensor.data[start : start + step], tensor.tensor_type)

    starts = range(0, shape[0], step)
    if pool is None or len(starts) == 1:
        for start in starts:
            run(start)
    else:
        list(pool.map(run, starts))
    return torch.from_numpy(out)


class GgufSource:
    """A ``WeightSource`` over the parts of a GGUF model; ``config`` is the one made from its metadata."""

    def __init__(self, paths: Sequence[Path], config: Mapping[str, Any]) -> None:
        check_parts(paths)
        self._tensors: dict[str, ReaderTensor] = {}
        self._files: dict[str, Path] = {}
        self._first = paths[0]
        kinds: dict[GGMLQuantizationType, tuple[str, Path]] = {}
        for path in paths:
            for tensor in open_gguf(path).tensors:
                if tensor.name in _CONSUMED:
                    continue
                name = checkpoint_name(tensor.name)
                if name in self._tensors:
                    raise CheckpointError(f"tensor {tensor.name!r} is both in {self._files[name]} and in {path}")
                self._tensors[name], self._files[name] = tensor, path
                kinds.setdefault(tensor.tensor_type, (tensor.name, path))
        _check_types(kinds)
        self._heads = {"q_proj": int(config["num_attention_heads"]), "k_proj": int(config["num_key_value_heads"])}
        self._reordered = metadata(open_gguf(paths[0])).get("general.architecture") == "llama"
        self._pool = ThreadPoolExecutor(max(1, torch.get_num_threads()))

    def names(self) -> Iterable[str]:
        """See ``WeightSource``."""
        return self._tensors

    def shape(self, name: str) -> tuple[int, ...]:
        """See ``WeightSource``."""
        return tuple(int(size) for size in reversed(self._tensors[name].shape.tolist()))

    def where(self, name: str) -> str:
        """See ``WeightSource``."""
        return str(self._files.get(name, self._first))

    def read(self, name: str) -> torch.Tensor:
        """The tensor in float32, rows of q and k in the half-rotated order."""
        values = expand(self._tensors[name], self._pool)
        part = name.split(".")[-2]
        if self._reordered and part in self._heads:
            values = undo_pair_order(values, self._heads[part])
        return values


def undo_pair_order(values: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of each head from (pair, member) order to (member, pair) order; ``values`` ``[heads * d, ...]``."""
    rows = values.shape[0]
    if rows % (2 * heads):
        raise CheckpointError(f"a q or k tensor of {rows} rows does not divide into {heads} heads")
    return values.view(heads, rows // heads // 2, 2, *values.shape[1:]).transpose(1, 2).reshape(values.shape)
