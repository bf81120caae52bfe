"""Rows of an Engram table: the file stays mapped, rows read lately are kept in a bounded cache.

n-grams repeat much as words do, so a small cache serves most reads of tables far larger than memory. Rows are kept as the
checkpoint has them: elements and scales side by side, one ``FP8_ROWS`` record each, or the plain numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

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


class RowBytes(Protocol):
    """Rows of bytes by number: an array, mapped or not, or something that makes them."""

    @property
    def shape(self) -> tuple[int, ...]:
        """``(rows, bytes a row)``."""

    @property
    def dtype(self) -> Any:
        """numpy's uint8."""

    def __getitem__(self, rows: np.ndarray, /) -> np.ndarray:
        """uint8 ``[n, bytes a row]`` of row numbers int64 ``[n]``."""


class EngramTable:
    """Reads rows by number. Not for use from two threads at once."""

    def __init__(
        self, values: RowBytes, scales: RowBytes | None, cache_bytes: int, name: str = "embed", dtype: torch.dtype = torch.float32
    ) -> None:
        """``values`` uint8 ``[rows, width]`` (e4m3) and ``scales`` uint8 ``[rows, width / 32]`` (ue8m0), in memory or mapped.

        Without scales ``values`` are the bytes of plain numbers of ``dtype``. ``cache_bytes`` bounds the cached records; less
        than one set of them means no cache. Raises ``CheckpointError`` if the two arrays do not belong together.
        """
        self._plain = dtype if scales is None else None
        rows, across = values.shape
        if scales is None:
            self.width, self.record_bytes = across // dtype.itemsize, across
            if values.dtype != np.uint8 or across % dtype.itemsize:
                word = str(dtype).removeprefix("torch.")
                raise CheckpointError(f"Engram table {name!r}: rows {values.dtype} {list(values.shape)} are no whole numbers of {word}")
        else:
            self.width = across
            if (
                not FP8_ROWS.fits(across)
                or {values.dtype, scales.dtype} != {np.dtype(np.uint8)}
                or scales.shape
                != (
                    rows,
                    across // FP8_ROWS.block,
                )
            ):
                raise CheckpointError(
                    f"Engram table {name!r}: values {values.dtype} {list(values.shape)} and scales {scales.dtype} {list(scales.shape)} "
                    f"are not uint8 rows with one scale for {FP8_ROWS.block} numbers"
                )
            self.record_bytes = FP8_ROWS.record_bytes(across)
        self.rows, self.name = rows, name
        self.counters = RowCounters()
        self._values, self._scales = values, scales
        self._clock = 0
        self.set_cache(cache_bytes)

    def set_cache(self, cache_bytes: int) -> None:
        """Begins an empty cache of at most ``cache_bytes``; a small table takes no more places than ``_WAYS`` for each of its rows."""
        self._sets = min(max(cache_bytes, 0) // (self.record_bytes * _WAYS), self.rows)
        self._records = np.empty((self._sets, _WAYS, self.record_bytes), np.uint8)
        self._held = np.full((self._sets, _WAYS), -1, np.int64)
        self._used = np.zeros((self._sets, _WAYS), np.int64)

    @property
    def capacity(self) -> int:
        """Rows the cache holds at most."""
        return self._sets * _WAYS

    def _load(self, rows: np.ndarray) -> np.ndarray:
        records = self._values[rows]
        if self._scales is not None:
            records = np.concatenate((records, self._scales[rows]), 1)
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

    def decode(self, records: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """``[..., width]`` in ``dtype`` of ``records`` uint8 ``[..., record_bytes]``, on the device where they are."""
        if self._plain is None:
            return decode_rows(records, FP8_ROWS, self.width, dtype)
        return records.contiguous().view(self._plain).to(dtype)

    def read(self, rows: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """Rows in ``dtype`` ``[..., width]``; see ``records``."""
        return self.decode(self.records(rows), dtype)
