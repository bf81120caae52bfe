"""How a process becomes one of several ranks that step together, and stops being one.

Owns: the process groups of this process and what it needs of the environment. Never touches: requests, steps.
"""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from deepinfer import _core
from deepinfer.distributed import ExpertGroup, TorchExpertGroup, TorchVote
from deepinfer.engine.data_parallel.place import RankPlace
from deepinfer.errors import RankGroupError

_LOADING = timedelta(hours=1)
"""Longest time between the first rank that has loaded its part and the last."""


class Membership:
    """A process's part in its group, from the time before the model is loaded.

    Args:
        place: which rank it is.
        device: where its model runs.

    Raises:
        RankGroupError: the others do not come.
    """

    def __init__(self, place: RankPlace, device: torch.device) -> None:
        # One host: nothing is offered to a network. Multicast over NVLink needs rights that containers often lack.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
        cuda = device.type == "cuda"
        if cuda:
            torch.cuda.set_device(device)
        self.place = place
        self.experts: ExpertGroup | None = None
        self._vote: TorchVote | None = None
        try:
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if cuda else "gloo",
                init_method=f"file://{place.meet}",
                rank=place.rank,
                world_size=place.size,
                timeout=_LOADING,
                device_id=device if cuda else None,
            )
            if place.spread_experts:
                self.experts = TorchExpertGroup(timeout_s=place.timeout)
        except RuntimeError as error:
            self.leave()
            raise RankGroupError(f"{place} met not every rank: {str(error).splitlines()[0]}") from error

    def enter(self, core: _core.Core) -> None:
        """Waits until every rank is ready to step; from then on all of them step together.

        Raises:
            RankGroupError: a rank was lost while it loaded.
        """
        try:
            dist.all_reduce(torch.zeros(1))  # a barrier of the host
        except RuntimeError as error:
            raise RankGroupError(f"{self.place} waited for the others to load: {str(error).splitlines()[0]}") from error
        self._vote = TorchVote(timeout_s=self.place.timeout)
        core.set_vote(self._vote)

    def counters(self) -> dict[str, float]:
        """What being in step with the others has cost this rank's host: ``vote_rounds``, ``vote_wait_seconds``, and with spread experts
        ``exchanges``, ``exchange_seconds``."""
        found: dict[str, float] = {}
        if self._vote is not None:
            found |= {"vote_rounds": self._vote.rounds, "vote_wait_seconds": self._vote.wait_s}
        if self.experts is not None:
            found |= {"exchanges": self.experts.exchanges, "exchange_seconds": self.experts.exchange_s}
        return found

    def leave(self) -> None:
        """Gives the process groups back; idempotent."""
        if self.experts is not None:
            self.experts.close()
            self.experts = None
        if dist.is_initialized():
            dist.destroy_process_group()
