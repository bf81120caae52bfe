"""The step thread's side of an engine's KV store.

Owns: what is done when: look prompts up as they come, move fetches and saves on before each plan, write out at the end. Never touches:
steps, requests.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from deepinfer.engine.hooks import EngineHooks
from deepinfer.engine.kv_store.counters import StoreCounters
from deepinfer.engine.kv_store.fetches import Fetches
from deepinfer.engine.kv_store.plan import StorePlan
from deepinfer.engine.kv_store.saves import Saves
from deepinfer.engine.kv_store.staging import Buffers
from deepinfer.engine.mover import Bell
from deepinfer.errors import EngineDeadError
from deepinfer.kvcache.block_tier import BlockTier
from deepinfer.kvcache.objects import GRAIN
from deepinfer.kvcache.state_slices import SliceTier
from deepinfer.sampling import TrafficClass

if TYPE_CHECKING:
    from deepinfer import _core
    from deepinfer.worker.runner import ModelRunner

_WRITE_OUT = 3.0
"""Seconds that the end of an engine waits for what is still to be stored: an engine process is given five to end."""


class StoreTraffic:
    """See the head of this file; one of an engine, on its step thread.

    Args:
        core, runner, hooks: the engine's.
        plan: what holds.
        tier: closed with the traffic if ``owned``.
        bell: rung when there is something to be moved on.
        sizes: blocks of the pool, tokens of the longest sequence, sequences of a step.
        slices: where fetched slices of states are put, of models that have such; ``slice_bytes``: of each.
        whose: request id and class of traffic of a handle, while its request has not ended.
        name: of the store, to say on stderr, once, that it fails; empty: not to.
    """

    def __init__(
        self,
        core: _core.Core,
        runner: ModelRunner,
        hooks: EngineHooks,
        plan: StorePlan,
        tier: BlockTier,
        owned: bool,
        bell: Bell,
        sizes: tuple[int, int, int],
        slices: SliceTier | None,
        slice_bytes: int,
        whose: Callable[[int], tuple[str, TrafficClass]],
        name: str = "",
    ) -> None:
        self._core, self._plan, self._tier, self._owned = core, plan, tier, owned
        self.counters = StoreCounters()
        self.last_fault: BaseException | None = None
        self._name = name
        blocks, max_model_len, max_num_seqs = sizes
        most = max(1, max_model_len // GRAIN)
        core.set_saves(plan.write, plan.form.blocks)
        self._fetches = Fetches(core, tier, plan, Buffers(runner, plan.form, most), slices, slice_bytes, self.counters, bell, self._fault)
        self._saves = Saves(
            core, hooks, tier, plan.form, Buffers(runner, plan.form, most, 2), blocks, max_num_seqs, self.counters, bell, self._fault, whose
        )

    def ask(self, length: int, prompt_logprobs: bool) -> int:
        """How many objects of a prompt of so many tokens are to be looked up; 0 = none."""
        return self._fetches.objects_of(length, prompt_logprobs, time.monotonic())

    @property
    def waits(self) -> bool:
        """Whether a sequence whose prompt is looked up waits for the answer."""
        return self._plan.waits

    def added(self, handle: int, length: int, objects: int) -> None:
        """The core has a sequence whose prompt is to be looked up; if it ``waits``, it was added so."""
        self._fetches.add(handle, length, objects, self._plan.waits, time.monotonic())

    def forget(self, handle: int) -> None:
        """A sequence has ended."""
        self._fetches.forget(handle)

    def poll(self) -> None:
        """Moves fetches and saves on, ahead of the next plan."""
        self._saves.poll()
        self._fetches.poll(time.monotonic())
        self._complain()

    def take(self) -> None:
        """Takes charge of what the core has completed."""
        self._saves.take()

    def offer_slice(self, key: bytes, data: bytes) -> None:
        """A slice of a state is to be stored."""
        self._saves.offer(key, data)

    def nothing_runs(self) -> bool:
        """The core has planned, and had nothing to run. Whether it has now."""
        return self._fetches.nothing_runs(time.monotonic())

    @property
    def waiting(self) -> bool:
        """Whether a request may be waiting for the tier."""
        return self._fetches.waiting

    def rest(self) -> float:
        """Seconds after which to look although nothing has rung."""
        return self._fetches.rest(time.monotonic())

    def tend(self) -> bool:
        """Moves on what is still to be put, where no plan comes; whether there is more."""
        self._saves.take()
        self._saves.poll()
        return self._saves.busy

    def settle(self, seconds: float) -> bool:
        """Waits until nothing is left to be put; whether it is so. For the end of an engine, and for tests."""
        until = time.monotonic() + seconds
        while True:
            if not self.tend():
                return True
            if time.monotonic() >= until:
                return False
            time.sleep(0.002)

    def close(self, fault: bool) -> None:
        """Writes out what is complete, for some seconds at most, and lets go of the tier. ``fault``: the core says nothing any more."""
        until = time.monotonic() + _WRITE_OUT
        if not fault:
            with suppress(EngineDeadError):
                self.settle(_WRITE_OUT)
        self._fetches.close()
        self._saves.close(0.2 if fault else max(0.2, until - time.monotonic()))
        self._complain()  # while the tier can still say why
        if self._owned:
            try:
                self._tier.flush(max(0.0, until - time.monotonic()))
            except Exception as e:
                self._fault(e)
            with suppress(Exception):
                self._tier.close()
        self._complain()

    def _complain(self) -> None:
        """Whoever has named a store that is not there, or is full, would not notice otherwise: answers are the same."""
        if not self._name or not (self.counters.failed or self.counters.faults):
            return
        why: object = self.last_fault
        if why is None:
            with suppress(Exception):
                why = self._tier.trouble()
        print(
            f"deepinfer: the KV store {self._name} fails{f' ({why})' if why else ''}; what it lacks is computed",
            file=sys.stderr,
            flush=True,
        )
        self._name = ""

    def _fault(self, error: BaseException) -> None:
        self.counters.faults += 1
        self.last_fault = error
