"""Experts spread over the ranks of a group: every rank has some of them, and rows go to where their experts are.

Owns: which rank has which places, the way of rows there and of results back. Never touches: what experts compute, routing, steps.

Sizes must not depend on what rows chose, or the host would have to wait for the device before each layer. So every rank gives as many
rows as the fullest one has in this step (the step vote has agreed on it, ``begin``), all ranks see all rows, each computes what was chosen
of its own places, and each row's own rank gets one result per choice, which it adds in the order of the experts. Thus neither the number
of ranks nor what other ranks do shows in a bit. One exchange there and one back a layer, on every rank in every step alike.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F

from deepinfer.errors import ConfigError, RankGroupError

NOWHERE = -1
"""Place of what is computed nowhere: rows that only fill up."""
_NOWHERE_BYTE = 255  # four of them are NOWHERE


class ExpertGroup(Protocol):
    """One rank's way to the experts of the others."""

    rank: int
    size: int
    banks: int
    """Sets of experts that are spread over it."""
    exchanges: int
    exchange_s: float
    """How often rows went there or back, and how long the host took for it: on a CPU for the exchange, on a GPU for its launch."""

    def begin(self, rows: int) -> None:
        """The next exchanges are those of a step in which no rank has more than ``rows`` rows: on every rank the same number."""

    def dispatch(self, rows: torch.Tensor, places: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What all ranks give, rank by rank, ``N = size * R`` rows: from this rank's ``rows`` ``[T, d]``, ``places`` int64 ``[T, k]`` and
        ``weights`` float32 ``[T, k]`` the same of all. Rows beyond a rank's own have the place ``NOWHERE``."""

    def combine(self, made: torch.Tensor, owner: torch.Tensor) -> torch.Tensor:
        """``made`` ``[N, k, d]``: what this rank's experts give for all rows. ``owner`` int64 ``[T, k]``: which rank has what this rank's
        rows have chosen. Gives ``[T, k, d]``, each from its owner."""

    def close(self) -> None:
        """Leaves the group; idempotent."""


class TorchExpertGroup:
    """Through collectives of torch.distributed: an all-gather there, an all-to-all back (gloo on a CPU, NCCL on GPUs).

    Makes a process group of its own, so that its collectives never mix with the step vote's; all ranks construct it at the same point.

    Args:
        timeout_s: longest wait for a rank within an exchange; it covers whatever a rank does between two layers.
        backend: ``None`` = what torch.distributed was initialised with.

    Raises:
        ConfigError: torch.distributed is not initialised.
        RankGroupError: the ranks do not meet.
    """

    def __init__(self, *, timeout_s: float = 300.0, backend: str | None = None) -> None:
        if not dist.is_initialized():
            raise ConfigError("experts can be spread over ranks only with torch.distributed: call init_process_group first")
        try:
            group = dist.new_group(timeout=timedelta(seconds=timeout_s), backend=backend)
        except RuntimeError as error:
            raise RankGroupError(f"rank {dist.get_rank()} met not every rank: {_said(error)}") from error
        assert isinstance(group, dist.ProcessGroup)  # of all ranks, so this one is in it
        self._group: dist.ProcessGroup | None = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.banks, self.exchanges, self.exchange_s = 0, 0, 0.0
        self._most = 0

    def begin(self, rows: int) -> None:
        """See :class:`ExpertGroup`."""
        self._most = rows

    def dispatch(self, rows: torch.Tensor, places: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See :class:`ExpertGroup`. Raises ``RankGroupError`` for more rows than agreed, and when a rank is lost."""
        count = places.shape[0]
        if count > self._most:
            raise RankGroupError(f"rank {self.rank} of {self.size} has {count} rows in a step that was agreed to have {self._most}")
        # Bytes of a row, its places and its weights side by side: one exchange for the three.
        parts = [part.contiguous().view(torch.uint8) for part in (rows, places.int(), weights)]
        mine = F.pad(torch.cat(parts, 1), (0, 0, 0, self._most - count), value=_NOWHERE_BYTE)
        all_rows = mine.new_empty(self.size * self._most, mine.shape[1])
        self._exchange(lambda group: dist.all_gather_into_tensor(all_rows, mine, group=group))
        row, place, weight = (part.contiguous() for part in all_rows.split([part.shape[1] for part in parts], 1))
        there = place.view(torch.int32).long()
        real = (there != NOWHERE)[:, :1]
        # Bytes of padding are no numbers: nothing of them may get into a product.
        return torch.where(real, row.view(rows.dtype), 0), there, torch.where(real, weight.view(torch.float32), 0)

    def combine(self, made: torch.Tensor, owner: torch.Tensor) -> torch.Tensor:
        """See :class:`ExpertGroup`. Raises ``RankGroupError`` when a rank is lost."""
        count, chosen = owner.shape
        found = torch.empty_like(made)
        self._exchange(lambda group: dist.all_to_all_single(found, made.contiguous(), group=group))
        # [rank, row, choice]: of each choice its owner's.
        flat = found.view(self.size * self._most * chosen, made.shape[-1])
        at = torch.arange(count * chosen, device=made.device).view(count, chosen)
        return flat.index_select(0, (owner * (self._most * chosen) + at).flatten()).view(count, chosen, -1)

    def _exchange(self, run: Callable[[dist.ProcessGroup], object]) -> None:
        if self._group is None:
            raise RankGroupError(f"rank {self.rank} of {self.size} has left its group")
        begin = time.perf_counter()
        try:
            run(self._group)
        except RuntimeError as error:
            raise RankGroupError(f"rank {self.rank} of {self.size} lost contact within a step: {_said(error)}") from error
        self.exchanges += 1
        self.exchange_s += time.perf_counter() - begin

    def close(self) -> None:
        """See :class:`ExpertGroup`."""
        group, self._group = self._group, None
        if group is not None and dist.is_initialized():
            dist.destroy_process_group(group)


def share(group: ExpertGroup | None, experts: int) -> range:
    """Which of ``experts`` places are this rank's; all of them without a group. Raises ``ConfigError`` if they do not come out even."""
    if group is None:
        return range(experts)
    if experts % group.size:
        raise ConfigError(f"{experts} experts cannot be spread evenly over {group.size} ranks; take a number of ranks that divides them")
    each = experts // group.size
    return range(group.rank * each, (group.rank + 1) * each)


_current: ContextVar[ExpertGroup | None] = ContextVar("expert group", default=None)


@contextmanager
def spread_experts(group: ExpertGroup | None) -> Iterator[None]:
    """Experts that this thread packs within the block are spread over ``group``; None = every rank has all of them."""
    before = _current.set(group)
    try:
        yield
    finally:
        _current.reset(before)


def current_group() -> ExpertGroup | None:
    """Over which ranks experts are spread that are packed now."""
    return _current.get()


def _said(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
