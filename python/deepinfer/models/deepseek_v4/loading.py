"""What a checkpoint's tensors are called, and tables of experts by token: whole numbers that must name experts, as stored or drawn."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable

import torch

from ...errors import CheckpointError
from ..loaders.source import WeightSource, reads_ahead
from .containers import table_name
from .topology import DeepseekV4Topology

_WHOLE = (torch.int64, torch.int32, torch.int16, torch.uint8)

_SAVED = (
    (re.compile(r"model\."), ""),
    (re.compile(r"embed_tokens\."), "embed."),
    (re.compile(r"hc_head\.hc_"), "hc_head_"),
    (re.compile(r"(layers\.\d+\.attn\.)norm\."), r"\1kv_norm."),
)
"""What ``save_pretrained`` of transformers 5 calls otherwise than the release does, in the order to undo it."""


def released_name(name: str) -> str:
    """The release's name of a tensor that may be called as ``save_pretrained`` calls it."""
    for saved, released in _SAVED:
        match = saved.match(name)
        if match is not None:
            name = match.expand(released) + name[match.end() :]
    return name


class ReleasedNames:
    """A source under the release's names, whichever of the two its checkpoint has; ``CheckpointError`` for a tensor that is there twice."""

    def __init__(self, source: WeightSource) -> None:
        self._source, self.reads_ahead = source, reads_ahead(source)
        self._stored: dict[str, str] = {}
        for name in source.names():
            other = self._stored.setdefault(released_name(name), name)
            if other != name:
                raise CheckpointError(
                    f"tensors {other!r} in {source.where(other)} and {name!r} in {source.where(name)} are the same one under two names; "
                    "keep one of them"
                )

    def names(self) -> Iterable[str]:
        """See ``WeightSource``."""
        return self._stored

    def shape(self, name: str) -> tuple[int, ...]:
        """See ``WeightSource``."""
        return self._source.shape(self._stored[name])

    def where(self, name: str) -> str:
        """See ``WeightSource``."""
        return self._source.where(self._stored.get(name, name))

    def read(self, name: str) -> torch.Tensor:
        """See ``WeightSource``."""
        return self._source.read(self._stored[name])


class WithTables:
    """A source whose tables are checked; with a ``seed`` they are drawn instead, since a source of random floats has none."""

    def __init__(self, source: WeightSource, topology: DeepseekV4Topology, seed: int | None = None) -> None:
        self._source, self._experts, self._seed = source, topology.moe.experts, seed
        self.reads_ahead = reads_ahead(source)
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
