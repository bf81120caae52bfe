"""Rows of an Engram table: the file stays mapped, rows read lately are kept in a bounded cache.

n-grams repeat much as words do, so a small cache serves most reads of tables far larger than memory. Rows are kept as the
checkpoint has them: elements and scales side by side, one ``FP8_ROWS`` record each.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from ...errors import CheckpointError
from ...kernels.block_formats import FP8_ROWS, decode_rows

_WAYS = 8
"""Places a row may be cached in; the one unused for longest is given up."""
_SPREAD = np.uint64(0x9E3779B97F4A7C15)


@dataclass
class RowCounters:
    """Since the table was opened; ``lookups = hits + misses`` counts distinct rows of each call."""

    rows: int = 0
    """Rows asked for, repetitions included."""
    lookups: int = 0
    hits: int = 0
    misses: int = 0
    evictions: int = 0
    bytes_read: int = 0
    """Of the table behind the cache."""


def map_tensor(path: Path, name: str) -> np.ndarray:
    """The bytes of tensor ``name`` of a safetensors file, ``[rows, bytes a row]``, mapped and read-only.

    Raises ``CheckpointError`` if the file has no such two-dimensional tensor of one byte a number.
    """
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            entry = json.loads(file.read(length)).get(name)
    except (OSError, ValueError, MemoryError, OverflowError) as error:
        raise CheckpointError(f"{path}: not readable as safetensors ({error})") from error
    if entry is None:
        raise CheckpointError(f"tensor {name!r} is missing from {path}")
    shape, (begin, end) = entry["shape"], entry["data_offsets"]
    if len(shape) != 2 or end - begin != shape[0] * shape[1]:
        raise CheckpointError(f"tensor {name!r} in {path} has shape {shape} and {end - begin} bytes; expected rows of one byte a number")
    try:
        return np.memmap(path, dtype=np.uint8, mode="r", offset=8 + length + begin, shape=(shape[0], shape[1]))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"tensor {name!r} cannot be mapped from {path}: {error}") from error


class EngramTable:
    """Reads rows by number. Not for use from two threads at once."""

    def __init__(self, values: np.ndarray, scales: np.ndarray, cache_bytes: int, name: str = "embed") -> None:
        """``values`` uint8 ``[rows, width]`` (e4m3) and ``scales`` uint8 ``[rows, width / 32]`` (ue8m0), in memory or mapped.

        ``cache_bytes`` bounds the cached records; less than one set of them means no cache. Raises ``CheckpointError`` if the
        two arrays do not belong together.
        """
        rows, self.width = values.shape
        blocks = self.width // FP8_ROWS.block
        if not FP8_ROWS.fits(self.width) or values.dtype != np.uint8 or scales.dtype != np.uint8 or scales.shape != (rows, blocks):
            raise CheckpointError(
                f"Engram table {name!r}: values {values.dtype} {list(values.shape)} and scales {scales.dtype} {list(scales.shape)} "
                f"are not uint8 rows with one scale for {FP8_ROWS.block} numbers"
            )
        self.rows, self.name = rows, name
        self.record_bytes = FP8_ROWS.record_bytes(self.width)
        self.counters = RowCounters()
        self._values, self._scales = values, scales
        self._sets = max(cache_bytes, 0) // (self.record_bytes * _WAYS)
        self._records = np.empty((self._sets, _WAYS, self.record_bytes), np.uint8)
        self._held = np.full((self._sets, _WAYS), -1, np.int64)
        self._used = np.zeros((self._sets, _WAYS), np.int64)
        self._clock = 0

    @property
    def capacity(self) -> int:
        """Rows the cache holds at most."""
        return self._sets * _WAYS

    def _load(self, rows: np.ndarray) -> np.ndarray:
        records = np.concatenate((self._values[rows], self._scales[rows]), 1)
        self.counters.bytes_read += records.nbytes
        return records

    def _keep(self, rows: np.ndarray, place: np.ndarray, records: np.ndarray) -> None:
        """Caches new rows: the n-th newcomer of a set takes its n-th oldest place, those beyond the last place are let go."""
        order = np.argsort(place, kind="stable")
        placed = place[order]
        first = np.searchsorted(placed, placed, side="left")
        rank = np.arange(len(order)) - first
        stays = rank < _WAYS
        order, rank = order[stays], rank[stays]
        target = place[order]
        way = np.argsort(self._used[target], axis=1, kind="stable")[np.arange(len(target)), rank]
        self.counters.evictions += int((self._held[target, way] >= 0).sum())
        self._held[target, way] = rows[order]
        self._records[target, way] = records[order]
        self._used[target, way] = self._clock

    def _fetch(self, rows: np.ndarray) -> np.ndarray:
        """Records of distinct, rising ``rows``; rising keeps reads of the file in its order."""
        self.counters.lookups += len(rows)
        if not self._sets:
            self.counters.misses += len(rows)
            return self._load(rows)
        self._clock += 1
        place = ((rows.astype(np.uint64) * _SPREAD >> np.uint64(32)) % np.uint64(self._sets)).astype(np.int64)
        match = self._held[place] == rows[:, None]
        hit = match.any(1)
        way = match.argmax(1)
        self._used[place[hit], way[hit]] = self._clock
        records = np.empty((len(rows), self.record_bytes), np.uint8)
        records[hit] = self._records[place[hit], way[hit]]
        missing = ~hit
        if missing.any():
            records[missing] = self._load(rows[missing])
            self._keep(rows[missing], place[missing], records[missing])
        self.counters.hits += int(hit.sum())
        self.counters.misses += int(missing.sum())
        return records

    def records(self, rows: torch.Tensor) -> torch.Tensor:
        """uint8 ``[..., record_bytes]`` of row numbers int64 ``[...]`` on the host; −1 gives zeros (a row of zeros).

        ``CheckpointError`` for a number the table does not have.
        """
        wanted = rows.reshape(-1).numpy()
        self.counters.rows += int((wanted >= 0).sum())
        if wanted.size and not -1 <= int(wanted.min()) <= int(wanted.max()) < self.rows:
            raise CheckpointError(f"Engram table {self.name!r} has {self.rows} rows, asked for {int(wanted.min())} … {int(wanted.max())}")
        distinct, inverse = np.unique(wanted, return_inverse=True)
        absent = int(distinct.size > 0 and distinct[0] < 0)
        found = np.zeros((len(distinct), self.record_bytes), np.uint8)
        if len(distinct) > absent:
            found[absent:] = self._fetch(distinct[absent:])
        return torch.from_numpy(found[inverse.reshape(-1)]).view(*rows.shape, self.record_bytes)

    def read(self, rows: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """Rows in ``dtype`` ``[..., width]``; see ``records``."""
        return decode_rows(self.records(rows), FP8_ROWS, self.width, dtype)
