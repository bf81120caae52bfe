"""The beginning of a decode step against plain loops, over whatever the step before it left in the same memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from deepinfer.kernels.begin_step import DecodeFields, StepWords, begin_step
from deepinfer.kernels.begin_step.words import DELTAS, HEAD, IDS, ROWS, SEQ_LEN, SLOTS, SOURCE, TABLE_ROW
from deepinfer.worker.sync_guard import forbid_device_sync
from fake_cuda import watched_cuda

SEQS, COLUMNS = 20, 7


@dataclass
class Case:
    """One step's words, made at random, with garbage where they say nothing."""

    layout: StepWords
    words: torch.Tensor
    rows: int
    deltas: int


def some_step(rng: np.random.Generator, layout: StepWords, rows: int, deltas: int) -> Case:
    words = rng.integers(-(2**31), 2**31, layout.total, dtype=np.int64).astype(np.int32)
    words[:HEAD] = 0
    words[ROWS], words[DELTAS] = rows, deltas
    fields = words[HEAD : layout.first_delta].reshape(layout.num_fields, layout.stride)
    fields[SOURCE, :rows] = rng.integers(-1, SEQS, rows)
    fields[SEQ_LEN, :rows] = rng.integers(1, 10_000, rows)
    fields[IDS:, :rows] = rng.integers(0, 50_000, (layout.num_fields - IDS, rows))
    fields[SLOTS:, :rows] -= 30_000 * (rng.random((layout.maps, rows)) < 0.2)  # some write nothing
    fields[TABLE_ROW, :rows] = 1 + rng.permutation(SEQS)[:rows]
    cells = rng.permutation(SEQS * COLUMNS)[:deltas]
    triples = np.stack([1 + cells // COLUMNS, cells % COLUMNS, rng.integers(1, 999, deltas)], 1)
    words[layout.first_delta :][: 3 * deltas] = triples.reshape(-1)
    return Case(layout, torch.from_numpy(words), rows, deltas)


def expected(case: Case, newest: torch.Tensor, table: torch.Tensor, bucket: int) -> tuple[list[list[int]], list[int], torch.Tensor]:
    """Rows of ``wide``, lengths, and the table."""
    table = table.clone()
    for row, column, page in case.layout.deltas(case.words)[: case.deltas].tolist():
        table[row, column] = page
    fields = case.layout.fields(case.words)
    wide = [[0] * bucket for _ in range(case.layout.num_fields - IDS)]
    lengths = [1] * bucket
    for i in range(case.rows):
        source = int(fields[SOURCE, i])
        for field in range(IDS, case.layout.num_fields):
            wide[field - IDS][i] = max(0, int(fields[field, i]))
        if source >= 0:
            wide[0][i] = int(newest[source])
        lengths[i] = int(fields[SEQ_LEN, i])
    return wide, lengths, table


@pytest.mark.parametrize("maps", [1, 3])
@pytest.mark.parametrize("pages", [1, 3])
def test_rows_padding_tokens_and_table(maps: int, pages: int, device: str) -> None:
    rng = np.random.default_rng(maps + 10 * pages)
    layout = StepWords(SEQS, maps, SEQS * pages)
    assert layout.stride % 16 == 0 and layout.total == HEAD + (SLOTS + maps) * layout.stride + 3 * SEQS * pages
    to = DecodeFields.make(layout, torch.device(device))
    table = torch.zeros((SEQS + 1, COLUMNS), dtype=torch.int32)
    table[1:] = torch.from_numpy(rng.integers(1, 999, (SEQS, COLUMNS)).astype(np.int32))
    on_device = table.to(device)
    for bucket in (1, 2, 8, 20, 16, 5):
        for rows in {0, 1, bucket // 2, bucket}:
            case = some_step(rng, layout, rows, int(rng.integers(0, bucket * pages + 1)))
            newest = torch.from_numpy(rng.integers(0, 50_000, layout.stride).astype(np.int32))
            wide, lengths, table = expected(case, newest, table, bucket)
            before = to.wide.clone()
            begin_step(case.words.to(device), layout, newest.to(device), on_device, to, bucket, bucket * pages)
            assert to.wide[:, :bucket].tolist() == wide and to.seq_len[:bucket].tolist() == lengths
            assert torch.equal(to.wide[:, bucket:], before[:, bucket:])
            assert torch.equal(on_device.cpu(), table) and not on_device[0].any()


def test_no_deltas_are_stored_where_there_is_room_for_none() -> None:
    layout = StepWords(SEQS, 1, SEQS)
    case = some_step(np.random.default_rng(0), layout, 3, 3)
    table = torch.zeros((SEQS + 1, COLUMNS), dtype=torch.int32)
    begin_step(case.words, layout, torch.zeros(SEQS, dtype=torch.int32), table, DecodeFields.make(layout, torch.device("cpu")), 4, 0)
    assert not table.any()


@pytest.fixture(params=["fake", pytest.param("gpu", marks=pytest.mark.gpu)])
def guard(request: pytest.FixtureRequest) -> Iterator[Any]:
    with watched_cuda(request.param):
        yield


def test_nothing_waits(guard: None) -> None:
    device = torch.device("cuda")
    layout = StepWords(SEQS, 2, SEQS)
    to = DecodeFields.make(layout, device)
    words = torch.zeros(layout.total, dtype=torch.int32, device=device)
    table = torch.zeros((SEQS + 1, COLUMNS), dtype=torch.int32, device=device)
    with forbid_device_sync():
        begin_step(words, layout, torch.zeros(SEQS, dtype=torch.int32, device=device), table, to, 8, 8)
    assert to.wide.shape == (5, 32) and to.wide.dtype == torch.int64
