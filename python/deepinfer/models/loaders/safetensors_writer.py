"""Writes a sharded safetensors checkpoint of any size, piece by piece: never a whole tensor in memory.

Layout as the format's own library writes it (header padded to 8 bytes, wide numbers first in a file, no gaps) with
``model.safetensors.index.json`` beside the shards. The same tensors give the same bytes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

from ...errors import ConfigError

_ITEM_BYTES = {"F32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1, "F8_E8M0": 1, "I8": 1, "U8": 1}
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class StoredTensor:
    """A tensor to be written; ``dtype`` as safetensors spells it."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return prod(self.shape) * _ITEM_BYTES[self.dtype]


def plan_shards(tensors: Sequence[StoredTensor], shard_bytes: int) -> list[list[StoredTensor]]:
    """Tensors in order, as many to a file as ``shard_bytes`` hold, at least one; ``ConfigError`` if a name comes twice."""
    names = [tensor.name for tensor in tensors]
    if len(set(names)) != len(names):
        raise ConfigError(f"tensor {next(name for name in names if names.count(name) > 1)!r} would be written twice")
    shards: list[list[StoredTensor]] = [[]]
    used = 0
    for tensor in tensors:
        if shards[-1] and used + tensor.nbytes > shard_bytes:
            shards.append([])
            used = 0
        shards[-1].append(tensor)
        used += tensor.nbytes
    return shards


def _header(tensors: Sequence[StoredTensor]) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        entries[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.nbytes],
        }
        offset += tensor.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write_sharded(
    directory: Path,
    tensors: Sequence[StoredTensor],
    pieces: Callable[[str], Iterator[bytes | memoryview]],
    shard_bytes: int,
    progress: Callable[[int], None] | None = None,
) -> list[Path]:
    """Writes ``tensors`` to ``model-0000i-of-0000n.safetensors`` in ``directory`` and the index; gives the files.

    ``pieces(name)`` yields the tensor's bytes in order. ``progress`` gets the bytes of each piece. Raises ``ValueError`` if a
    tensor has another number of bytes than its shape says, ``OSError`` as writing does.
    """
    shards = plan_shards(tensors, shard_bytes)
    files: list[Path] = []
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = directory / f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        files.append(file)
        ordered = sorted(shard, key=lambda tensor: -_ITEM_BYTES[tensor.dtype])
        with file.open("wb") as out:
            out.write(_header(ordered))
            for tensor in ordered:
                weight_map[tensor.name] = file.name
                written = 0
                for piece in pieces(tensor.name):
                    written += out.write(piece)
                    if progress is not None:
                        progress(len(piece))
                if written != tensor.nbytes:
                    raise ValueError(f"tensor {tensor.name!r} has {written} bytes, its shape {list(tensor.shape)} says {tensor.nbytes}")
    index = {"metadata": {"total_size": sum(tensor.nbytes for tensor in tensors)}, "weight_map": dict(sorted(weight_map.items()))}
    (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return files
