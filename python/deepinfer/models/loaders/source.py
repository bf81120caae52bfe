"""What a checkpoint reader offers, and how a model is filled from it."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch

from ...errors import CheckpointError, UnsupportedFormatError
from ..base import Fillable
from ..contract import check_shapes
from .ahead import read_ahead, room_ahead

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in total) of loaded parameters, after each tensor."""

_ADAPTER_MARKS = {
    ".qweight": "AWQ or GPTQ",
    ".qzeros": "AWQ or GPTQ",
    ".lora_A": "LoRA",
    ".lora_B": "LoRA",
    ".absmax": "bitsandbytes",
    ".quant_map": "bitsandbytes",
    ".weight_packed": "compressed-tensors",
    "weight_format_hqq": "HQQ",
}


_LISTED = 10
_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class WeightSource(Protocol):
    """Tensors of a checkpoint under the names of the ``transformers`` layout.

    A source that has ``reads_ahead`` set is read from several threads at once, each for another tensor, ahead of where they are put.
    """

    def names(self) -> Iterable[str]:
        """Every tensor in the checkpoint."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape after expansion, without reading the data."""

    def read(self, name: str) -> torch.Tensor:
        """The tensor in a float dtype, or in the dtype of a place that takes it packed; raises ``CheckpointError`` if it cannot be read."""

    def where(self, name: str) -> str:
        """File that holds (or should hold) the tensor, for messages."""


def reads_ahead(source: WeightSource) -> bool:
    """Whether several threads may read from it."""
    return bool(getattr(source, "reads_ahead", False))


def refuse_marked(names: Iterable[str]) -> None:
    """Raises ``UnsupportedFormatError`` if tensor names show a packed or adapter format."""
    for name in names:
        for mark, what in _ADAPTER_MARKS.items():
            if mark in name:
                raise UnsupportedFormatError(f"tensor {name!r} belongs to a {what} checkpoint, which is not read; use the full checkpoint")


def check_numbers(name: str, tensor: torch.Tensor, dtype: torch.dtype, source: WeightSource) -> None:
    """One pass over the numbers: a NaN or an infinity would come out as nonsense, not as an error."""
    if tensor.dtype not in _FLOATS or dtype not in _FLOATS or not tensor.numel():
        return  # packed forms are checked where they are decoded
    low, high = (float(end) for end in tensor.aminmax())
    if not (math.isfinite(low) and math.isfinite(high)):
        raise CheckpointError(f"tensor {name!r} in {source.where(name)} holds NaN or infinity: the file is damaged; fetch it again")
    if max(-low, high) > torch.finfo(dtype).max:
        kind = str(dtype).removeprefix("torch.")
        raise CheckpointError(
            f"tensor {name!r} in {source.where(name)} holds numbers up to {max(-low, high):.3g}, too large for {kind}; use dtype='float32'"
        )


def _named(names: Sequence[str], one: str, many: str) -> str:
    """``tensor 'a'`` and what is said of it, or how many there are with the first ten."""
    if len(names) == 1:
        return f"tensor {names[0]!r} {one}"
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return f"{len(names)} tensors {many}: {', '.join(map(repr, names[:_LISTED]))}{more}"


def check_names(model: Fillable, source: WeightSource) -> dict[str, tuple[int, ...]]:
    """What ``model`` needs, name by name, once ``source`` has all of it, in these shapes, and nothing else; reads no data.

    Raises ``CheckpointError`` for the first kind of mistake, in this order: the first ten tensors that are missing, one that has another
    shape, the first ten that are not part of the model; ``ModelContractError`` as ``fill`` does.
    """
    wanted = check_shapes(model)
    present = set(source.names())
    refuse_marked(present - wanted.keys())
    missing = [name for name in wanted if name not in present]
    if missing:
        where = source.where(missing[0])
        raise CheckpointError(_named(missing, f"is missing from {where}", f"are missing, the first of them from {where}"))
    for name, shape in wanted.items():
        found = source.shape(name)
        if found != shape:
            raise CheckpointError(f"tensor {name!r} in {source.where(name)} has shape {list(found)}, the configuration needs {list(shape)}")
    optional = model.optional_tensors()
    extra = [name for name in sorted(present - wanted.keys()) if not any(fnmatch.fnmatchcase(name, pattern) for pattern in optional)]
    if extra:
        where, part = source.where(extra[0]), "part of this architecture with this configuration"
        raise CheckpointError(_named(extra, f"in {where} is not {part}", f"are not {part}, the first of them in {where}"))
    return wanted


def fill(model: Fillable, source: WeightSource, progress: Progress | None = None) -> None:
    """Copies every parameter of ``model`` from ``source``, converting to the parameter's dtype.

    Names and shapes are compared before any data is read. Raises ``CheckpointError`` naming tensor and file if one is
    missing, unexpected, of another shape or holds NaN or infinity, ``ModelContractError`` naming a parameter whose place is
    not what the model declares.
    """
    wanted = check_names(model, source)
    places = {name: model.parameter(name) for name in wanted}

    def read(name: str) -> torch.Tensor | None:
        """Puts a tensor in its place if that is in host memory; gives it in the place's dtype if it has yet to go to a device."""
        place, tensor = places[name], source.read(name)
        if not tensor.is_floating_point() and tensor.dtype != place.dtype:
            raise CheckpointError(f"tensor {name!r} in {source.where(name)} has dtype {tensor.dtype}, expected a float type")
        check_numbers(name, tensor, place.dtype, source)
        if place.device.type != "cpu":
            return tensor.to(place.dtype)
        place.copy_(tensor)
        return None

    sizes = {name: 4 * place.numel() for name, place in places.items()}  # many sources expand to float32
    total = sum(place.nbytes for place in places.values())
    done = 0
    threads = torch.get_num_threads() if reads_ahead(source) else 1
    for name, tensor in read_ahead(sizes, read, threads, room_ahead()):
        if tensor is not None:
            places[name].copy_(tensor)
        done += places[name].nbytes
        if progress is not None:
            progress(done, total)
    model.finish_loading()
