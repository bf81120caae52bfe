"""The order of a step's calls: plan, launch, wait, complete, one step at a time or one step apart.

Owns: which steps are in flight, their order, and where each failure goes. Never touches: requests, text, tensors.

With ``depth`` 1 a step is planned, run and completed in one call. With 2, while the device runs step n the host completes n−1, plans
n+1 and launches it; a step of which somebody has a grammar is launched up to its sampling, which follows the completion of the step
before it. What the device has finished is never held back: when nothing can be planned, the next step in flight is waited for.
"""

from __future__ import annotations

import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from deepinfer import _core
from deepinfer.engine.request import SequenceDelta
from deepinfer.errors import EngineDeadError, StepFailedError, StepOrderError
from deepinfer.speculative import Drafting
from deepinfer.worker.device_queue import StepTimes
from deepinfer.worker.runner import ModelRunner
from deepinfer.worker.step import Step, StepResult
from deepinfer.worker.step_ring import FLAG_GRAMMAR, KIND_DECODE

RING_SLOTS = 3


@dataclass
class EngineCounters:
    """Totals since the start, for benches and metrics; seconds of the wall clock.

    ``execute_s`` is the host's time of launching and waiting, ``wait_s`` the waiting alone; ``device_s`` is the device's own time of
    completed steps and ``idle_s`` its time between them.
    """

    steps: int = 0
    schedule_s: float = 0.0
    execute_s: float = 0.0
    wait_s: float = 0.0
    complete_s: float = 0.0
    device_s: float = 0.0
    idle_s: float = 0.0
    prefill_tokens: int = 0
    generated_tokens: int = 0
    draft_rows: int = 0
    failed_steps: int = 0
    requests: int = 0


@dataclass(slots=True)
class Launched:
    """A step in flight: its ring slot, the runner's record, and what of its plan is needed once the slot has been given back.

    ``handles`` uint64 ``[n]``: who had each sequence's state slot when the step was launched; ``sample_off`` int32 ``[n + 1]``;
    ``grammars``: indices of the sequences with a grammar. ``host_s``: seconds the host worked on it so far. ``rested``: the engine had
    nothing to do before it.
    """

    slot: int
    step: Step
    handles: NDArray[np.uint64]
    sample_off: NDArray[np.int32]
    grammars: list[int]
    host_s: float = 0.0
    rested: bool = False


class StepOwner(Protocol):
    """What the loop tells and asks."""

    def before_schedule(self) -> None:
        """The core is about to plan."""

    def after_schedule(self) -> None:
        """The core has planned, or had nothing to; nothing of it has been launched."""

    def post_schedule(self, slot: int) -> None:
        """A step was planned. An exception fails it."""

    def handles_of(self, state_slots: NDArray[np.int32]) -> NDArray[np.uint64]:
        """Handles of the sequences that have these state slots now."""

    def fill_masks(self, launched: Launched) -> None:
        """The step before a step with grammar rows has completed: their masks are due."""

    def step_completed(self, launched: Launched, result: StepResult, times: StepTimes | None) -> list[SequenceDelta]:
        """The core has completed a step; its outputs are the newest."""

    def step_failed(self, error: StepFailedError) -> list[SequenceDelta]:
        """The core has ended the sequences of a failed step; its outputs are the newest."""

    def flushed(self) -> list[SequenceDelta]:
        """Nothing is in flight and nothing could be planned; the outputs hold what ended outside of a step."""


class StepLoop:
    """Drives one core and one runner.

    Args:
        depth: most steps in flight, 1 or 2, the core's ``max_in_flight``.
        owner: see :class:`StepOwner`.
        counters: kept up to date.
        drafting: proposes drafts before each plan, if there is one.
    """

    def __init__(
        self,
        core: _core.Core,
        runner: ModelRunner,
        depth: int,
        owner: StepOwner,
        counters: EngineCounters,
        drafting: Drafting | None = None,
    ) -> None:
        self._core, self._runner, self._depth, self._owner, self._counters = core, runner, depth, owner, counters
        self.drafting = drafting
        self._flight: deque[Launched] = deque()
        self._news: list[SequenceDelta] = []  # of a turn that raised before it could tell
        self._rested = True

    @property
    def in_flight(self) -> int:
        """Steps launched and not completed."""
        return len(self._flight)

    def advance(self) -> list[SequenceDelta]:
        """One turn; gives what there is to tell. What a turn that raises has to tell comes with the next one."""
        self._turn(self._news)
        news, self._news = self._news, []
        return news

    def _turn(self, news: list[SequenceDelta]) -> None:
        finished = len(self._flight) >= self._depth
        if finished:
            self._finish(news)
        begin = time.perf_counter()
        if self.drafting is not None:
            self.drafting.propose()
        self._owner.before_schedule()
        slot = self._core.schedule(time.monotonic_ns())
        self._owner.after_schedule()
        planned = time.perf_counter() - begin
        self._counters.schedule_s += planned
        if slot >= 0:
            self._launch(slot, news, planned)
            if self._depth == 1:
                self._finish(news)
        elif self._flight and not finished:
            self._finish(news)
        elif not self._flight:
            self._core.flush()
            news += self._owner.flushed()

    def _launch(self, slot: int, news: list[SequenceDelta], planned: float) -> None:
        begin, before = time.perf_counter(), self._counters.wait_s + self._counters.complete_s
        error: Exception | None = None
        try:
            self._owner.post_schedule(slot)
        except Exception as e:
            error = e
        step = self._runner.launch_forward(slot, error)
        a, n = step.slot.a, step.header.seqs
        with_grammar = np.flatnonzero(a["seq_flags"][:n] & FLAG_GRAMMAR).tolist() if step.header.grammar_rows else []
        launched = Launched(slot, step, self._owner.handles_of(a["state_row"][:n]), a["sample_off"][: n + 1].copy(), with_grammar)
        self._flight.append(launched)
        if step.header.grammar_rows:
            while len(self._flight) > 1:
                self._finish(news)
            self._owner.fill_masks(launched)
        self._runner.launch_sample(step)
        spent = time.perf_counter() - begin
        self._counters.execute_s += spent
        other = self._counters.wait_s + self._counters.complete_s - before  # of the step that had to be completed first
        launched.host_s, launched.rested, self._rested = planned + spent - other, self._rested, False

    def _finish(self, news: list[SequenceDelta]) -> None:
        """Waits for the oldest step in flight and completes it, or fails it with what went wrong.

        It leaves the flight once the core has taken it back, one way or the other.
        """
        launched = self._flight[0]
        c, begin = self._counters, time.perf_counter()
        try:
            result = self._runner.wait(launched.step)
        except EngineDeadError:
            raise  # the device is gone, not this step
        except Exception as e:
            self._fail(launched, e, news)
            return
        waited = time.perf_counter()
        times = self._runner.times(launched.step)
        if self.drafting is not None and times is not None:
            self._tell_drafting(self.drafting, launched, result, times)
        try:
            self._core.complete(launched.slot, time.monotonic_ns())
        except Exception as e:
            self._fail(launched, e, news)  # a core that does not take it back this way either raises: there is no going on
            return
        self._flight.popleft()
        completed = time.perf_counter()
        c.steps += 1
        c.wait_s += waited - begin
        c.execute_s += waited - begin
        c.complete_s += completed - waited
        c.prefill_tokens += result.header.rows - result.header.decodes
        c.generated_tokens += result.header.samples - result.header.draft_rows
        c.draft_rows += result.header.verified
        if times is not None:
            device, idle = times.commands + times.forward + times.sample, 0.0 if launched.rested else times.idle
            c.device_s += device
            c.idle_s += idle
            host = launched.host_s + completed - waited
            self._core.note_step_times(result.header.step, int(device * 1e9), int(idle * 1e9), int(host * 1e9))
        self._rested = self._rested or not (self._flight or self._core.has_work())
        news += self._owner.step_completed(launched, result, times)

    def _fail(self, launched: Launched, error: Exception, news: list[SequenceDelta]) -> None:
        """Ends the sequences of the oldest step in flight."""
        failure = StepFailedError(f"the step failed with {type(error).__name__}: {error}")
        failure.__cause__ = error
        try:
            self._core.fail_step(launched.slot)
        except Exception as e:
            raise EngineDeadError(f"{failure}, and the core does not take it back: {e}") from failure
        self._flight.popleft()
        self._counters.failed_steps += 1
        news += self._owner.step_failed(failure)

    def _tell_drafting(self, drafting: Drafting, launched: Launched, result: StepResult, times: StepTimes) -> None:
        """Times of steps with prompts or new sequences in them say nothing about drafts."""
        header = result.header
        if header.kind == KIND_DECODE and not header.admitted:
            a = launched.step.slot.a
            rows = a["verified"][: header.seqs] + 1 if header.cut else np.diff(launched.sample_off)
            drafting.completed(rows, a["accepted"][: header.seqs], header.rows - header.cut, times.forward * 1e3, times.sample * 1e3)

    def drop_all(self) -> None:
        """Fails every step in flight, wherever in a turn an interrupt came; returns once the device is done with them.

        May be called again from the start if it was interrupted itself.
        """
        self._runner.drain()
        self._flight.clear()
        self._news.clear()
        for _ in range(RING_SLOTS):  # they fail in the order they were planned; which slots those are may not have been noted
            for slot in range(RING_SLOTS):
                with suppress(StepOrderError):
                    self._core.fail_step(slot)
