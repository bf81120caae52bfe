"""Which weights these are, from what is in the files: equal on every machine that has them, and under every path.

Owns: what of the files counts. Never touches: what tensors mean.

Time stamps and paths say nothing: images and package managers set all files to one time, and two models may take turns at one path. Reading
every byte would cost as much as loading, so a large tensor is looked at in three places; a file's header and small tensors are read whole.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ...errors import CheckpointError
from .safetensors_source import tensor_spans

_WHOLE = 64 << 10
_PIECE = 16 << 10
_THREADS = 8
_BATCH = 256

Span = tuple[int, int]


def fingerprint(weights: Sequence[Path], beside: Iterable[Path]) -> str:
    """128 bits as hex. ``beside``: files that count whole, such as the configuration; one that is absent counts as that.

    Raises ``CheckpointError`` for a file that cannot be read.
    """
    digest = hashlib.sha256()
    for path in beside:
        data = _bytes(path) if path.is_file() else b""
        digest.update(f"{path.name}\0{len(data)}\0".encode() + data)
    with ThreadPoolExecutor(_THREADS) as pool:
        for path in weights:
            spans = [piece for span in _spans(path) for piece in _looked_at(span)]
            digest.update(f"\0{len(spans)}\0{sum(length for _, length in spans)}\0".encode())
            batches = [spans[at : at + _BATCH] for at in range(0, len(spans), _BATCH)]
            for part in pool.map(lambda batch, path=path: _digest(path, batch), batches):
                digest.update(part)
    return digest.hexdigest()[:32]


def _spans(path: Path) -> list[Span]:
    """First byte and length of the header and of each tensor, in the file's order."""
    if path.suffix == ".gguf":
        from .gguf_file import open_gguf

        spans = sorted((int(tensor.data_offset), int(tensor.n_bytes)) for tensor in open_gguf(path).tensors)
    else:
        spans = tensor_spans(path)
    return [*_cut(spans[0][0]), *spans] if spans else []


def _cut(length: int) -> list[Span]:
    """The first bytes of a file, which count whole."""
    return [(at, min(_WHOLE, length - at)) for at in range(0, length, _WHOLE)]


def _looked_at(span: Span) -> list[Span]:
    first, length = span
    if length <= _WHOLE:
        return [span]
    return [(first, _PIECE), (first + (length - _PIECE) // 2, _PIECE), (first + length - _PIECE, _PIECE)]


def _digest(path: Path, spans: Sequence[Span]) -> bytes:
    digest = hashlib.sha256()
    try:
        file = os.open(path, os.O_RDONLY)
        try:
            for first, length in spans:
                digest.update(os.pread(file, length, first))
        finally:
            os.close(file)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    return digest.digest()


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
