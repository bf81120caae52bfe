"""Parameters under their checkpoint names: the part of ``containers`` that every family shares.

Owns: allocating tensors for names, several names in one tensor where their projections read the same input, and letting go of the
names once the weights are packed. Never touches: what the tensors mean, checkpoint formats.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

import torch

from ..errors import UnsupportedConfigError
from ..kernels.linear_fp8 import SCALE_ROWS, PackedWeight, scale_shape

PACKED_SCALE = "_scale_inv"
"""What follows a weight's name in that of its scales, where it stays packed."""

_MOST_BYTES = 1 << 60


def unwritten(name: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Memory for the tensor (or the first of several) called ``name``; ``UnsupportedConfigError`` for more than can be counted."""
    if prod(shape) * dtype.itemsize > _MOST_BYTES:
        raise UnsupportedConfigError(
            f"the sizes in config.json give tensor {name!r} the shape {list(shape)}, more than any memory holds; correct them"
        )
    return torch.empty(tuple(shape), dtype=dtype, device=device)


class ParameterPlaces:
    """Checkpoint name → the tensor it is written to.

    Args:
        dtype: of weights that name no other one.
        device: where they lie; ``meta`` allocates nothing.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.device = dtype, device
        self._places: dict[str, torch.Tensor] | None = {}

    def add(self, name: str, shape: Sequence[int], dtype: torch.dtype | None = None) -> torch.Tensor:
        """A tensor of its own, not yet written."""
        place = unwritten(name, shape, dtype or self.dtype, self.device)
        self.put(name, place)
        return place

    def add_fused(self, names: Sequence[str], rows: Sequence[int], columns: int | None) -> torch.Tensor:
        """One tensor ``[sum(rows), columns]`` (``[sum(rows)]`` for None) whose row ranges are the places of ``names``, in order.

        For projections of one input, so that loading writes straight into the weight of a single product.
        """
        fused = unwritten(names[0], (sum(rows),) if columns is None else (sum(rows), columns), self.dtype, self.device)
        for name, part in zip(names, fused.split(list(rows)), strict=True):
            self.put(name, part)
        return fused

    def add_packed(self, names: Sequence[str], rows: Sequence[int], columns: int) -> PackedWeight:
        """The same for weights that stay 8-bit floats with scales; those are the places of ``<name>_scale_inv``.

        Sizes are such that ``kernels.linear_fp8.can_pack``.
        """
        shape = (sum(rows), columns)
        values = unwritten(names[0], shape, torch.float8_e4m3fn, self.device)
        scale = unwritten(names[0] + PACKED_SCALE, scale_shape(*shape), torch.float32, self.device)
        scales = scale.split([size // SCALE_ROWS for size in rows])
        for name, part, of_part in zip(names, values.split(list(rows)), scales, strict=True):
            self.put(name, part)
            self.put(name + PACKED_SCALE, of_part)
        return PackedWeight(values, scale)

    def put(self, name: str, place: torch.Tensor) -> None:
        """Declares an existing tensor (or a view of one) as the place of ``name``; raises ``ValueError`` for a name that has one."""
        places = self._open()
        if name in places:
            raise ValueError(f"parameter {name!r} is declared twice")
        places[name] = place

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """What ``LoadableModel.parameter_shapes`` gives."""
        return {name: tuple(place.shape) for name, place in self._open().items()}

    def __getitem__(self, name: str) -> torch.Tensor:
        """What ``LoadableModel.parameter`` gives; ``KeyError`` for a name that was not declared."""
        return self._open()[name]

    def items(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every name with its place."""
        yield from self._open().items()

    def close(self) -> None:
        """Lets go of every tensor: loading is over. Later calls, of this one too, raise ``RuntimeError``."""
        self._open()
        self._places = None

    def _open(self) -> dict[str, torch.Tensor]:
        if self._places is None:
            raise RuntimeError("the model's parameters are already loaded and packed")
        return self._places
