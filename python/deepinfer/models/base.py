"""What the worker and a model family agree on.

Owns: the KV-group declaration, the forward batch and the model protocol. Never touches: the scheduler, sampling, text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch


@dataclass(frozen=True)
class Source:
    """Tensors of one KV stream that share a page id.

    ``shape`` is the shape of one entry (for example ``(kv_heads, head_dim)``); the worker allocates one tensor
    ``[num_pages, entries_per_page, *shape]`` per name in ``tensors``.
    """

    tensors: tuple[str, ...]
    entries_per_page: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def entry_bytes(self) -> int:
        """Bytes of one entry over all tensors of this source."""
        n = 1
        for d in self.shape:
            n *= d
        return n * self.dtype.itemsize * len(self.tensors)


@dataclass(frozen=True)
class PagedGroup:
    """Pages of ``page_tokens`` tokens; group 0 sets the hash block."""

    page_tokens: int
    sources: tuple[Source, ...]

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all sources."""
        return sum(s.entries_per_page * s.entry_bytes for s in self.sources)


@dataclass(frozen=True)
class StateGroup:
    """Fixed bytes per sequence that do not page (see docs/architecture.md)."""

    stored: int
    dropped: int
    replicas: int = 0
    ring: int = 0
    cut: int = 0


@dataclass
class ForwardBatch:
    """One step's rows on the device.

    ``T`` rows of ``n`` sequences; decoding sequences come first. Host integers are bounds for grids, never a sync:
    ``cu_q_host`` is exact, ``seq_len_host`` is exact for prefilling sequences and an upper bound for decoding ones.
    """

    ids: torch.Tensor  # int64 [T]
    pos: torch.Tensor  # int64 [T]
    slots: list[torch.Tensor]  # one int64 [T] per slot map, -1 = writes nothing
    cu_q: torch.Tensor  # int32 [n + 1]
    seq_len: torch.Tensor  # int32 [n], KV length including this step's rows
    block_table: torch.Tensor  # int32 [n, W], rows already gathered by state slot
    num_decodes: int  # leading sequences that have exactly one row, or draft rows
    max_q: int
    max_len: int
    cu_q_host: Sequence[int] = field(default_factory=list)  # the same values as cu_q, known on the host
    seq_len_host: Sequence[int] = field(default_factory=list)


@runtime_checkable
class Model(Protocol):
    """What a family's forward object offers to the worker."""

    vocab_size: int
    max_position: int

    def kv_groups(self, block_tokens: int) -> tuple[list[PagedGroup], list[StateGroup]]:
        """Declares KV for pages of ``block_tokens`` tokens."""

    def forward(self, batch: ForwardBatch, kv: dict[str, torch.Tensor]) -> torch.Tensor:
        """Writes KV of the rows and gives hidden states ``[T, hidden]`` after the final norm."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits float32 ``[R, vocab]`` of the given rows; a row's bits do not depend on ``R``."""
