"""Reads (sharded) safetensors checkpoints."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from math import prod
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from ...errors import CheckpointError
from ..config import read_json

_INDEX = "model.safetensors.index.json"
_MAX_HEADER = 100_000_000
_MOST_NAME = 1024
_BITS = {
    "F64": 64, "I64": 64, "U64": 64, "F32": 32, "I32": 32, "U32": 32, "BF16": 16, "F16": 16, "I16": 16, "U16": 16,
    "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "I8": 8, "U8": 8, "BOOL": 8,
}  # fmt: skip


def find_safetensors(directory: Path) -> tuple[Path, ...]:
    """Weight files of a checkpoint directory: those of the index, else ``model.safetensors``, else every other one.

    Raises ``CheckpointError`` naming a shard the index lists and the directory lacks. Empty if there are none.
    """
    index = directory / _INDEX
    if index.is_file():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise CheckpointError(f"{index}: no 'weight_map' object of tensors and their files")
        names = set(weight_map.values())
        for name in names:
            if Path(name).is_absolute() or ".." in Path(name).parts:
                raise CheckpointError(f"{index}: shard {name!r} lies outside of the checkpoint's directory")
        files = sorted(directory / name for name in names)
        for file in files:
            if not file.is_file():
                raise CheckpointError(f"{file} is missing, {index.name} lists it")
        return tuple(files)
    single = directory / "model.safetensors"
    if single.is_file():
        return (single,)
    others = (file for file in directory.glob("*.safetensors") if file.is_file() and not file.name.startswith("consolidated"))
    return tuple(sorted(others))


def _natural(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _check_entry(path: Path, name: str, entry: Any) -> None:
    """Raises ``CheckpointError`` unless an entry has a name, a type, a shape and as many bytes as these say."""
    if not name.isprintable() or len(name) > _MOST_NAME:
        raise CheckpointError(f"{path}: header names a tensor {name[:40]!r}, which is no name; the file is damaged, fetch it again")
    offsets = entry.get("data_offsets") if isinstance(entry, dict) else None
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_natural, offsets)) or offsets[0] > offsets[1]:
        raise CheckpointError(f"{path}: header has an entry without data_offsets, {name!r}")
    dtype, shape = entry.get("dtype"), entry.get("shape")
    if not isinstance(dtype, str) or not isinstance(shape, list) or not all(map(_natural, shape)):
        raise CheckpointError(f"{path}: header has an entry without dtype or shape, {name!r}")
    nbytes, bits = offsets[1] - offsets[0], _BITS.get(dtype)
    if bits is not None and prod(shape) * bits != nbytes * 8:
        raise CheckpointError(f"{path}: tensor {name!r} is {dtype} {shape} and has {nbytes} bytes; the file is damaged, fetch it again")


def _read_header(path: Path) -> tuple[dict[str, dict[str, Any]], int]:
    """Entries by name, and where the bytes that they count from begin."""
    try:
        return _header_of(path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error


def _header_of(path: Path) -> tuple[dict[str, dict[str, Any]], int]:
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or length > _MAX_HEADER:
            raise CheckpointError(f"{path}: not a safetensors file")
        if size < 8 + length:
            raise CheckpointError(f"{path} is truncated: its header needs {8 + length} bytes, the file has {size}")
        try:
            header = json.loads(file.read(length))
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{path}: header is not valid ({error})") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: header is not an object")
    header.pop("__metadata__", None)
    for name, entry in header.items():
        _check_entry(path, name, entry)
    expected = 8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0)
    if size < expected:
        cut = next(name for name, entry in header.items() if 8 + length + entry["data_offsets"][1] > size)
        raise CheckpointError(f"{path} is truncated at tensor {cut!r}: expected {expected} bytes, the file has {size}")
    if size > expected:
        more = f"{size - expected} byte{'' if size == expected + 1 else 's'}"
        raise CheckpointError(f"{path} has {more} behind its last tensor; the file is damaged, fetch it again")
    behind, before = 0, "the header"
    for begin, end, name in sorted((*entry["data_offsets"], name) for name, entry in header.items()):
        if begin != behind:
            what = "overlaps" if begin < behind else f"lies {begin - behind} bytes behind"
            raise CheckpointError(f"{path}: tensor {name!r} {what} {before}; the file is damaged, fetch it again")
        behind, before = end, f"tensor {name!r}"
    return header, 8 + length


def tensor_spans(path: Path) -> list[tuple[int, int]]:
    """First byte and length of each tensor of a file, in its order.

    Raises ``CheckpointError`` for what is no whole safetensors file.
    """
    header, base = _read_header(path)
    return sorted((base + begin, end - begin) for begin, end in (entry["data_offsets"] for entry in header.values()))


class SafetensorsSource:
    """Tensors of several safetensors files; a name in two files or missing from the file the index names is an error."""

    reads_ahead = True

    def __init__(self, files: Sequence[Path]) -> None:
        self._files: dict[str, Path] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._spans: dict[str, tuple[int, int]] = {}
        self.dtypes: dict[str, str] = {}
        self._directory = files[0].parent
        for path in files:
            header, start = _read_header(path)
            for name, entry in header.items():
                if name in self._files:
                    raise CheckpointError(f"tensor {name!r} is both in {self._files[name]} and in {path}")
                self._files[name] = path
                self._shapes[name] = tuple(entry["shape"])
                self.dtypes[name] = entry["dtype"]
                begin, end = entry["data_offsets"]
                self._spans[name] = (start + begin, end - begin)
        self._expected: dict[str, str] = {}
        index = self._directory / _INDEX
        if index.is_file():
            self._expected = read_json(index)["weight_map"]
            for name, file in self._expected.items():
                if self._files.get(name) != self._directory / file:
                    raise CheckpointError(f"tensor {name!r} is missing from {self._directory / file}, {_INDEX} lists it")
        self._open: dict[Path, Any] = {}
        self._opening = Lock()
        self._maps: dict[Path, np.ndarray] = {}

    def names(self) -> Iterable[str]:
        """See ``WeightSource``."""
        return self._files

    def shape(self, name: str) -> tuple[int, ...]:
        """See ``WeightSource``."""
        return self._shapes[name]

    def read(self, name: str) -> torch.Tensor:
        """The tensor as stored."""
        path = self._files[name]
        try:
            with self._opening:
                if path not in self._open:
                    self._open[path] = safe_open(path, framework="pt")
            tensor: torch.Tensor = self._open[path].get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"tensor {name!r} cannot be read from {path}: {error}") from error
        return tensor

    def mapped(self, name: str) -> np.ndarray:
        """The tensor's bytes, uint8 ``[rows, bytes a row]``, read-only: the file stays mapped and is read where it is touched.

        Raises ``CheckpointError`` if the file cannot be mapped or the bytes are not whole rows.
        """
        path, shape, (begin, nbytes) = self._files[name], self._shapes[name], self._spans[name]
        rows = shape[0] if shape else 1
        if rows <= 0 or nbytes % rows:
            raise CheckpointError(f"tensor {name!r} in {path} has shape {list(shape)} and {nbytes} bytes, which are not whole rows")
        try:
            if path not in self._maps:
                self._maps[path] = np.memmap(path, dtype=np.uint8, mode="r")
            return self._maps[path][begin : begin + nbytes].reshape(rows, nbytes // rows)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"tensor {name!r} cannot be mapped from {path}: {error}") from error

    def where(self, name: str) -> str:
        """See ``WeightSource``."""
        path = self._files.get(name)
        if path is not None:
            return str(path)
        return str(self._directory / self._expected[name] if name in self._expected else self._directory)
