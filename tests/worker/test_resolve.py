"""What the device fills in equals what the host would have written had it known."""

from __future__ import annotations

import random

import pytest
import torch

from deepinfer.worker.resolve import SlotMap, StepRows, StepTokens, kv_slots, resolve

MAPS = [SlotMap(0, 8, 8), SlotMap(0, 8, 4), SlotMap(6, 4, 4)]  # two sources of one group, and a second group with smaller pages


def slots_of(positions: list[int], tables: list[list[int]]) -> list[list[int]]:
    """The definition, position by position."""
    found = []
    for of in MAPS:
        ratio = of.page_tokens // of.entries
        found.append(
            [
                t[of.column + p // of.page_tokens] * of.entries + p % of.page_tokens // ratio if (p + 1) % ratio == 0 else -1
                for p, t in zip(positions, tables, strict=True)
            ]
        )
    return found


@pytest.mark.parametrize("seed", range(12))
def test_any_accept_pattern_gives_the_rows_of_a_host_that_knew(seed: int, device: str) -> None:
    rng = random.Random(seed)
    n_before, tokens, sample_off, accepted = rng.randint(2, 6), [], [0], []
    for _ in range(n_before):  # the preceding step: some sequences do not sample, others have drafts
        rows = rng.choice((0, 1, 1, 3, 4))
        tokens += [rng.randrange(10, 100) for _ in range(rows)]
        sample_off.append(len(tokens))
        accepted.append(rng.randint(1, rows) if rows else 0)
    sampled = [i for i in range(n_before) if accepted[i]]
    going_on = rng.sample(sampled, rng.randint(0, len(sampled)))
    planned: dict[str, list[int]] = {k: [] for k in ("ids", "pos", "seq_len", "rng_pos", "prev_seq", "source")}
    truth: dict[str, list[int]] = {k: [] for k in ("ids", "pos", "seq_len", "rng_pos")}
    cu_q, now_off, row_tables, table = [0], [0], [], []
    new = [-1] * rng.randint(0 if going_on else 1, 2)
    order = [*going_on, *new]
    rng.shuffle(order)
    for prev in order:
        pages = [rng.randrange(1, 50) for _ in range(6 + 12)]
        table.append(pages)
        rows = rng.choice((1, 1, 2, 4))
        start = rng.randrange(8, 30)  # where its rows begin if everything in flight is kept
        short = 0 if prev < 0 else sample_off[prev + 1] - sample_off[prev] - accepted[prev]
        for nth in range(rows):
            draft = rng.randrange(10, 100)
            if nth == 0 and prev >= 0:
                planned["ids"].append(-rng.randint(1, 9))  # any placeholder
                truth["ids"].append(tokens[sample_off[prev] + accepted[prev] - 1])
            else:
                planned["ids"].append(draft)
                truth["ids"].append(draft)
            planned["pos"].append(start + nth)
            truth["pos"].append(start + nth - short)
            planned["rng_pos"].append(start + nth + 1)
            truth["rng_pos"].append(start + nth + 1 - short)
            row_tables.append(pages)
        planned["seq_len"].append(start + rows)
        truth["seq_len"].append(start + rows - short)
        planned["prev_seq"].append(prev)
        planned["source"].append(sample_off[prev + 1] - 1)
        cu_q.append(cu_q[-1] + rows)
        now_off.append(cu_q[-1])

    def on(values: object, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    rows_now = StepRows(
        ids=on(planned["ids"], torch.int64),
        pos=on(planned["pos"], torch.int64),
        slots=[on(s, torch.int64) for s in slots_of(planned["pos"], row_tables)],
        seq_len=on(planned["seq_len"], torch.int32),
        rng_pos=on(planned["rng_pos"], torch.int64),
        table=on(table, torch.int32),
    )
    before = StepTokens(on(tokens, torch.int32), on(sample_off, torch.int32), on(accepted, torch.int32))
    offsets = on(cu_q, torch.int32)
    prev_seq, source = on(planned["prev_seq"], torch.int32), on(planned["source"], torch.int32)
    resolve(rows_now, before, prev_seq, source, offsets, on(now_off, torch.int32), MAPS)
    assert rows_now.ids.tolist() == truth["ids"] and rows_now.pos.tolist() == truth["pos"]
    assert rows_now.seq_len.tolist() == truth["seq_len"] and rows_now.rng_pos.tolist() == truth["rng_pos"]
    assert [s.tolist() for s in rows_now.slots] == slots_of(truth["pos"], row_tables)


def test_without_drafts_only_ids_are_filled_in(device: str) -> None:
    pos, slots = torch.tensor([4, 9], device=device), [torch.tensor([4, 9], device=device)]
    rows = StepRows(torch.tensor([-1, -3], device=device), pos, slots, pos, pos, torch.zeros(2, 4, dtype=torch.int32, device=device))
    before = StepTokens(torch.tensor([7, 8, 9], dtype=torch.int32, device=device))
    off = torch.tensor([0, 1, 2], dtype=torch.int32, device=device)
    at = torch.tensor([0, 2], dtype=torch.int32, device=device)
    resolve(rows, before, at, at, off, off, [SlotMap(0, 8, 8)])
    assert rows.ids.tolist() == [7, 9] and rows.ids.dtype == torch.int64
    assert rows.pos is pos and rows.slots is slots and rows.seq_len is pos


@pytest.mark.parametrize("drafted", [False, True])
def test_rows_in_order_are_what_was_drawn_unless_drafts_were(drafted: bool, device: str) -> None:
    def on(*values: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    pos = on(4, 9, dtype=torch.int64)
    rows = StepRows(on(-1, -2), pos, [pos], on(5, 10), pos + 1, torch.ones(2, 4, dtype=torch.int32, device=device))
    tokens = on(7, 8, 9)  # of the third nothing is wanted: its sequence ends
    before = StepTokens(tokens, on(0, 1, 2, 3), on(1, 1, 1)) if drafted else StepTokens(tokens)
    resolve(rows, before, on(0, 1), on(0, 1), on(0, 1, 2), on(0, 1, 2), [SlotMap(0, 8, 8)], in_order=True)
    assert rows.ids.tolist() == [7, 8] and rows.pos.tolist() == [4, 9] and rows.seq_len.tolist() == [5, 10]
    assert (rows.ids.data_ptr() == tokens.data_ptr()) is not drafted


@pytest.mark.parametrize("before", [None, StepTokens(torch.empty(0, dtype=torch.int32))])
def test_after_a_failed_step_ids_are_tokens_of_some_kind(before: StepTokens | None) -> None:
    x = torch.tensor([3])
    rows = StepRows(torch.tensor([-5, 6]), x, [x], x, x, x)
    off = torch.tensor([0, 1, 2])
    resolve(rows, before, torch.tensor([0, -1]), torch.tensor([4, -1]), off, off, [SlotMap(0, 8, 8)])
    assert rows.ids.tolist() == [0, 6]


def test_slots_follow_the_page_table(device: str) -> None:
    table = torch.tensor([[5, 9, 2, 3, 7, 1, 4, 8, 6, 11]], dtype=torch.int32, device=device)
    pos = torch.arange(12, device=device)
    row = torch.zeros_like(pos)
    for of, want in zip(MAPS, slots_of(pos.tolist(), [table[0].tolist()] * 12), strict=True):
        assert kv_slots(pos, table, row, of).tolist() == want
