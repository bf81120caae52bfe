"""Random weights from a seed: a model of the right shape and a sane scale, with nothing but a config."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from .fp8 import block_of


def _generator(seed: int, name: str) -> torch.Generator:
    # the CPU generator reads 32 bits of its seed
    digest = hashlib.sha256(f"{seed}\0{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:4], "little"))


class DummySource:
    """Normal weights of deviation ``1/sqrt(in)``, norms one, biases small; each tensor depends on (seed, name) only."""

    reads_ahead = True

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], seed: int) -> None:
        self._shapes, self._seed = dict(shapes), seed

    def names(self) -> Iterable[str]:
        """See ``WeightSource``."""
        return self._shapes

    def shape(self, name: str) -> tuple[int, ...]:
        """See ``WeightSource``."""
        return self._shapes[name]

    def read(self, name: str) -> torch.Tensor:
        """See ``WeightSource``; drawn on the CPU, so every device gets the same values."""
        shape = self._shapes[name]
        if len(shape) == 1 and name.endswith("norm.weight"):
            return torch.ones(shape)
        deviation = shape[-1] ** -0.5 if len(shape) > 1 else 0.02
        return torch.randn(shape, generator=_generator(self._seed, name)).mul_(deviation)

    def where(self, name: str) -> str:
        """See ``WeightSource``."""
        return "random weights"


_DRAWN = 0xBF  # bits of a byte that are drawn: all but the exponent's first, so that no number is above 1.875 and none is NaN
_OUTSIDE = ("model.embed_tokens.weight", "lm_head.weight")
_SCALE = "_scale_inv"


class DummyFp8Source:
    """Random weights as an FP8 checkpoint stores them: linear ones as random bytes with a scale a block (or a tensor), each number of a
    deviation near ``1/sqrt(in)``; what the configuration leaves unconverted, as ``DummySource`` draws it. See ``fp8.StoredTensors``."""

    reads_ahead = True

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], seed: int, quantization: Mapping[str, Any]) -> None:
        self._plain, self._seed = DummySource(shapes, seed), seed
        self._block = block_of(quantization)
        left_out = [*(quantization.get("modules_to_not_convert") or ()), *(quantization.get("ignored_layers") or ())]
        self._shapes: dict[str, tuple[int, ...]] = dict(shapes)
        self.dtypes: dict[str, str] = {}
        for name, shape in shapes.items():
            module = f".{name.removesuffix('.weight')}."
            if len(shape) != 2 or name in _OUTSIDE or not name.endswith(".weight") or any(f".{part}." in module for part in left_out):
                continue
            down, across = self._block or shape
            self.dtypes[name] = "F8_E4M3"
            self._shapes[name + _SCALE] = (-(-shape[0] // down), -(-shape[1] // across))

    def names(self) -> Iterable[str]:
        """See ``WeightSource``."""
        return self._shapes

    def shape(self, name: str) -> tuple[int, ...]:
        """See ``WeightSource``."""
        return self._shapes[name]

    def where(self, name: str) -> str:
        """See ``WeightSource``."""
        return self._plain.where(name)

    def read(self, name: str) -> torch.Tensor:
        """See ``WeightSource``; drawn on the CPU, so every device gets the same values."""
        shape, generator = self._shapes[name], _generator(self._seed, name)
        if name.removesuffix(_SCALE) in self.dtypes and name.endswith(_SCALE):
            columns = self._shapes[name.removesuffix(_SCALE)][1]
            return torch.exp2(torch.randn(shape, generator=generator) / 4) * (columns**-0.5 / _deviation())
        if name not in self.dtypes:
            return self._plain.read(name)
        count = shape[0] * shape[1]
        words = torch.empty(-(-count // 8), dtype=torch.int64).random_(-(2**63), None, generator=generator)
        values = (words.view(torch.uint8)[:count] & _DRAWN).view(torch.float8_e4m3fn)
        return values.view(shape)


def _deviation() -> float:
    """Of the numbers that random bytes are."""
    every = (torch.arange(256, dtype=torch.uint8) & _DRAWN).view(torch.float8_e4m3fn).float()
    return float(every.square().mean().sqrt())
