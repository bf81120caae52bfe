"""What the steps did, for people: one line every ten seconds while something runs, and a profiler trace on demand.

Owns: :class:`EngineMetrics` (a typed copy of the core's snapshot), the line, the trace. Never touches: requests, the order of a step.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from deepinfer import _core

if TYPE_CHECKING:
    import torch

INTERVAL = 10.0


@dataclass(frozen=True)
class Times:
    """Times in nanoseconds: bucket ``i`` counts those below ``1024 << i``, the last bucket all above."""

    counts: tuple[int, ...]
    sum_ns: int

    @property
    def mean_ms(self) -> float:
        """Mean in milliseconds, 0 without a value."""
        count = sum(self.counts)
        return self.sum_ns / count / 1e6 if count else 0.0


@dataclass(frozen=True)
class EngineMetrics:
    """Everything the core counts, at one moment; totals since the start unless it says "now".

    Attributes:
        totals: every plain counter by name (``_core.Core.stats``), also those below.
        running, decoding: sequences that hold a lane now; of these, those past their prompt.
        waiting: sequences that wait now, by reason: ``resources`` (of these ``preempted``), ``grammar``, ``kv``, ``fork``, ``handover``.
        steps: completed or in flight, by type: ``decode``, ``prefill``, ``mixed``, ``dummy``; ``idle`` are plans with nothing to run.
        chunk_fill: prefill rows of a step against the rows it had for them, by tenths (index 10: all of them); ``chunk_rows`` and
            ``chunk_budget`` are the sums of both.
        preemptions: by kind: ``recompute``, ``swap``.
        hit_tokens, asked_tokens: tokens of admitted sequences found in the index, and all of them.
        starts: of models with windows, how sequences began: ``nothing`` found, from a ``snapshot``, from a ``slice``, or by a ``rerun``.
        rerun_tokens: of these models, tokens found in the index and computed again.
        blocks, slots: pages of each paged group, and state slots, by state, now. ``host_blocks``, ``host_slots``: those in host memory;
            ``snapshots``: of states, ``cached`` ones are ready and ``held`` ones in use.
        votes: rounds of the rank group by outcome, none where ranks step by themselves; ``second_rounds`` is how many of them took two.
        drafts_asked, drafts_taken: how often a draft stood at each position, and was accepted there.
        device_time, host_time: of completed steps.
        idle_ns: time in which the device stood still although there was work; ``bubble``: its part of the device's time.
        hidden_ns: the host's work that was hidden under the device's; ``overlap``: its part of the host's work.
        tables: of models that read rows of tables in files: ``rows``, ``lookups``, ``hits``, ``misses``, ``evictions``, ``bytes_read``,
            ``capacity`` (see ``models.base.TableModel``); empty for others.
        slices: of engines that keep slices of states: ``cut``, ``put_back``, ``gone``, ``faults``, and of a tier in host memory ``slices``
            and ``bytes`` now, ``kept``, ``evicted``, ``refused``, ``differing``, ``hits``, ``misses``; empty for others.
        grammars: ``fills``: masks of answers held to a form, ``fill_seconds``, ``slow_fills`` of more than 50 ms, and ``so_failed``
            answers that ended by their grammar's fault.
        store: of engines with a KV store, what `deepinfer.engine.kv_store.counters.StoreCounters` says; empty for others.
        moe: of models with mixtures of experts, what `deepinfer.worker.expert_loads.ExpertLoads.counts` says; empty for others.
        graphs: of engines whose decode steps are recorded, the ``buckets`` of rows they are recorded for and ``replays``, steps that were
            one of them; empty for others. ``prompt_graphs``: the same of steps with prompts.
        group: of a rank that steps together with others, what `deepinfer.engine.data_parallel.membership.Membership.counters` says; empty
            for others.
    """

    totals: dict[str, int]
    running: int
    decoding: int
    waiting: dict[str, int]
    steps: dict[str, int]
    chunk_fill: tuple[int, ...]
    chunk_rows: int
    chunk_budget: int
    preemptions: dict[str, int]
    hit_tokens: int
    asked_tokens: int
    starts: dict[str, int]
    rerun_tokens: int
    blocks: tuple[_core.PoolCounts, ...]
    slots: _core.PoolCounts
    host_blocks: _core.PoolCounts
    host_slots: _core.PoolCounts
    snapshots: _core.PoolCounts
    votes: dict[str, int]
    second_rounds: int
    drafts_asked: tuple[int, ...]
    drafts_taken: tuple[int, ...]
    device_time: Times
    host_time: Times
    idle_ns: int
    hidden_ns: int
    bubble: float
    overlap: float
    tables: dict[str, int]
    slices: dict[str, int]
    store: dict[str, int]
    grammars: dict[str, float]
    group: dict[str, float]
    moe: dict[str, float]
    graphs: dict[str, int]
    prompt_graphs: dict[str, int]

    @classmethod
    def of(
        cls,
        core: _core.Core,
        tables: dict[str, int] | None = None,
        slices: dict[str, int] | None = None,
        store: dict[str, int] | None = None,
        grammars: dict[str, float] | None = None,
        group: dict[str, float] | None = None,
        moe: dict[str, float] | None = None,
        graphs: dict[str, int] | None = None,
        prompt_graphs: dict[str, int] | None = None,
    ) -> EngineMetrics:
        """One snapshot of the core, beside what the model says of its tables, and the engine of its slices, store and grammars."""
        m = core.metrics()
        t, votes, pools, chunks = m["totals"], m["votes"], m["pools"], m["chunk_fill"]
        return cls(
            totals=t,
            running=t["running"],
            decoding=t["decoding"],
            waiting={
                "resources": t["waiting"],
                "preempted": t["wait_preempted"],
                "grammar": t["wait_grammar"],
                "kv": t["wait_kv"],
                "fork": t["wait_fork"],
                "handover": t["wait_handover"],
            },
            steps={kind: t[f"{kind}_steps"] for kind in ("decode", "prefill", "mixed", "dummy")} | {"idle": t["idle_plans"]},
            chunk_fill=tuple(chunks["counts"]),
            chunk_rows=chunks["part"],
            chunk_budget=chunks["whole"],
            preemptions={"recompute": t["preemptions"] - t["swapped_out"], "swap": t["swapped_out"]},
            hit_tokens=t["hit_tokens"],
            asked_tokens=t["asked_tokens"],
            starts={kind: t[f"start_{kind}"] for kind in ("nothing", "snapshot", "slice", "rerun")},
            rerun_tokens=t["rerun_tokens"],
            blocks=tuple(pools["groups"]),
            slots=pools["slots"],
            host_blocks=pools["host_blocks"],
            host_slots=pools["host_slots"],
            snapshots=pools["snapshots"],
            votes={
                "idle": votes["idle"],
                "decode": votes["decode"],
                "prefill": votes["prefill"],
                "fallback": votes["fallback"],
                "error": votes["error"],
            },
            second_rounds=votes["second_rounds"],
            drafts_asked=tuple(m["drafts_asked"]),
            drafts_taken=tuple(m["drafts_taken"]),
            device_time=Times(tuple(m["device_time"]["counts"]), m["device_time"]["sum_ns"]),
            host_time=Times(tuple(m["host_time"]["counts"]), m["host_time"]["sum_ns"]),
            idle_ns=m["idle_ns"],
            hidden_ns=m["hidden_ns"],
            bubble=m["bubble"],
            overlap=m["overlap"],
            tables=dict(tables or {}),
            slices=dict(slices or {}),
            store=dict(store or {}),
            grammars=dict(grammars or {}),
            group=dict(group or {}),
            moe=dict(moe or {}),
            graphs=dict(graphs or {}),
            prompt_graphs=dict(prompt_graphs or {}),
        )

    @classmethod
    def together(cls, ranks: Sequence[EngineMetrics]) -> EngineMetrics:
        """Of several engines: sums, and of the parts of times the means over device and host time."""
        device, host = sum(r.device_time.sum_ns for r in ranks), sum(r.host_time.sum_ns for r in ranks)
        made = {f.name: _sum([getattr(r, f.name) for r in ranks]) for f in fields(cls) if f.name not in ("bubble", "overlap")}
        bubble = sum(r.bubble * r.device_time.sum_ns for r in ranks) / device if device else 0.0
        overlap = sum(r.overlap * r.host_time.sum_ns for r in ranks) / host if host else 0.0
        return cls(**made, bubble=bubble, overlap=overlap)


def _sum(values: Sequence[Any]) -> Any:
    """Of values of one shape: numbers, and what holds numbers."""
    first = values[0]
    if isinstance(first, Times):
        return Times(_sum([v.counts for v in values]), sum(v.sum_ns for v in values))
    if isinstance(first, dict):
        return {key: _sum([v.get(key, 0) for v in values]) for key in dict.fromkeys(k for v in values for k in v)}
    if isinstance(first, tuple):
        return tuple(_sum(part) for part in zip(*values, strict=True))
    return sum(values)


_line_open: Callable[[], bool] | None = None


@contextmanager
def keep_off(line_open: Callable[[], bool]) -> Iterator[None]:
    """Within the block lines wait while ``line_open()``: somebody is in the middle of a line of the terminal that they would go to."""
    global _line_open
    before, _line_open = _line_open, line_open
    try:
        yield
    finally:
        _line_open = before


class StepLog:
    """Writes the line.

    Args:
        read: gives the metrics.
        interval: seconds between lines; 0 = none.
        stream: where to; ``None`` = stderr at that moment.
        clock: seconds.
    """

    def __init__(
        self,
        read: Callable[[], EngineMetrics],
        interval: float = INTERVAL,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._read, self._interval, self._stream, self._clock = read, interval, stream, clock
        self._since = clock()
        self._due = self._since + interval if interval > 0 else float("inf")
        self._before: EngineMetrics | None = None

    def tick(self) -> None:
        """To be called after each step: writes the line if it is due, a step ran since the last one, and no line is open (see
        :func:`keep_off`)."""
        now = self._clock()
        if now < self._due or (_line_open is not None and _line_open()):
            return
        after, before = self._read(), self._before
        if after.totals["steps"] > (0 if before is None else before.totals["steps"]):
            print(line(before, after, now - self._since), file=self._stream or sys.stderr, flush=True)
        self._before, self._since, self._due = after, now, now + self._interval


def line(before: EngineMetrics | None, after: EngineMetrics, seconds: float) -> str:
    """What happened between two snapshots (``before`` = ``None``: since the start), on one line; what did not happen is left out."""

    def since(name: str) -> int:
        return after.totals[name] - (before.totals[name] if before is not None else 0)

    kinds = [f"{kind} {n}" for kind in ("decode", "mixed", "prefill", "dummy") if (n := since(f"{kind}_steps"))]
    waits = [f"{n} for {reason}" for reason, n in after.waiting.items() if n and reason not in ("resources", "preempted")]
    preempted = f" ({after.waiting['preempted']} preempted)" if after.waiting["preempted"] else ""
    pool = after.blocks[0]
    parts = [
        f"{since('steps')} steps ({', '.join(kinds)})",
        f"{since('output_tokens') / seconds:.1f} tok/s out, {since('prefill_tokens') / seconds:.1f} in",
        f"running {after.running}, waiting {after.waiting['resources']}{preempted}",
        *waits,
        f"KV {100 * pool['held'] / max(1, pool['total'] - pool['reserved']):.0f} % held",
    ]
    for name in ("graphs", "prompt_graphs"):
        if counts := getattr(after, name):
            earlier = {} if before is None else getattr(before, name)
            parts.append(f"{name.replace('_', ' ')} {counts['replays'] - earlier.get('replays', 0)}")
    if asked := since("asked_tokens"):
        parts.append(f"hits {100 * since('hit_tokens') / asked:.0f} %")
    if since("preemptions"):
        parts.append(f"preempted {since('preemptions')} ({since('swapped_out')} swapped)")
    if since("drafted"):
        parts.append(f"drafts {100 * since('accepted') / since('drafted'):.0f} % of {since('drafted')}")
    if since("failed_steps"):
        parts.append(f"{since('failed_steps')} failed")
    if sum(after.device_time.counts):
        parts.append(
            f"device {after.device_time.mean_ms:.2f} ms a step, bubble {100 * after.bubble:.1f} %, host hidden {100 * after.overlap:.0f} %"
        )
    return "deepinfer: " + " · ".join(parts)


def trace_file() -> Path:
    """Where a trace goes that nobody named: the working directory, under the process's number."""
    return Path(f"deepinfer-trace-{os.getpid()}.json")


class StepTrace:
    """A torch profiler trace of the next steps, in Chrome's format.

    Args:
        steps: how many.
        path: the file, replaced if it is there.
        device: also records the kernels of a GPU.
    """

    def __init__(self, steps: int, path: Path, device: torch.device) -> None:
        self.left, self.path, self._cuda = steps, path, device.type == "cuda"
        self._profiler: torch.profiler.profile | None = None

    def begin(self) -> None:
        """Before a step; the first one starts the profiler."""
        if self._profiler is not None:
            return
        import torch
        from torch.profiler import ProfilerActivity

        if not self._cuda:
            # Kineto looks for GPUs all the same, and writes on stderr what it did not find.
            os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._cuda else [])]
        # The device half of a step runs on a thread of its own on a CPU.
        everywhere = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
        self._profiler = torch.profiler.profile(activities=kinds, experimental_config=everywhere)
        self._profiler.start()

    def end(self, completed: int) -> bool:
        """After a turn of the loop that completed some steps; true once the file is written."""
        self.left -= completed
        if self.left > 0:
            return False
        self.stop()
        return True

    def stop(self) -> None:
        """Writes what there is, also when fewer steps came; without a step there is no file."""
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            return
        profiler.stop()
        profiler.export_chrome_trace(str(self.path))
        print(f"deepinfer: trace of the steps written to {self.path}", file=sys.stderr, flush=True)
