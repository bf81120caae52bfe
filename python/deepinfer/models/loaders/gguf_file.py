"""Opens GGUF files, one or several parts of one model, and gives their metadata as Python values."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGUF_MAGIC, GGMLQuantizationType, GGUFReader

from ...errors import CheckpointError, UnsupportedFormatError

_PART = re.compile(r"^(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf$")


class _CheckedReader(GGUFReader):
    """The library's reader, which first compares the tensor table with the size of the file."""

    def _build_tensors(self, start_offs: int, fields: list[Any]) -> None:
        size = len(self.data)
        for field in fields:
            _, name, _, dims, raw_type, offset = field.parts
            try:
                kind = GGMLQuantizationType(int(raw_type[0]))
            except ValueError:
                raise UnsupportedFormatError(
                    f"tensor {bytes(name).decode()!r} has GGUF type {int(raw_type[0])}, which the gguf package does not know"
                ) from None
            block, block_bytes = GGML_QUANT_SIZES[kind]
            end = int(start_offs) + int(offset[0]) + int(np.prod(dims)) // block * block_bytes
            if end > size:
                last = max(fields, key=lambda f: int(f.parts[5][0]))
                block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(int(last.parts[4][0]))]
                expected = int(start_offs) + int(last.parts[5][0]) + int(np.prod(last.parts[3])) // block * block_bytes
                raise CheckpointError(f"truncated at tensor {bytes(name).decode()!r}: expected {expected} bytes, the file has {size}")
        super()._build_tensors(start_offs, fields)


@lru_cache(maxsize=4)
def _open(path: Path, size: int, modified: int) -> GGUFReader:
    del modified
    with path.open("rb") as file:
        magic = file.read(4)
    if magic != int(GGUF_MAGIC).to_bytes(4, "little"):
        raise CheckpointError(f"{path}: not a GGUF file ({size} bytes)")
    try:
        return _CheckedReader(path)
    except CheckpointError as error:
        raise CheckpointError(f"{path} is {error}") from None
    except UnsupportedFormatError as error:
        raise UnsupportedFormatError(f"{path}: {error}") from None
    except (ValueError, IndexError, KeyError, OverflowError, UnicodeDecodeError, TypeError) as error:
        raise CheckpointError(f"{path} is damaged or truncated inside its header (the file has {size} bytes): {error}") from error


def open_gguf(path: Path) -> GGUFReader:
    """Reader of one file; ``CheckpointError`` states expected and actual size of a truncated one."""
    try:
        stat = path.stat()
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error
    return _open(path, stat.st_size, stat.st_mtime_ns)


def gguf_parts(path: Path) -> tuple[Path, ...]:
    """All files of the model ``path`` belongs to, in order; ``CheckpointError`` names a missing part."""
    match = _PART.match(path.name)
    if match is None:
        return (path,)
    count = int(match["count"])
    parts = tuple(path.with_name(f"{match['stem']}-{number:05d}-of-{count:05d}.gguf") for number in range(1, count + 1))
    for part in parts:
        if not part.is_file():
            raise CheckpointError(f"{part} is missing: {path.name} is one of {count} parts")
    return parts


def metadata(reader: GGUFReader) -> dict[str, Any]:
    """Metadata of a file as plain values (numbers, strings, lists)."""
    return {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}


def check_parts(paths: Sequence[Path]) -> None:
    """Compares the split metadata of all parts with the number of tensors found."""
    if len(paths) == 1:
        return
    wanted, found = None, 0
    for number, path in enumerate(paths):
        reader = open_gguf(path)
        found += len(reader.tensors)
        for key, value in (("split.no", number), ("split.count", len(paths))):
            field = reader.get_field(key)
            if field is not None and int(field.contents()) != value:
                raise CheckpointError(f"{path}: metadata {key} = {field.contents()}, its name says {value}")
        total = reader.get_field("split.tensors.count")
        wanted = int(total.contents()) if total is not None else wanted
    if wanted is not None and wanted != found:
        raise CheckpointError(f"{paths[0]}: its parts hold {found} tensors, metadata says {wanted}")
