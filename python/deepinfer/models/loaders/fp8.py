"""FP8 checkpoints: one scale per block, per row or per tensor. Expanded to float32, or kept as they are.

A weight ``W`` stored as ``W.weight`` (8-bit float) comes with ``W.weight_scale_inv`` (blocks of ``weight_block_size``) or
``W.weight_scale`` (per tensor or per output row); both multiply. Scales of activations and of KV only matter to 8-bit
arithmetic and are skipped; those of KV are read by ``kv_scales`` where KV is kept in 8 bits.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Protocol

import torch

from ...errors import CheckpointError, UnsupportedConfigError
from ...kernels.linear_fp8 import can_spread, scale_shape, spread_scale
from ..places import PACKED_SCALE
from .source import WeightSource, check_numbers

_SCALES = ("_scale_inv", "_scale")
_SKIPPED = (
    "*.input_scale", "*.activation_scale", "*.input_activation_scale", "*.k_scale", "*.v_scale", "*.kv_scale", "*.q_scale",
)  # fmt: skip
_KNOWN_FIELDS = {
    "quant_method", "fmt", "weight_block_size", "activation_scheme", "modules_to_not_convert", "ignored_layers", "dequantize",
    "weight_per_tensor", "act_per_tensor", "kv_cache_scheme", "scale_fmt",
}  # fmt: skip
_PACKED_TYPE = "F8_E4M3"


class StoredTensors(WeightSource, Protocol):
    """Tensors as a checkpoint stores them. ``dtypes``: name → type, as safetensors names them."""

    dtypes: dict[str, str]


def block_of(quantization: Mapping[str, Any]) -> tuple[int, int] | None:
    """Rows and columns that share a scale; ``None`` = no blocks. Raises ``UnsupportedConfigError``."""
    block = quantization.get("weight_block_size")
    if block is None:
        return None
    if not isinstance(block, list) or len(block) != 2 or not all(isinstance(b, int) and b > 0 for b in block):
        raise UnsupportedConfigError(f"config field 'quantization_config.weight_block_size' must be two positive integers, found {block!r}")
    return block[0], block[1]


def may_pack(quantization: Mapping[str, Any]) -> bool:
    """Whether weights of a checkpoint with this ``quantization_config`` may stay packed; {} = it has none."""
    block = block_of(quantization)
    return bool(quantization) and (block is None or can_spread((1 << 30, 1 << 30), block))


class Fp8Source:
    """A ``WeightSource`` over ``stored`` tensors whose linear weights are FP8."""

    reads_ahead = True

    def __init__(self, stored: StoredTensors, quantization: Mapping[str, Any]) -> None:
        unknown = sorted(name for name, value in quantization.items() if name not in _KNOWN_FIELDS and value not in (None, False, [], {}))
        if unknown:
            raise UnsupportedConfigError(f"config field 'quantization_config.{unknown[0]}' is not implemented for FP8 checkpoints")
        if quantization.get("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
            raise UnsupportedConfigError(f"config field 'quantization_config.fmt' = {quantization['fmt']!r} is not implemented; e4m3 is")
        self._block = block_of(quantization)
        self.stored = stored
        present = set(stored.names())
        self._scale_of: dict[str, str] = {}
        for name in present:
            for ending in _SCALES:
                if name.endswith("weight" + ending):
                    self._scale_of[name.removesuffix(ending)] = name
        hidden = set(self._scale_of.values())
        self._names = [name for name in present - hidden if not any(fnmatch.fnmatchcase(name, pattern) for pattern in _SKIPPED)]
        self._kept: dict[str, str] = {}
        self._dtype = torch.float32

    def packable(self) -> frozenset[str]:
        """Weights that can be kept as they are: e4m3 with a scale a tensor, or a scale a block that 16 rows by 128 columns lie within."""
        return frozenset(name for name in self._names if self._scale_block(name) is not None)

    def keep(self, names: Collection[str], dtype: torch.dtype) -> None:
        """From now on ``names``, of ``packable``, are given as they are stored, and ``<name>_scale_inv`` with them: their scales as
        ``kernels.linear_fp8`` has them. ``dtype``: what they are multiplied in, which must hold the numbers they stand for."""
        self._kept = {name + PACKED_SCALE: name for name in names}
        self._dtype = dtype

    def names(self) -> Iterable[str]:
        """See ``WeightSource``."""
        return [*self._names, *self._kept]

    def shape(self, name: str) -> tuple[int, ...]:
        """See ``WeightSource``."""
        if name in self._kept:
            rows, columns = self.stored.shape(self._kept[name])
            return scale_shape(rows, columns)
        return self.stored.shape(name)

    def where(self, name: str) -> str:
        """See ``WeightSource``."""
        return self.stored.where(self._scale_of[self._kept[name]] if name in self._kept else name)

    def read(self, name: str) -> torch.Tensor:
        """The tensor in float32; as stored, if it is not FP8 or is kept."""
        if name in self._kept:
            return self._kept_scale(self._kept[name])
        tensor = self.stored.read(name)
        if tensor.dtype not in (torch.float8_e4m3fn, torch.float8_e5m2):
            return tensor
        scale_name = self._scale_of.get(name)
        if scale_name is None:
            raise CheckpointError(f"tensor {name!r} in {self.where(name)} is FP8, but neither {name}_scale_inv nor {name}_scale is there")
        scale = self.stored.read(scale_name).float()
        if name + PACKED_SCALE not in self._kept:
            return self._expand(name, tensor.float(), scale, scale_name)
        self._check_kept(name, tensor, scale, scale_name)
        return tensor

    def _scale_block(self, name: str) -> tuple[int, int] | None:
        """Rows and columns that share a scale of ``name``, if it can be kept; reads no data."""
        scale_name, shape = self._scale_of.get(name), self.stored.shape(name)
        if scale_name is None or len(shape) != 2 or self.stored.dtypes.get(name) != _PACKED_TYPE:
            return None
        rows, columns = shape
        of_scale = self.stored.shape(scale_name)
        if of_scale in ((), (1,), (1, 1)):
            return rows, columns
        block = self._block
        if block is None or of_scale != (-(-rows // block[0]), -(-columns // block[1])) or not can_spread((rows, columns), block):
            return None
        return block

    def _kept_scale(self, name: str) -> torch.Tensor:
        rows, columns = self.stored.shape(name)
        down, across = block = self._scale_block(name) or (rows, columns)
        scale = self.stored.read(self._scale_of[name]).float()
        return spread_scale(scale.reshape(-(-rows // down), -(-columns // across)), (rows, columns), block)

    def _check_kept(self, name: str, values: torch.Tensor, scale: torch.Tensor, scale_name: str) -> None:
        """Values that would become nonsense are refused as those of expanded weights are."""
        sound = not bool(((values.view(torch.uint8) & 0x7F) == 0x7F).any())  # NaN
        if not sound or not float(scale.abs().amax()) * 448 <= torch.finfo(self._dtype).max:
            check_numbers(name, self._expand(name, values.float(), scale, scale_name), self._dtype, self)

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
