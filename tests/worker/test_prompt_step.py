"""What the host writes for a step with prompts as a graph: rows, padding and units are those of the step launched one by one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from deepinfer.kernels.paged_attention.units import most_units, step_units, unit_arrays
from deepinfer.models.base import PromptRows
from deepinfer.worker.prompt_step import PromptGraphs, PromptLayout, prompt_buckets
from deepinfer.worker.step import Step
from deepinfer.worker.step_ring import H_KIND, H_ROWS, H_SEQS, H_UNRESOLVED, KIND_DECODE, KIND_MIXED, StepRing
from graphs_kit import Recorded

ROWS, SEQS, SLOTS, NEWEST = 200, 9, 12, 16
CPU = torch.device("cpu")


def counts_of(rng: np.random.Generator) -> list[int]:
    """Rows of each sequence of some step."""
    counts = [1] * int(rng.integers(0, 5)) + [int(n) for n in rng.integers(1, 50, rng.integers(1, 4))]
    return counts if sum(counts) <= ROWS else counts[:1]


def test_there_are_never_more_units_than_are_counted_with() -> None:
    rng = np.random.default_rng(1)
    for _ in range(500):
        counts, tokens = rng.integers(1, 1 + rng.choice([1, 2, 30, 300]), rng.integers(1, 40)), int(rng.choice([1, 2, 9, 21, 64]))
        borders = np.concatenate(([0], np.cumsum(counts)))
        first, count, sequence = unit_arrays(borders, tokens)
        assert len(first) == len(count) == len(sequence) <= most_units(int(borders[-1]), len(counts), tokens)
    assert most_units(8, 8, 4) == 8 and len(unit_arrays(range(9), 4)[0]) == 8, "the bound is met"


class _Model:
    """Notes the rows that it is given."""

    vocab_size = max_position = 8

    def __init__(self) -> None:
        self.seen: list[PromptRows] = []

    def prompt_step(self, rows: PromptRows, kv: dict[str, torch.Tensor]) -> torch.Tensor:
        parts = {name: [t.clone() for t in v] if isinstance(v, list) else v.clone() for name, v in vars(rows).items()}
        self.seen.append(PromptRows(**parts))
        return rows.ids[:, None].float()


class _Graphs:
    """Graphs of a ring that the test fills."""

    def __init__(self, buckets: list[int], unit_rows: int) -> None:
        layout = [("header", 64), *((name, ROWS) for name in ("ids", "pos", "slots0", "slots1"))]
        layout += [("cu_q", SEQS + 1), *((name, SEQS) for name in ("state_row", "prev_seq")), ("tokens", SEQS), ("accepted", SEQS)]
        placed = PromptLayout(buckets, 2, SEQS, unit_rows)
        self.ring = StepRing(layout, [("source_row", SEQS)], CPU, False, copied=True, back=placed.fields)
        self.model, self.newest = _Model(), torch.zeros(NEWEST, dtype=torch.int32)
        table = torch.arange(SLOTS * 3, dtype=torch.int32).view(SLOTS, 3)
        model: Any = self.model
        self.graphs = PromptGraphs(model, buckets, placed, self.ring, table, {}, self.newest, Recorded(), CPU)
        self.graphs.record()
        self.turn = 0

    def step(self, counts: list[int], rng: np.random.Generator, unresolved: bool, kind: int = KIND_MIXED, before: Any = None) -> Step:
        """A step planned into the next slot: sequences of ``counts`` rows, of which some take their first id from ``before``."""
        self.turn = (self.turn + 1) % 3
        slot, rows, n = self.ring.slots[self.turn], sum(counts), len(counts)
        a = slot.a
        a["header"][:] = 0
        a["header"][[H_KIND, H_ROWS, H_SEQS, H_UNRESOLVED]] = kind, rows, n, int(unresolved)
        a["cu_q"][: n + 1] = np.concatenate(([0], np.cumsum(counts)))
        a["ids"][:rows], a["pos"][:rows] = rng.integers(1, 99, rows), rng.integers(0, 500, rows)
        for j in range(2):
            a[f"slots{j}"][:rows] = rng.integers(-1, 50, rows)
        a["state_row"][:n] = rng.permutation(SLOTS)[:n]
        a["prev_seq"][:n], a["source_row"][:n] = -1, rng.integers(0, NEWEST, n)
        if unresolved:
            drawn = rng.random(n) < 0.6
            a["prev_seq"][:n] = np.where(drawn, 0, -1)
            a["ids"][a["cu_q"][:n][drawn]] = -1
        step = Step(self.turn, slot, before)
        step.prompts = self.graphs.bucket(step)
        return step

    def replay(self, step: Step) -> tuple[PromptRows, torch.Tensor]:
        """What the model is given, and what the step gets."""
        self.graphs.fill(step)
        step.slot.upload()
        hidden = self.graphs.replay(step)
        return self.model.seen[-1], hidden


@pytest.mark.parametrize("unit_rows", [1, 3, 21, 64])
def test_rows_and_units_are_those_of_the_step(unit_rows: int) -> None:
    rng = np.random.default_rng(unit_rows)
    made = _Graphs([4, 20, 64, ROWS], unit_rows)
    assert [len(rows.ids) for rows in made.model.seen] == [ROWS, 64, 20, 4] and not any(rows.unit_count.any() for rows in made.model.seen)
    for turn in range(150):
        counts, unresolved = counts_of(rng), bool(turn % 3)
        tokens = torch.from_numpy(rng.integers(100, 200, NEWEST).astype(np.int32))
        before: Any = SimpleNamespace(left=SimpleNamespace(tokens=made.newest if turn % 2 else tokens), ticket=None, waited=True)
        if turn % 2:
            made.newest.copy_(tokens)
        step = made.step(counts, rng, unresolved, before=before)
        total, a = sum(counts), step.slot.a
        assert step.prompts == min(b for b in made.graphs.buckets if b >= total)
        rows, hidden = made.replay(step)
        want_ids = a["ids"][:total].copy()
        if unresolved:
            for i in np.flatnonzero(a["prev_seq"][: len(counts)] >= 0):
                want_ids[a["cu_q"][i]] = tokens[a["source_row"][i]]
        assert (want_ids > 0).all() and rows.ids.tolist() == [*want_ids.tolist(), *[0] * (step.prompts - total)]
        assert rows.pos.tolist() == [*a["pos"][:total].tolist(), *[0] * (step.prompts - total)]
        for j, slots in enumerate(rows.slots):
            assert slots.tolist() == [*np.maximum(a[f"slots{j}"][:total], 0).tolist(), *[0] * (step.prompts - total)]
        assert torch.equal(hidden, torch.from_numpy(want_ids)[:, None].float())
        wanted = step_units(rows.block_table[a["state_row"][: len(counts)]], rows.pos[:total], a["cu_q"][: len(counts) + 1], unit_rows)
        used = len(wanted.first)
        assert len(rows.unit_count) == most_units(step.prompts, SEQS, unit_rows) and not rows.unit_count[used:].any()
        assert torch.equal(rows.unit_first[:used], wanted.first) and torch.equal(rows.unit_count[:used], wanted.count)
        state_row = torch.from_numpy(a["state_row"].astype(np.int64))
        assert torch.equal(rows.unit_row[:used], state_row[wanted.row])
        assert (rows.unit_first.dtype, rows.unit_count.dtype, rows.unit_row.dtype) == (torch.int32, torch.int32, torch.int64)
    assert made.graphs.counts() == {"buckets": 4, "replays": 150}


def test_other_steps_are_none() -> None:
    rng = np.random.default_rng(0)
    made = _Graphs([4, 20], 8)
    assert made.step([20], rng, False).prompts == 20 and made.step([1, 3], rng, False).prompts == 4
    assert made.step([21], rng, False).prompts == 0
    assert made.step([1, 1], rng, False, KIND_DECODE).prompts == 0
    step = made.step([1, 1], rng, False)
    for change in ({"draft_rows": 1}, {"rows": 0}):
        step.header = made.step([1, 1], rng, False).header._replace(**change)
        assert made.graphs.bucket(step) == 0


def test_a_model_without_them() -> None:
    assert prompt_buckets(_Model(), 20) == []  # type: ignore[arg-type]
