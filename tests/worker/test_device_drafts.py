"""Drafts between two steps: whose they are, for which position, and which of them run when not all do."""

from __future__ import annotations

import random

import numpy as np
import torch

from deepinfer.worker.device_drafts import DraftTable
from deepinfer.worker.resolve import StepRows

K = 4


def table(device: str, slots: int = 6, temperatures: tuple[float, ...] = ()) -> DraftTable:
    return DraftTable(slots, K, temperatures, torch.device(device))


def put(drafts: DraftTable, device: str, slots: list[int], positions: list[int], confidence: torch.Tensor | None = None) -> torch.Tensor:
    ids = torch.tensor([[100 * slot + k for k in range(K)] for slot in slots], device=device)
    confidence = torch.zeros(len(slots), K) if confidence is None else confidence
    drafts.put(torch.tensor(slots, device=device), torch.tensor(positions, device=device), ids, confidence.to(device))
    return ids


def filled(drafts: DraftTable, device: str, ids: list[int], pos: list[int], slot: list[int]) -> list[int]:
    found: list[int] = drafts.fill(*(torch.tensor(x, device=device) for x in (ids, pos, slot))).tolist()
    return found


def test_a_row_takes_the_draft_for_its_position(device: str) -> None:
    drafts = table(device)
    put(drafts, device, [2, 5], [11, 31])
    ids, pos = [7, -2, -3, -4, 8, -2, 9, 9], [10, 11, 12, 13, 30, 31, 0, 1]
    assert filled(drafts, device, ids, pos, [2] * 4 + [5] * 2 + [1] * 2) == [7, 200, 201, 202, 8, 500, 9, 9]


def test_drafts_for_another_position_or_sequence_are_not_taken(device: str) -> None:
    drafts = table(device)
    put(drafts, device, [2], [11])
    assert filled(drafts, device, [7, -2, -3], [9, 10, 11], [2] * 3) == [7, 0, 0], "the sequence stands elsewhere"
    assert filled(drafts, device, [7, -2, -3], [10, 11, 12], [3] * 3) == [7, 0, 0], "another slot"
    put(drafts, device, [2], [14])
    assert filled(drafts, device, [7, -2], [10, 11], [2] * 2) == [7, 0], "older drafts are gone"
    drafts.forget(torch.tensor([2], device=device))
    assert filled(drafts, device, [7, -2], [13, 14], [2] * 2) == [7, 0], "the slot was given to somebody else"


def chosen_by_hand(survival: list[list[float]], budget: int) -> list[int]:
    """The ``budget`` drafts with the largest survival, earlier places and sequences first among equals."""
    order = sorted((-s, k, i) for i, row in enumerate(survival) for k, s in enumerate(row))
    counts = [0] * len(survival)
    for _, _, i in order[:budget]:
        counts[i] += 1
    return counts


def test_rows_that_run_are_those_most_likely_to_count(device: str) -> None:
    draw = random.Random(4)
    for _ in range(60):
        decodes = draw.randint(1, 5)
        drafted = [draw.randint(0, K) for _ in range(decodes)]
        chunks = [draw.randint(1, 6) for _ in range(draw.randint(0, 2))]
        slots = draw.sample(range(1, 9), decodes + len(chunks))
        starts = [draw.randint(1, 50) for _ in slots]
        known = [draw.random() < 0.8 for _ in range(decodes)]
        temperatures = tuple(draw.choice((0.5, 1.0, 3.0)) for _ in range(K))
        drafts = table(device, 9, temperatures)
        logits = torch.tensor([[float(draw.randint(-6, 6)) / 2 for _ in range(K)] for _ in range(decodes)])
        made = [i for i in range(decodes) if known[i]]
        if made:
            put(drafts, device, [slots[i] for i in made], [starts[i] + 1 for i in made], logits[made])
        counts = [1 + d for d in drafted] + chunks
        cu_q = torch.tensor(np.cumsum([0, *counts]), dtype=torch.int32, device=device)
        pos = torch.tensor([s + j for s, n in zip(starts, counts, strict=True) for j in range(n)], device=device)
        rows = StepRows(pos.clone(), pos, [], torch.zeros(0), torch.zeros(0), torch.zeros(0))
        cut = draw.randint(0, sum(drafted))
        if not cut:
            continue
        got = drafts.choose(rows, cu_q, torch.tensor(slots, device=device), decodes, cut)
        likely = torch.sigmoid(logits / torch.tensor(temperatures))
        survival = []
        for i, count in enumerate(drafted):
            s, row = torch.tensor(1.0), []
            for k in range(count):
                s = s * (likely[i, k] if known[i] else 0.0)
                row.append(float(s))
            survival.append(row)
        lengths = chosen_by_hand(survival, sum(drafted) - cut)
        assert got.lengths.tolist() == lengths
        ran = [1 + n for n in lengths] + chunks
        expected = [int(cu_q[i]) + j for i, n in enumerate(ran) for j in range(n)]
        assert got.rows.tolist() == expected and got.cu_q.tolist() == np.cumsum([0, *ran]).tolist()
        assert got.cuts.tolist() == [a - b for a, b in zip(counts, ran, strict=True)]
        assert got.runs.nonzero().flatten().tolist() == expected
        assert [int(got.place[row]) for row in expected] == list(range(len(expected)))
