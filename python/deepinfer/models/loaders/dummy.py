"""Random weights from a seed: a model of the right shape and a sane scale, with nothing but a config."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

import torch


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
        # the CPU generator reads 32 bits of its seed
        digest = hashlib.sha256(f"{self._seed}\0{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:4], "little"))
        deviation = shape[-1] ** -0.5 if len(shape) > 1 else 0.02
        return torch.randn(shape, generator=generator).mul_(deviation)

    def where(self, name: str) -> str:
        """See ``WeightSource``."""
        return "random weights"
