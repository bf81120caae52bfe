"""Tables of experts by token, which are whole numbers that must name experts: as a checkpoint has them, or drawn."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch

from ...errors import CheckpointError
from ..loaders.source import WeightSource
from .containers import table_name
from .topology import DeepseekV4Topology

_WHOLE = (torch.int64, torch.int32, torch.int16, torch.uint8)


class WithTables:
    """A source whose tables are checked; with a ``seed`` they are drawn instead, since a source of random floats has none."""

    def __init__(self, source: WeightSource, topology: DeepseekV4Topology, seed: int | None = None) -> None:
        self._source, self._experts, self._seed = source, topology.moe.experts, seed
        self._tables = {table_name(plan) for plan in topology.layers if plan.hashed}

    def names(self) -> Iterable[str]:
        """See ``WeightSource``."""
        return self._source.names()

    def shape(self, name: str) -> tuple[int, ...]:
        """See ``WeightSource``."""
        return self._source.shape(name)

    def where(self, name: str) -> str:
        """See ``WeightSource``."""
        return self._source.where(name)

    def read(self, name: str) -> torch.Tensor:
        """See ``WeightSource``; tables as int64."""
        if name not in self._tables:
            return self._source.read(name)
        if self._seed is not None:
            return self._drawn(name, self._seed)
        table = self._source.read(name)
        if table.dtype not in _WHOLE:
            raise CheckpointError(f"table {name!r} in {self.where(name)} has dtype {table.dtype}; numbers of experts are whole")
        table = table.long()
        least, most = (int(end) for end in table.aminmax())
        if least < 0 or most >= self._experts:
            raise CheckpointError(
                f"table {name!r} in {self.where(name)} names experts {least} … {most}, there are {self._experts} ('n_routed_experts')"
            )
        ordered = table.sort(-1).values
        twice = (ordered[:, 1:] == ordered[:, :-1]).any(-1)
        if bool(twice.any()):
            token = int(twice.nonzero()[0])
            raise CheckpointError(f"table {name!r} in {self.where(name)} gives token {token} an expert twice: the file is damaged")
        return table

    def _drawn(self, name: str, seed: int) -> torch.Tensor:
        digest = hashlib.sha256(f"{seed}\0{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:4], "little"))
        tokens, chosen = self.shape(name)
        return torch.rand(tokens, self._experts, generator=generator).argsort(stable=True)[:, :chosen]
