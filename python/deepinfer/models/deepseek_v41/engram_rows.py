"""Table rows of a step: which ones the newest ids address, and their numbers.

Depends on ids alone, so all tables are read before the first layer. The ids that n-grams reach back to come from the step or from a
short ring of compressed ids in the state. Tables in host memory are read in the device's order, which on a CPU is the order of
the launches: ids that the device fills in are known by then.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

import torch

from ...kernels.cache_rows import StepRows
from ...kernels.engram_hash import engram_hash
from ...kernels.window_rows import WindowPlan
from .engram import DEAD, EngramTopology, compress_ids
from .engram_table import EngramTable


class EngramReader:
    """Reads the tables of a model; made once its checkpoint is there.

    Args:
        topology: of the tables.
        tables: one per Engram layer, in order.
        token_map: int64 ``[vocab]``, compressed id of every token.
        dtype: of the rows; device: where steps are.
    """

    def __init__(
        self, topology: EngramTopology, tables: Sequence[EngramTable], token_map: torch.Tensor, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._topology, self._tables, self._dtype = topology, list(tables), dtype
        self._multipliers, self._primes, self._offsets = topology.tensors(device)
        self._pad = int(token_map[topology.pad_token])
        self._map = token_map.to(device)

    def set_cache(self, cache_bytes: int) -> None:
        """Bounds what all tables together keep of their rows in memory, begun empty."""
        for table in self._tables:
            table.set_cache(cache_bytes // len(self._tables))

    def counters(self) -> dict[str, int]:
        """``engram_table.RowCounters`` of all tables together, and the rows their caches have room for."""
        each = [asdict(table.counters) | {"capacity": table.capacity} for table in self._tables]
        return {name: sum(one[name] for one in each) for name in each[0]}

    def read(self, ids: torch.Tensor, step: StepRows, ring: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
        """For token ids int64 ``[T]``: per table its rows ``[T, width]``, and the dead rows, bool ``[T]``.

        ``ring`` int64 ``[slots, R]`` of compressed ids by position, whose newest places become those of this step.
        """
        t = self._topology
        compressed = compress_ids(ids, self._map)
        back = torch.arange(1 - t.longest, 0, device=ids.device)
        position = step.start[:, None] + back
        places = ring[step.state_row[:, None], position % ring.shape[1]]
        previous = torch.where(position >= 0, places, DEAD)
        rows = engram_hash(compressed, previous, step.cu_q, self._multipliers, self._primes, self._offsets, self._pad)
        WindowPlan(step, t.longest, ring.shape[1]).store(ring, compressed)
        found = [table.read(numbers, self._dtype).flatten(1) for table, numbers in zip(self._tables, rows, strict=True)]
        return found, compressed < 0
