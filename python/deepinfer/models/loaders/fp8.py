"""Expands FP8 checkpoints to float32: one scale per block, per row or per tensor.

A weight ``W`` stored as ``W.weight`` (8-bit float) comes with ``W.weight_scale_inv`` (blocks of ``weight_block_size``) or
``W.weight_scale`` (per tensor or per output row); both multiply. Scales of activations and of KV only matter to 8-bit
arithmetic and are skipped.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ...errors import CheckpointError, UnsupportedConfigError
from .safetensors_source import SafetensorsSource

_SCALES = ("_scale_inv", "_scale")
_SKIPPED = ("*.input_scale", "*.activation_scale", "*.input_activation_scale", "*.k_scale", "*.v_scale", "*.q_scale")
_KNOWN_FIELDS = {
    "quant_method", "fmt", "weight_block_size", "activation_scheme", "modules_to_not_convert", "ignored_layers", "dequantize",
    "weight_per_tensor", "act_per_tensor", "kv_cache_scheme", "scale_fmt",
}  # fmt: skip


class Fp8Source:
    """A ``WeightSource`` over safetensors whose linear weights are FP8."""

    reads_ahead = True

    def __init__(self, stored: SafetensorsSource, quantization: Mapping[str, Any]) -> None:
        unknown = sorted(name for name, value in quantization.items() if name not in _KNOWN_FIELDS and value not in (None, False, [], {}))
        if unknown:
            raise UnsupportedConfigError(f"config field 'quantization_config.{unknown[0]}' is not implemented for FP8 checkpoints")
        if quantization.get("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
            raise UnsupportedConfigError(f"config field 'quantization_config.fmt' = {quantization['fmt']!r} is not implemented; e4m3 is")
        block = quantization.get("weight_block_size")
        if block is not None and (not isinstance(block, list) or len(block) != 2 or not all(isinstance(b, int) and b > 0 for b in block)):
            raise UnsupportedConfigError(
                f"config field 'quantization_config.weight_block_size' must be two positive integers, found {block!r}"
            )
        self._stored = stored
        self._block: tuple[int, int] | None = (block[0], block[1]) if block is not None else None
        present = set(stored.names())
        self._scale_of: dict[str, str] = {}
        for name in present:
            for ending in _SCALES:
                if name.endswith("weight" + ending):
                    self._scale_of[name.removesuffix(ending)] = name
        hidden = set(self._scale_of.values())
        self._names = [name for name in present - hidden if not any(fnmatch.fnmatchcase(name, pattern) for pattern in _SKIPPED)]

    def names(self) -> Iterable[str]:
        """See ``WeightSource``."""
        return self._names

    def shape(self, name: str) -> tuple[int, ...]:
        """See ``WeightSource``."""
        return self._stored.shape(name)

    def where(self, name: str) -> str:
        """See ``WeightSource``."""
        return self._stored.where(name)

    def read(self, name: str) -> torch.Tensor:
        """The tensor in float32 (or as stored, if it is not FP8)."""
        tensor = self._stored.read(name)
        if tensor.dtype not in (torch.float8_e4m3fn, torch.float8_e5m2):
            return tensor
        scale_name = self._scale_of.get(name)
        if scale_name is None:
            raise CheckpointError(f"tensor {name!r} in {self.where(name)} is FP8, but neither {name}_scale_inv nor {name}_scale is there")
        return self._expand(name, tensor.float(), self._stored.read(scale_name).float(), scale_name)

    def _expand(self, name: str, values: torch.Tensor, scale: torch.Tensor, scale_name: str) -> torch.Tensor:
        if scale.numel() == 1:
            return values * scale.reshape(())
        rows, columns = values.shape
        if tuple(scale.shape) in ((rows,), (rows, 1)):
            return values * scale.reshape(rows, 1)
        if self._block is not None:
            down, across = self._block
            if tuple(scale.shape) == (-(-rows // down), -(-columns // across)):
                wide = scale.repeat_interleave(down, 0)[:rows].repeat_interleave(across, 1)[:, :columns]
                return values * wide
        raise CheckpointError(
            f"tensor {scale_name!r} in {self.where(scale_name)} has shape {list(scale.shape)}, which fits {name!r} "
            f"{[rows, columns]} neither per tensor, per row nor in blocks of {self._block}"
        )
