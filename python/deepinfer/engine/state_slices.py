"""State slices of an engine: cut where the core says, kept in a tier, put back where a sequence begins with one.

Owns: the traffic between core, device copies, hooks and tier, the size of the host tier, what is counted. Never touches: which boundaries
are worth a slice and where sequences begin (the core's), how slices are kept (the tier's).

A slice is copied behind the step that left it in the replica and put into its tier once the copy has ended. What the tier holds is told to
the core before each plan; a slice that is gone when a sequence is to begin with it is found out before that step runs, and the sequence
begins again without it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np

from deepinfer import _core
from deepinfer.engine.config import EngineConfig
from deepinfer.engine.hooks import NOTHING, Admission, EngineHooks, KvSave
from deepinfer.engine.kv_store.slices import StoredSlices
from deepinfer.engine.state_hits import window_hits
from deepinfer.errors import CapacityError, ConfigError
from deepinfer.kvcache.state_slices import HostSlices, SliceCounts, SliceTier
from deepinfer.models.base import StateGroup
from deepinfer.platforms.cpu import CpuPlatform
from deepinfer.worker.slice_copies import SliceCopies, SliceCopy, slice_bytes

T = TypeVar("T")

_NO_BLOCKS = np.empty(0, np.int32)


@dataclass(frozen=True)
class SlicePlan:
    """Bytes of host memory for slices, and of one slice over all state groups; ``room`` 0 = no tier of the engine's own."""

    room: int = 0
    slice_bytes: int = 0

    @property
    def amount(self) -> tuple[int, int]:
        """How many, and the bytes of all."""
        return (self.room // self.slice_bytes if self.slice_bytes else 0), self.room


def plan_slices(config: EngineConfig, state: Sequence[StateGroup], given: SliceTier | None, default: int = 0) -> SlicePlan:
    """Sizes the host tier by ``state_slice_gib``. ``given``: a tier that the engine is to use instead; ``default``: bytes where the setting
    is left out, for a model that has slices.

    Raises:
        ConfigError: slices are asked for and the model has none, nothing is looked up, or there are two tiers.
        CapacityError: what was asked for is not free, or holds no slice.
    """
    has_slices = window_hits(state) is not None and all(group.replica_at for group in state)
    if config.state_slice_gib is None and given is None and has_slices and config.enable_prefix_caching:
        size = slice_bytes(state)
        return SlicePlan(default // size * size, size) if default >= size else SlicePlan()
    room = int((config.state_slice_gib or 0) * 2**30)
    if not room and given is None:
        return SlicePlan()
    what = "state_slice_gib" if given is None else "a tier of state slices"
    if given is not None and config.state_slice_gib:
        raise ConfigError("state_slice_gib makes a tier of state slices and another one was given; leave one of them out")
    if not has_slices:
        raise ConfigError(f"{what} is for models that keep windows beside their KV, which this one does not; leave it out")
    if not config.enable_prefix_caching:
        raise ConfigError(f"{what} needs prefix caching: set enable_prefix_caching=True or leave it out")
    plan = SlicePlan(room, slice_bytes(state))
    if given is not None:
        return plan
    free = CpuPlatform().memory_available()
    if room > free:
        raise CapacityError(
            f"state_slice_gib {config.state_slice_gib:g} asks for more host memory than the {free / 2**30:.2f} GiB that are free; "
            "lower it, or set 0 for no slices"
        )
    if room < plan.slice_bytes:
        raise CapacityError(
            f"state_slice_gib {config.state_slice_gib:g} holds no slice, which takes {plan.slice_bytes / 2**20:.1f} MiB; raise it, or set 0"
        )
    return plan


class StateSlices:
    """See the head of this file; one of an engine, on its step thread.

    Args:
        core, hooks: the engine's; ``copies``: of its device (`worker.slice_copies.SliceCopies`).
        tier: where slices are kept.
        name_of: request id of a handle, if somebody still wants it.
    """

    def __init__(self, core: _core.Core, hooks: EngineHooks, copies: SliceCopies, tier: SliceTier, name_of: Callable[[int], str]) -> None:
        self._core, self._hooks, self._copies, self.tier, self._name_of = core, hooks, copies, tier, name_of
        self._copying: deque[tuple[list[bytes], SliceCopy]] = deque()
        self._news: deque[tuple[bytes, bool]] = deque()
        self._cut = self._put_back = self._gone = self._faults = 0
        self.last_fault: Exception | None = None
        core.set_state_slices(True)
        self._unwatch = tier.watch(lambda key, present: self._news.append((key, present)))

    # Cutting

    def cut(self) -> None:
        """Begins to copy what the core has noted since the last call. After each of its `complete` and `schedule`, before anything more
        is launched."""
        taken = self._core.take_state_slices()
        if taken:
            wanted = [(slot, key) for seq, slot, boundary, key in taken if self._wanted(seq, slot, boundary, key)]
            if wanted:
                slots, keys = zip(*wanted, strict=True)
                self._copying.append((list(keys), self._copies.out(slots)))
                self._cut += len(keys)

    def _wanted(self, seq: int, slot: int, boundary: int, key: bytes) -> bool:
        save = KvSave(self._name_of(seq), seq, boundary, _NO_BLOCKS, slot, "slice", key)
        return not self._asked(lambda: _left_out(self._hooks.select_state_slice_to_store(save)) or self.tier.has(key), True)

    def settle(self, wait: bool = False) -> None:
        """Gives slices whose copy has ended to the tier, ``wait``: all of them, and tells the core what has come and gone. Before each
        plan."""
        self._give(wait)
        while self._news:
            key, present = self._news.popleft()
            self._core.note_state_slice(key, self.tier.kind, present)

    def _give(self, wait: bool) -> None:
        while self._copying and (wait or self._copying[0][1].done):
            keys, copy = self._copying.popleft()
            try:
                rows = copy.wait()
            except Exception as e:
                self._fault(e)
                continue
            for key, row in zip(keys, rows, strict=True):
                data = row.numpy().tobytes()
                self._asked(partial(self.tier.put, key, data), False)

    # Beginning

    def put_back(self, admission: Admission, given: bytes | None) -> Callable[[], None] | None:
        """Work that gives a sequence the windows of its slice: ``given``, or what the tier has. ``None``: it is gone, and so is the
        sequence's begin; its rows of this step count for nothing."""
        data = self._asked(lambda: self.tier.get(admission.key), None) if given is None else given
        if data is not None and len(data) == self._copies.num_bytes:
            self._put_back += 1
            return self._copies.back(data, admission.state_slot)
        self._gone += 1
        self._core.note_state_slice(admission.key, self.tier.kind, False)
        self._core.give_up_start(admission.seq)
        return None

    # Counting, and the end

    def counts(self) -> dict[str, int]:
        """Totals since the start: ``cut`` on the device, ``put_back``, ``gone`` when a sequence was to begin with one, ``faults`` of the
        tier, of copies and of the hook; and where the tier is in host memory what `SliceCounts` has."""
        mine = {"cut": self._cut, "put_back": self._put_back, "gone": self._gone, "faults": self._faults}
        near = self.tier.near if isinstance(self.tier, StoredSlices) else self.tier
        if isinstance(near, HostSlices):
            tier: SliceCounts = near.counts()
            mine |= {name: getattr(tier, name) for name in SliceCounts.__dataclass_fields__}
        return mine

    def close(self) -> None:
        """Gives the tier what is still being copied, and lets go of it. The core is not asked any more."""
        self._give(wait=True)
        self._unwatch()

    def _asked(self, question: Callable[[], T], otherwise: T) -> T:
        """What the tier, or a hook, answers; one that fails costs that slice."""
        try:
            return question()
        except Exception as e:
            self._fault(e)
            return otherwise

    def _fault(self, error: Exception) -> None:
        self._faults += 1
        self.last_fault = error


def _left_out(chosen: slice | None) -> bool:
    if chosen not in (None, NOTHING):
        raise ValueError(f"select_state_slice_to_store gave {chosen} for a slice; give None to keep it, hooks.NOTHING not to")
    return chosen is not None
