"""The vote of a rank group over torch.distributed: one small all-reduce a step, started with it and read before the next.

The words and how they are read are the core's (docs/architecture.md, Rank groups); here they only travel.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist

from deepinfer._core import VOTE_WORDS
from deepinfer.errors import ConfigError, RankGroupError


class StepVote(Protocol):
    """One rank's way to the others, as ``Core.set_vote`` takes it. A round is a ``start`` and the ``wait`` that follows it."""

    def start(self, words: Sequence[int]) -> None:
        """Gives this rank's words to the next round without waiting. Whatever it raises ends the group for this rank."""

    def wait(self) -> list[int]:
        """Element-wise minimum over the ranks, once all of them have started the round; raises when one does not in time."""

    def close(self) -> None:
        """Lets the others know that this rank is gone."""


class TorchVote:
    """Votes through an asynchronous ``all_reduce(MIN)`` of int64[8].

    Makes a process group of its own: rounds never mix with the model's collectives, and its time-out ends nothing else. All ranks of
    ``ranks`` must construct it at the same point, as every torch process group.

    Args:
        ranks: global ranks that vote together; None = all of them.
        timeout_s: longest wait for a rank. A rank whose process died is noticed at once; this is for one that hangs.
        backend: ``"gloo"``, or another one that reduces int64 tensors of host memory.

    Raises:
        ConfigError: torch.distributed is not initialised, or a value is out of range.
        RankGroupError: a rank did not come within ``timeout_s``, or cannot be reached.
    """

    def __init__(self, ranks: Sequence[int] | None = None, *, timeout_s: float = 8.0, backend: str = "gloo") -> None:
        if not dist.is_initialized():
            raise ConfigError("a rank group needs torch.distributed: call torch.distributed.init_process_group first")
        if not 0 < timeout_s < float("inf"):
            raise ConfigError(f"timeout_s is {timeout_s}; give seconds above 0")
        self._timeout = timedelta(seconds=timeout_s)
        try:
            group = dist.new_group(ranks=list(ranks) if ranks is not None else None, timeout=self._timeout, backend=backend)
        except RuntimeError as error:
            why = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise RankGroupError(
                f"rank {dist.get_rank()} met not every rank within {timeout_s:g} s: {why}; "
                "have all ranks loaded before they make their group"
            ) from error
        if not isinstance(group, dist.ProcessGroup):
            raise ConfigError(f"rank {dist.get_rank()} is not one of the ranks {ranks} that vote")
        self._group: dist.ProcessGroup | None = group
        self._work: dist.Work | None = None
        self._who = f"rank {dist.get_rank(group)} of {dist.get_world_size(group)}"
        self.rounds, self.wait_s = 0, 0.0  # rounds that were waited for, and how long
        self._words = torch.zeros(VOTE_WORDS, dtype=torch.int64)
        self._view = self._words.numpy()

    def start(self, words: Sequence[int]) -> None:
        """Starts the reduction of ``words`` (8 ints of 64 bits).

        Raises:
            RankGroupError: the group is closed, a round is open, or a peer cannot be reached.
        """
        if self._group is None or self._work is not None:
            raise RankGroupError(f"{self._who} {'has left its group' if self._group is None else 'has a round open'}")
        self._view[:] = words
        try:
            self._work = dist.all_reduce(self._words, op=dist.ReduceOp.MIN, group=self._group, async_op=True)
        except RuntimeError as error:
            raise self._lost(error) from error

    def wait(self) -> list[int]:
        """Minimum of each word over the ranks.

        Raises:
            RankGroupError: a peer died, or did not start the round within the time-out.
        """
        if self._work is None:
            raise RankGroupError(f"{self._who} has no round open")
        begin = time.perf_counter()
        try:
            done = self._work.wait(self._timeout)
        except RuntimeError as error:
            raise self._lost(error) from error
        self.rounds += 1
        self.wait_s += time.perf_counter() - begin
        self._work = None
        if done is False:
            raise RankGroupError(f"{self._who} waited {self._timeout.total_seconds()} s for a round")
        return self._view.tolist()

    def close(self) -> None:
        """Leaves the group: the others' next round fails at once. Idempotent."""
        group, self._group, self._work = self._group, None, None
        if group is not None and dist.is_initialized():
            dist.destroy_process_group(group)

    def _lost(self, error: RuntimeError) -> RankGroupError:
        return RankGroupError(f"{self._who}: {str(error).strip().splitlines()[0]}")
