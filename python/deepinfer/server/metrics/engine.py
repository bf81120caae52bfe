"""The engine's snapshot as Prometheus metrics.

Owns: the name, kind and help of everything in `EngineMetrics`. Never touches: how it is counted, or when it is asked for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from deepinfer import _core
from deepinfer.engine.step_log import EngineMetrics, Times

PREFIX = "deepinfer:"
LABELS = ("model_name", "engine")

COUNTERS = {
    "steps": "steps planned",
    "idle_plans": "plans that had nothing to run",
    "prefill_tokens": "rows of prompt chunks computed",
    "recomputed_tokens": "of these, tokens that were computed before and lost to preemption",
    "decode_rows": "rows of decoding sequences, drafts included",
    "drafted": "draft tokens that were verified",
    "accepted": "draft tokens that were accepted",
    "output_tokens": "tokens that the engine made",
    "added": "sequences that the engine took in",
    "admitted": "admissions of sequences, readmissions included",
    "hit_tokens": "prompt tokens of admitted sequences found in the prefix cache",
    "asked_tokens": "prompt tokens of admitted sequences",
    "rerun_tokens": "of models with windows: tokens found in the prefix cache and computed again",
    "fetches": "fetches of blocks begun",
    "fetches_ended": "fetches of blocks ended",
    "fetches_failed": "of these, those of which not all has arrived",
    "fetches_no_room": "fetches refused for want of room",
    "fetches_under_way": "fetches refused because another one was bringing the next block",
    "fetched_tokens": "tokens of fetched blocks that entered the prefix cache",
    "fetch_duplicates": "fetched blocks that somebody else had published meanwhile",
    "fetch_waits_ended": "waits for a fetch that the engine ended",
    "fetch_leases_ended": "waits for a fetch that lasted until their lease ran out",
    "saves_given": "chains of blocks given to be saved",
    "saves_failed": "of these, those that were not saved",
    "saves_lost": "chains that were worth saving and left the cache before anybody took them",
    "snapshots_taken": "snapshots of states taken",
    "snapshots_evicted": "snapshots of states given up for newer ones",
    "slices_gone": "begins at a slice of a state that was gone",
    "swapped_in": "sequences admitted from host memory",
    "swap_out_pages": "pages copied to host memory",
    "swap_in_pages": "pages copied back from host memory",
    "swaps_refused": "victims computed again although swapping was cheaper",
    "row_waits": "rows that waited a step for blocks coming back",
    "ghost_rows": "rows of completed steps whose sequence had ended or lost its lane",
    "forks": "sequences that shared the prompt of another one",
    "kv_leases_ended": "requests that waited for keys and values until their lease ran out",
    "handover_leases_ended": "sequences released because nobody took them over within the lease",
    "failed_steps": "steps that failed",
    "stale": "messages whose sequence was gone",
    "misuse": "calls that a pool refused; anything but 0 is a fault",
    "count_faults": "times that the counts of a pool did not add up; anything but 0 is a fault",
}
"""Totals that are a metric each, ``deepinfer:<name>_total``."""

GAUGES = {
    "running": "sequences that run",
    "decoding": "of these, those past their prompt",
    "swapping_out": "sequences being copied to host memory",
    "swapped": "sequences in host memory",
    "transfers": "open transfers of keys and values",
    "available_blocks": "blocks that could be taken now",
    "last_step": "number of the newest completed step",
}
"""Totals that are states of this moment, ``deepinfer:<name>``."""

ELSEWHERE = frozenset(
    {f"{kind}_steps" for kind in ("decode", "prefill", "mixed", "dummy")}
    | {"waiting", "wait_preempted", "wait_grammar", "wait_kv", "wait_fork", "wait_handover", "preemptions", "swapped_out", "last_step_ns"}
    | {f"finished_{reason}" for reason in ("stop", "length", "abort", "error", "handover")}
    | {f"start_{how}" for how in ("nothing", "snapshot", "slice", "rerun")}
)
"""Totals that are values of a metric with labels."""

_NOW = frozenset({"capacity", "slices", "bytes", "last_step", "balance_ratio", "balance_worst_ratio", "buckets"})
"""Names in the parts of a snapshot that are states of this moment."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The newest snapshot of one engine.

    Attributes:
        metrics: ``None`` before the first one.
        age: of the snapshot, seconds.
        answers: whether the engine answered when it was asked last.
    """

    metrics: EngineMetrics | None
    age: float
    answers: bool = True


def families(model: str, snapshots: Mapping[str, Snapshot]) -> Iterator[Metric]:
    """Everything in the snapshots, by name of the engine."""
    at = [((model, engine), s.metrics) for engine, s in snapshots.items() if s.metrics is not None]
    ages = ((model, engine, s.age) for engine, s in snapshots.items() if s.metrics is not None)
    answers = ((model, engine, s.answers) for engine, s in snapshots.items())
    yield _gauge("engine_answers", "whether the engine answered when it was asked last; else what is told of it is from before", answers)
    yield _gauge("snapshot_age_seconds", "age of what is told of the engine", ages)
    for name, said in COUNTERS.items():
        yield _counter(name, said, ((*labels, m.totals[name]) for labels, m in at))
    for name, said in GAUGES.items():
        yield _gauge(name, said, ((*labels, m.totals[name]) for labels, m in at))
    yield from _queues(at)
    yield from _steps(at)
    yield from _blocks(at)
    yield from _drafts(at)
    yield from _parts(at)


At = Sequence[tuple[tuple[str, str], EngineMetrics]]
Row = tuple[object, ...]


def _fill(family: CounterMetricFamily | GaugeMetricFamily, rows: Iterable[Row]) -> Metric:
    for *labels, value in rows:
        family.add_metric([str(label) for label in labels], float(value))  # type: ignore[arg-type]
    return family


def _counter(name: str, said: str, rows: Iterable[Row], *labels: str) -> Metric:
    return _fill(CounterMetricFamily(PREFIX + name, said, labels=(*LABELS, *labels)), rows)


def _gauge(name: str, said: str, rows: Iterable[Row], *labels: str) -> Metric:
    return _fill(GaugeMetricFamily(PREFIX + name, said, labels=(*LABELS, *labels)), rows)


def _labelled(at: At, values: str) -> Iterator[Row]:
    """A dictionary of the snapshot as rows of one label."""
    return ((*labels, key, value) for labels, m in at for key, value in getattr(m, values).items())


def _queues(at: At) -> Iterator[Metric]:
    def waiting(m: EngineMetrics) -> Mapping[str, int]:
        w = dict(m.waiting)
        return {"resources": max(0, w.pop("resources") - w["preempted"]), **w}

    rows = ((*labels, reason, count) for labels, m in at for reason, count in waiting(m).items())
    yield _gauge("waiting", "sequences that wait, by what for; preempted ones wait for resources again", rows, "reason")
    yield _counter(
        "preemptions", "sequences that lost their blocks to another one, by how they come back", _labelled(at, "preemptions"), "kind"
    )
    ends = [(reason, f"finished_{reason}") for reason in ("stop", "length", "abort", "error", "handover")]
    rows = ((*labels, reason, m.totals[name]) for labels, m in at for reason, name in ends)
    yield _counter("finished", "sequences that ended in the engine, by how", rows, "reason")
    yield _counter("window_starts", "of models with windows: begins of sequences, by what was found", _labelled(at, "starts"), "found")


def _steps(at: At) -> Iterator[Metric]:
    rows = ((*labels, kind, count) for labels, m in at for kind, count in m.steps.items() if kind != "idle")
    yield _counter("steps_by_kind", "steps planned, by kind", rows, "kind")
    yield _counter("prefill_chunk_rows", "prefill rows of steps with chunks", ((*labels, m.chunk_rows) for labels, m in at))
    said = "rows that these steps had for prefill"
    yield _counter("prefill_chunk_budget_rows", said, ((*labels, m.chunk_budget) for labels, m in at))
    rows = ((*labels, f"{tenth / 10:.1f}", count) for labels, m in at for tenth, count in enumerate(m.chunk_fill))
    yield _counter("prefill_chunk_steps", "steps with chunks, by the part of their rows for prefill that was used, from", rows, "fill")
    yield _counter("vote_rounds", "rounds of ranks that step together, by outcome", _labelled(at, "votes"), "outcome")
    yield _counter(
        "vote_second_rounds", "rounds of ranks that step together that took a second one", ((*labels, m.second_rounds) for labels, m in at)
    )
    yield _times("step_device_seconds", "time the device worked on a step", ((labels, m.device_time) for labels, m in at))
    yield _times("step_host_seconds", "time the host worked on a step", ((labels, m.host_time) for labels, m in at))
    said = "time the device stood still although there was work"
    yield _counter("bubble_seconds", said, ((*labels, m.idle_ns / 1e9) for labels, m in at))
    yield _gauge("bubble_ratio", "its part of the device's time since the start", ((*labels, m.bubble) for labels, m in at))
    yield _counter("host_hidden_seconds", "the host's work hidden under the device's", ((*labels, m.hidden_ns / 1e9) for labels, m in at))
    yield _gauge("overlap_ratio", "its part of the host's work since the start", ((*labels, m.overlap) for labels, m in at))


def _times(name: str, said: str, rows: Iterable[tuple[tuple[str, str], Times]]) -> Metric:
    family = HistogramMetricFamily(PREFIX + name, said, labels=LABELS)
    for labels, times in rows:
        sums = list(accumulate(times.counts))
        bounds = [f"{(1024 << i) / 1e9:.9g}" for i in range(len(sums) - 1)] + ["+Inf"]
        family.add_metric(labels, list(zip(bounds, sums, strict=True)), times.sum_ns / 1e9)
    return family


_STATES = ("free", "cached", "held", "parked", "reserved")


def _blocks(at: At) -> Iterator[Metric]:
    groups = [((*labels, str(i)), counts) for labels, m in at for i, counts in enumerate(m.blocks)]
    rows = ((*labels, state, counts[state]) for labels, counts in groups for state in _STATES)  # type: ignore[literal-required]
    yield _gauge("kv_blocks", "blocks of each group of layers, by state", rows, "group", "state")
    said = "part of a group's blocks that sequences or transfers hold"
    yield _gauge("kv_usage_ratio", said, ((*labels, used(counts)) for labels, counts in groups), "group")
    for name, said in _POOLS.items():
        field = "slots" if name == "state_slots" else name
        yield _gauge(name, said, ((*labels, state, getattr(m, field)[state]) for labels, m in at for state in _STATES), "state")
    pools = [((*labels, name), counts) for labels, m in at for name, counts in _pools(m)]
    yield _gauge("pool_fenced", "cached ones of a pool that a step in flight still reads", _one(pools, "cached_fenced"), "pool")
    yield _gauge("pool_held_by_transfers", "held ones of a pool that only transfers hold", _one(pools, "held_by_transfers"), "pool")
    owners = [("sequence", "sequence_refs"), ("transfer", "transfer_refs")]
    rows = ((*labels, owner, counts[key]) for labels, counts in pools for owner, key in owners)  # type: ignore[literal-required]
    yield _gauge("pool_references", "references to what is in a pool, by owner", rows, "pool", "owner")


_POOLS = {
    "state_slots": "slots of state, by state",
    "host_blocks": "blocks in host memory, by state",
    "host_slots": "slots of state in host memory, by state",
    "snapshots": "snapshots of states: cached ones are ready, held ones in use",
}


def _pools(m: EngineMetrics) -> Iterator[tuple[str, _core.PoolCounts]]:
    for i, counts in enumerate(m.blocks):
        yield f"kv_blocks_{i}", counts
    yield from (("state_slots", m.slots), ("host_blocks", m.host_blocks), ("host_slots", m.host_slots), ("snapshots", m.snapshots))


def _one(pools: Sequence[tuple[tuple[str, ...], _core.PoolCounts]], key: str) -> Iterator[Row]:
    return ((*labels, counts[key]) for labels, counts in pools)  # type: ignore[literal-required]


def used(counts: _core.PoolCounts) -> float:
    """Part of a pool that is held."""
    return counts["held"] / max(1, counts["total"] - counts["reserved"])


def _drafts(at: At) -> Iterator[Metric]:
    for name, field, said in (
        ("drafts_at_position", "drafts_asked", "drafts that stood at each position, counted from 1"),
        ("drafts_accepted_at_position", "drafts_taken", "drafts that were accepted at each position"),
    ):
        rows = ((*labels, i + 1, count) for labels, m in at for i, count in enumerate(getattr(m, field)))
        yield _counter(name, said, rows, "position")
    said = "drafts accepted of a sequence in one step, of those that had any"
    family = HistogramMetricFamily(PREFIX + "accepted_length", said, labels=LABELS)
    for labels, m in at:
        # How many were longer is known for each length: the drafts taken at the position behind it.
        all_, longer = m.drafts_asked[0], m.drafts_taken
        buckets = [(str(length), float(all_ - longer[length])) for length in range(len(longer))]
        family.add_metric(labels, [*buckets, ("+Inf", float(all_))], m.totals["accepted"])
    yield family


def _parts(at: At) -> Iterator[Metric]:
    """What only some engines have: tables, slices of states, a KV store."""
    for part, prefix, said in (
        ("tables", "table", "rows of tables that the model reads"),
        ("slices", "state_slice", "slices of states"),
        ("store", "kvstore", "the KV store as the engine sees it"),
        ("grammars", "grammar", "masks of answers held to a form"),
        ("group", "rank_group", "being in step with other ranks"),
        ("moe", "moe", "how rows spread over experts"),
        ("graphs", "decode_graph", "decode steps recorded as graphs"),
        ("prompt_graphs", "prompt_graph", "steps with prompts recorded as graphs"),
    ):
        names = dict.fromkeys(name for _, m in at for name in getattr(m, part))
        for name in names:
            rows = ((*labels, getattr(m, part)[name]) for labels, m in at if name in getattr(m, part))
            text = f"{said}: {name.replace('_', ' ')}"
            yield (_gauge if name in _NOW else _counter)(f"{prefix}_{name}", text, rows)
