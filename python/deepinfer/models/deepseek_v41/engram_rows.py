"""Table rows of a step: which ones the newest ids address, and their numbers.

Depends on ids alone, so all tables are read before the first layer. The ids that n-grams reach back to come from the step or from a
short ring of compressed ids in the state. On a CPU tables stay in their files and are read in the order of the launches: ids that
the device fills in are known by then. For a GPU, whose ids nobody may wait for on the host, they are copied: to the device where
they take at most half of what is free there, else into page-locked host memory, from which the device reads the rows it wants.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict

import torch

from deepinfer.platforms import get_platform
from deepinfer.platforms.host_memory import empty_on_host, seen_by_device

from ...errors import CapacityError, ConfigError
from ...kernels.cache_rows import StepRows
from ...kernels.engram_hash import engram_hash
from ...kernels.window_rows import WindowPlan
from ..base import TablePlace
from .engram import DEAD, EngramTopology, compress_ids
from .engram_table import EngramTable

_COPIED_AT_ONCE = 1 << 18
_MOST_OF_FREE = 0.5
"""Share of a device's free memory that tables take unasked."""
_MOST_TO_FILL = 0.9
"""Share of free memory that tables may take where they are told to."""


class _CopiedTable:
    """All records of a table, in memory of the device or in page-locked memory of the host that the device reads."""

    def __init__(self, table: EngramTable, device: torch.device, on_host: bool) -> None:
        self._table = table
        table.set_cache(0)  # every row is read once
        shape = (table.rows, table.record_bytes)
        records = empty_on_host(shape, device) if on_host else torch.empty(shape, dtype=torch.uint8, device=device)
        for first in range(0, table.rows, _COPIED_AT_ONCE):
            rows = torch.arange(first, min(first + _COPIED_AT_ONCE, table.rows))
            records[first : first + len(rows)] = table.records(rows).to(records.device)
        self._records = seen_by_device(records, device) if on_host else records

    def read(self, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """See ``EngramTable.read``."""
        found = self._records.index_select(0, rows.clamp_min(0).flatten()).view(*rows.shape, -1)
        return torch.where(rows[..., None] < 0, 0.0, self._table.decode(found, dtype))


def _placed(tables: Sequence[EngramTable], device: torch.device, where: TablePlace) -> Sequence[EngramTable | _CopiedTable]:
    if where == "files" or (where == "auto" and device.type == "cpu"):
        if device.type != "cpu":
            raise ConfigError("engram_tables='files' is for a CPU: a GPU does not wait for ids on the host; use 'host' or 'auto'")
        return tables
    wanted = sum(table.rows * table.record_bytes for table in tables)
    free = get_platform(str(device)).memory_available()
    if where == "auto":
        where = "device" if wanted <= _MOST_OF_FREE * free else "host"
    if where == "host":
        free = get_platform("cpu").memory_available()
    if wanted > _MOST_TO_FILL * free:
        there = f"on {device}" if where == "device" else "in host memory"
        raise CapacityError(
            f"the Engram tables take {wanted / 2**30:.1f} GiB and {free / 2**30:.1f} GiB are free {there}; "
            "run with more memory, or on a CPU, where they stay in their files"
        )
    return [_CopiedTable(table, device, where == "host") for table in tables]


class EngramReader:
    """Reads the tables of a model; made once its checkpoint is there.

    Args:
        topology: of the tables.
        tables: one per Engram layer, in order.
        token_map: int64 ``[vocab]``, compressed id of every token.
        dtype: of the rows; device: where steps are.

    Tables stay in their files until ``place`` is called.
    """

    def __init__(
        self, topology: EngramTopology, tables: Sequence[EngramTable], token_map: torch.Tensor, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._topology, self._tables, self._dtype = topology, list(tables), dtype
        self._read: list[Callable[[torch.Tensor, torch.dtype], torch.Tensor]] = [table.read for table in tables]
        self._device = device
        self._where: TablePlace | None = None
        self._multipliers, self._primes, self._offsets = topology.tensors(device)
        self._pad = int(token_map[topology.pad_token])
        self._map = token_map.to(device)

    def place(self, where: TablePlace) -> None:
        """Puts the tables where steps are to read them; see ``models.base.ModelOptions``.

        Raises:
            CapacityError: they do not fit there. ConfigError: steps cannot read them there.
        """
        if where != self._where:
            self._read = [table.read for table in _placed(self._tables, self._device, where)]
            self._where = where

    def set_cache(self, cache_bytes: int) -> None:
        """Bounds what all tables together keep of their rows in memory, begun empty."""
        for table in self._tables:
            table.set_cache(cache_bytes // len(self._tables))

    def counters(self) -> dict[str, int]:
        """``engram_table.RowCounters`` of all tables together, and the rows their caches have room for."""
        each = [asdict(table.counters) | {"capacity": table.capacity} for table in self._tables]
        return {name: sum(one[name] for one in each) for name in each[0]}

    def begin(self, begun: torch.Tensor, ring: torch.Tensor) -> None:
        """Puts the ids before a start into ``ring`` ``[slots, R]``; ``begun`` as in ``models.base.StateRows``."""
        slot, start, ids = begun[:, :1], begun[:, 1:2], begun[:, 2:]
        position = start + torch.arange(-ids.shape[1], 0, device=ids.device)
        ring[slot, position % ring.shape[1]] = torch.where(ids >= 0, compress_ids(ids.clamp_min(0), self._map), DEAD)

    def read(
        self, ids: torch.Tensor, step: StepRows, ring: torch.Tensor, image: torch.Tensor | None = None
    ) -> tuple[list[torch.Tensor], torch.Tensor]:
        """For token ids int64 ``[T]``: per table its rows ``[T, width]``, and the dead rows, bool ``[T]``.

        ``ring`` int64 ``[slots, R]`` of compressed ids by position, whose newest places become those of this step. Rows where bool
        ``image`` ``[T]`` is set are dead: no n-gram reaches into an image or past it.
        """
        t = self._topology
        compressed = compress_ids(ids, self._map, image)
        back = torch.arange(1 - t.longest, 0, device=ids.device)
        position = step.start[:, None] + back
        places = ring[step.state_row[:, None], position % ring.shape[1]]
        previous = torch.where(position >= 0, places, DEAD)
        rows = engram_hash(compressed, previous, step.cu_q, self._multipliers, self._primes, self._offsets, self._pad)
        WindowPlan(step, t.longest, ring.shape[1]).store(ring, compressed)
        found = [read(numbers, self._dtype).flatten(1) for read, numbers in zip(self._read, rows, strict=True)]
        return found, compressed < 0
