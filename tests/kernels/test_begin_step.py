"""The beginning of a decode step against plain loops, over whatever the step before it left in the same memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from deepinfer.kernels.begin_step import DecodeFields, StepWords, begin_step, begin_step_on
from deepinfer.kernels.begin_step.cuda import BeginStep
from deepinfer.kernels.begin_step.words import DELTAS, HEAD, IDS, ROWS, SEQ_LEN, SLOTS, SOURCE, TABLE_ROW
from deepinfer.worker.sync_guard import forbid_device_sync
from fake_cuda import watched_cuda
from kernel_kit import PLACES, check_machine_code, device_of, kernels_at, read_before_waiting, replayed

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


def form_of(place: str) -> Callable[..., None]:
    kernels = kernels_at(place, BeginStep.programs())
    if kernels is not None:
        return BeginStep(*kernels)
    found = begin_step_on(device_of(place))
    assert place == "reference" or isinstance(found, BeginStep), "see the warning"
    return found


@pytest.mark.parametrize("maps", [1, 3])
@pytest.mark.parametrize("pages", [1, 3])
@pytest.mark.parametrize("place", PLACES)
def test_rows_padding_tokens_and_table(place: str, maps: int, pages: int) -> None:
    form, device = form_of(place), device_of(place)
    rng = np.random.default_rng(maps + 10 * pages)
    layout = StepWords(SEQS, maps, SEQS * pages)
    assert layout.stride % 16 == 0 and layout.total == HEAD + (SLOTS + maps) * layout.stride + 3 * SEQS * pages
    to = DecodeFields.make(layout, device)
    table = torch.zeros((SEQS + 1, COLUMNS), dtype=torch.int32)
    table[1:] = torch.from_numpy(rng.integers(1, 999, (SEQS, COLUMNS)).astype(np.int32))
    on_device = table.to(device)
    for bucket in (1, 2, 8, 20, 16, 5):
        for rows in {0, 1, bucket // 2, bucket}:
            case = some_step(rng, layout, rows, int(rng.integers(0, bucket * pages + 1)))
            newest = torch.from_numpy(rng.integers(0, 50_000, layout.stride).astype(np.int32))
            wide, lengths, table = expected(case, newest, table, bucket)
            before = to.wide.clone()
            form(case.words.to(device), layout, newest.to(device), on_device, to, bucket, bucket * pages)
            assert to.wide[:, :bucket].tolist() == wide and to.seq_len[:bucket].tolist() == lengths
            assert torch.equal(to.wide[:, bucket:], before[:, bucket:])
            assert torch.equal(on_device.cpu(), table) and not on_device[0].any()


@pytest.mark.parametrize("place", PLACES)
def test_more_rows_than_a_block_has_threads(place: str) -> None:
    form, device = form_of(place), device_of(place)
    layout = StepWords(300, 1, 300)
    rng = np.random.default_rng(5)
    words = torch.zeros(layout.total, dtype=torch.int32)
    words[ROWS], words[DELTAS] = 290, 280
    layout.fields(words)[:, :290] = torch.from_numpy(rng.integers(0, 290, (layout.num_fields, 290)).astype(np.int32))
    layout.fields(words)[SOURCE, ::3] = -1
    layout.deltas(words)[:280] = torch.stack([torch.arange(1, 281), torch.arange(280) % 5, torch.arange(280) + 7], 1).int()
    found = []
    for step, where in ((begin_step, torch.device("cpu")), (form, device)):
        to = DecodeFields.make(layout, where)
        newest, table = torch.arange(1000, 1304, dtype=torch.int32, device=where), torch.zeros((301, 5), dtype=torch.int32, device=where)
        step(words.to(where), layout, newest, table, to, 300, 300)
        found.append([to.wide.cpu(), to.seq_len.cpu(), table.cpu()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True)) and found[0][2].count_nonzero() == 280


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


def test_machine_code(tmp_path: Path) -> None:
    (program,) = BeginStep.programs()
    assert read_before_waiting(program) == set()
    check_machine_code(program, tmp_path)


@pytest.mark.gpu
def test_a_replay_reads_the_words_that_are_there_then() -> None:
    device, layout, rng = torch.device("cuda"), StepWords(SEQS, 1, SEQS), np.random.default_rng(8)
    form, to = form_of("cuda"), DecodeFields.make(layout, device)
    words = torch.zeros(layout.total, dtype=torch.int32, device=device)
    newest = torch.zeros(layout.stride, dtype=torch.int32, device=device)
    table = torch.zeros((SEQS + 1, COLUMNS), dtype=torch.int32, device=device)
    replay = replayed(lambda: form(words, layout, newest, table, to, 16, 16))
    for rows in (16, 3, 0, 9):
        case = some_step(rng, layout, rows, rows)
        newest.random_(0, 50_000)
        wide, lengths, want = expected(case, newest.cpu(), table.cpu(), 16)
        words.copy_(case.words)
        replay()
        assert to.wide[:, :16].tolist() == wide and to.seq_len[:16].tolist() == lengths and torch.equal(table.cpu(), want)
