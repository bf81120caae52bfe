"""Attention of a GPU: right values, and the bits of a row whatever computes it, beside whom, cut where, from which pages."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import attention_kit
from attention_kit import Case, Cases, Kind, differing_ways, in_order, make_case, programs_of, shared_out_up_to, stand_in, wrong
from deepinfer.errors import KernelBuildError
from deepinfer.kernels.paged_attention import make_plan, paged_attention
from deepinfer.kernels.paged_attention.cuda import SPLIT_ROWS, SPLITS, attention_programs, unit_tokens, wide_unit_tokens
from deepinfer.kernels.paged_attention.units import Units, one_row_units, step_units
from deepinfer.kernels.toolchain import Program
from kernel_kit import check_machine_code, read_before_waiting, replayed

# Every pair of: heads of a group 1, 3, 4, 8; pages of 16 … 128 tokens; heads of 64 or 128; windows of none, 100, 4096. Then odd groups, and
# kinds whose single rows are units like others.
KINDS = (
    Kind(2, 2, 64, 16, 0), Kind(3, 3, 128, 32, 100), Kind(2, 2, 64, 64, 4096), Kind(2, 2, 128, 128, 0),
    Kind(9, 3, 128, 16, 100), Kind(9, 3, 64, 32, 4096), Kind(9, 3, 64, 64, 0), Kind(6, 2, 128, 128, 100),
    Kind(8, 2, 128, 16, 4096), Kind(8, 2, 64, 32, 0), Kind(8, 2, 128, 64, 100), Kind(8, 2, 64, 128, 4096),
    Kind(8, 1, 64, 16, 0), Kind(16, 2, 128, 32, 0), Kind(8, 1, 128, 64, 4096), Kind(8, 1, 64, 128, 100),
    Kind(14, 2, 128, 64, 0), Kind(5, 1, 64, 64, 0), Kind(32, 1, 64, 64, 100), Kind(4, 2, 96, 16, 0),
    Kind(64, 1, 128, 64, 0),
)  # fmt: skip
LENGTHS = (1, 63, 64, 65, 127, 128, 129, 255, 256, 257, 1000, 1537)
LONG = 4400  # beyond the window of 4096

# Stand-ins are slow: fewer kinds, shorter sequences.
FEW_KINDS = (Kind(9, 3, 64, 64, 0), Kind(4, 1, 64, 16, 100), Kind(2, 2, 64, 128, 0), Kind(4, 2, 48, 16, 0))
SHORT = (1, 64, 65, 129, 257)

CASES = Cases(FEW_KINDS, KINDS)
PLACES = CASES.places()
FIRST_OF_EACH = [PLACES[0], PLACES[len(FEW_KINDS) + 6]]


@pytest.fixture
def case(place: str, kind: Kind, monkeypatch: pytest.MonkeyPatch) -> Case:
    return CASES.make(place, kind, lengths_of(place, kind), monkeypatch)


def lengths_of(place: str, kind: Kind) -> tuple[int, ...]:
    if place == "stand-in":
        return SHORT
    return (*LENGTHS, LONG) if kind.window == 4096 else LENGTHS


# Values


@pytest.mark.parametrize(("place", "kind"), PLACES)
def test_values(case: Case) -> None:
    """Of the last rows of every length by every kernel, and of all rows of the longest but one."""
    for sequence, length in enumerate(case.lengths):
        first = 0 if sequence == len(case.lengths) - 2 else max(0, length - 70)
        assert not wrong(case, sequence, first, case.whole(sequence, first))
        rows = [(sequence, p) for p in range(first, length)]
        near = max(first, length - SPLIT_ROWS)
        assert not wrong(case, sequence, near, case.singles(rows[near - first :])), "segments shared out"
        with shared_out_up_to(case, 0):
            assert not wrong(case, sequence, first, case.singles(rows)), "rows by themselves"


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [KINDS[6], KINDS[10]], ids=str)
def test_values_in_float16(kind: Kind) -> None:
    case = make_case("cuda", kind, LENGTHS, torch.float16)
    for sequence, length in enumerate(LENGTHS):
        first = max(0, length - 70)
        assert not wrong(case, sequence, first, case.whole(sequence, first))
        near = max(0, length - SPLIT_ROWS)
        assert not wrong(case, sequence, near, case.singles([(sequence, p) for p in range(near, length)]))
    assert differing_ways(case, 8, 100) == []


@pytest.mark.parametrize(("place", "kind"), FIRST_OF_EACH)
def test_a_key_too_many_or_too_few_is_told(case: Case) -> None:
    """The comparison can fail: each row is shifted by one position, or sees one key less."""
    sequence = 3
    good = case.whole(sequence, 0)
    assert not wrong(case, sequence, 0, good)
    assert wrong(case, sequence, 0, good.roll(1, 0))
    length = case.lengths[sequence]
    short = make_case(case.q.device.type if case.q.is_cuda else "stand-in", case.kind, case.lengths)
    page, entry = divmod(length - 2, case.kind.page_tokens)
    short.k[int(short.table[sequence, page]), entry] += 0.5
    assert wrong(case, sequence, 0, short.whole(sequence, 0))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [KINDS[6], KINDS[9]], ids=str)
def test_values_are_near_the_reference_operator(kind: Kind) -> None:
    """The operator's own reference, in float32."""
    case = make_case("cuda", kind, LENGTHS, garbage=0.0)
    sequences = range(len(LENGTHS))
    position = torch.tensor([n - 1 for n in LENGTHS], device="cuda")
    q = torch.stack([case.q[case.starts[s] + LENGTHS[s] - 1] for s in sequences])
    plan = make_plan(position, case.table, list(range(len(LENGTHS) + 1)), list(LENGTHS), len(LENGTHS), kind.page_tokens, 1)
    want = paged_attention(q, case.k, case.v, plan, kind.head_dim**-0.5, kind.window or None)
    got = case.singles([(s, LENGTHS[s] - 1) for s in sequences])
    torch.testing.assert_close(got.float(), want, rtol=2**-7, atol=2**-7)


# Bits


@pytest.mark.parametrize(("place", "kind"), PLACES)
def test_every_way_to_a_row_gives_its_bits(case: Case) -> None:
    """Alone, persistent, split and added, in units of many rows, cut anywhere, backwards, among mates."""
    for sequence, length in enumerate(case.lengths):
        # all rows of one sequence, of the others those around their last boundary
        first = 0 if length == 257 else max(0, length - 40)
        cuts = attention_kit.CUTS if length in (1, 257) else (1, 7)
        assert differing_ways(case, sequence, first, cuts) == [], f"{length} tokens from {first} on"


def test_an_order_that_follows_the_batch_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: where segments are shared out they are added from the last one on."""
    stand_in(monkeypatch, lambda parts: in_order(parts[::-1]))
    case = make_case("stand-in", FEW_KINDS[0], SHORT)
    assert {way.split(",")[0] for way in differing_ways(case, 4, 0)} == {"segments shared out"}
    assert not wrong(case, 4, 250, case.singles([(4, p) for p in range(250, 257)])), "as right as any other order"


@pytest.mark.parametrize(("place", "kind"), PLACES)
def test_pages_and_what_lies_around_the_sequences_do_not_matter(case: Case) -> None:
    """Page numbers; the null page, entries behind the newest key, other people's pages."""
    sequence = len(case.lengths) - 1 if case.q.is_cuda else 4
    first = max(0, case.lengths[sequence] - 60)
    want = case.whole(sequence, first)
    assert want.isfinite().all()
    rows = [(sequence, p) for p in range(case.lengths[sequence] - 20, case.lengths[sequence])]
    for seed, garbage in enumerate((torch.nan, 0.0, torch.inf, -3e38, 3e38)):
        other = case.moved(seed, garbage)
        assert torch.equal(other.whole(sequence, first), want), garbage
        assert torch.equal(other.singles(rows), want[-20:]), garbage
        assert torch.equal(other.pieces([(sequence, rows[-7][1], case.lengths[sequence])])[0], want[-7:]), garbage


@pytest.mark.parametrize(("place", "kind"), FIRST_OF_EACH)
@pytest.mark.parametrize("rows", [3, 20])
def test_padding_rows_do_not_matter(case: Case, rows: int) -> None:
    """Rows as graphs pad a step with: position 0 of the null page, here full of NaN, queries of NaN; before and behind the others."""
    sequence = case.lengths.index(257)
    position = torch.arange(257 - rows, 257, device=case.q.device)
    q = case.q[case.starts[sequence] + position]
    want = case.whole(sequence, 257 - rows)
    table = torch.cat((case.table, torch.zeros_like(case.table[:1])))
    for before, behind in ((0, 5), (5, 0), (2, 3)):
        pad = [torch.zeros(n, dtype=torch.long, device=case.q.device) for n in (before, behind)]
        pads = [torch.full((n, *q.shape[1:]), torch.nan, dtype=q.dtype, device=q.device) for n in (before, behind)]
        of = torch.cat((pad[0] + len(case.lengths), torch.full_like(position, sequence), pad[1] + len(case.lengths)))
        units = one_row_units(table, torch.cat((pad[0], position, pad[1])), of)
        got = case.run(torch.cat((pads[0], q, pads[1])), units)
        assert torch.equal(got[before : before + rows], want)


@pytest.mark.parametrize(("place", "kind"), FIRST_OF_EACH)
def test_rows_in_no_unit_are_not_written(case: Case) -> None:
    """Units of 0 rows are skipped, and units may be as short as anybody likes."""
    sequence, rows, device = case.lengths.index(257), 48, case.q.device
    position = torch.arange(257 - rows, 257, device=device)
    q = case.q[case.starts[sequence] + position]
    want = case.whole(sequence, 257 - rows)
    # rows 0-2 and 40-47 in none; the others in units of 1, 7 and as many as one may have
    borders = [3, 4, 11, min(40, 11 + case.attention.tokens)]
    while borders[-1] < 40:
        borders.append(min(40, borders[-1] + case.attention.tokens))
    first = [0, *borders[:-1], 5]
    count = [0, *np.diff(borders).tolist(), 0]
    units = Units(
        case.table,
        position,
        torch.tensor(first, dtype=torch.int32, device=device),
        torch.tensor(count, dtype=torch.int32, device=device),
        torch.full((len(first),), sequence, device=device),
    )
    got = case.run(q, units)
    assert torch.equal(got[3:40], want[3:40]) and got[:3].isnan().all() and got[40:].isnan().all()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [KINDS[6], KINDS[8]], ids=str)
def test_overlapping_and_captured_launches_give_the_bits_of_separate_ones(kind: Kind) -> None:
    """A chain in which each launch's queries are what the one before wrote, of the kernels in turn."""
    case = make_case("cuda", kind, LENGTHS)
    steps = []
    for count in (5, 40):
        of = torch.tensor([i % len(LENGTHS) for i in range(count)], device="cuda")
        position = torch.tensor([LENGTHS[i % len(LENGTHS)] - 1 - i // len(LENGTHS) for i in range(count)], device="cuda").clamp(min=0)
        steps.append(one_row_units(case.table, position, of))
    steps.append(step_units(case.table[8:11], torch.arange(200, 240, device="cuda"), [0, 15, 16, 40], case.attention.tokens))
    both = torch.zeros((2, 40, kind.heads, kind.head_dim), dtype=torch.bfloat16, device="cuda")

    def chain(apart: bool = False) -> None:
        torch.mul(case.q[:40], 1, out=both[0])
        both[1].zero_()
        for turn in range(12):
            units = steps[turn % 3]
            q, out = both[turn % 2], both[(turn + 1) % 2]
            case.attention(q[: len(units.position)], case.k, case.v, units, out[: len(units.position)])
            if apart:
                torch.cuda.synchronize()

    case.attention._scratch.reserve(case.table.shape[1] * kind.page_tokens)
    chain(apart=True)
    want = both.clone()
    assert want.isfinite().all() and bool((want != 0).any())
    for _ in range(3):
        chain()
        assert torch.equal(both, want)
    replay = replayed(chain)
    both.zero_()
    replay()
    assert torch.equal(both, want)


# What needs no kernel


def test_units_hold_every_row_once() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        counts = rng.integers(0, 40, rng.integers(1, 9)) * rng.integers(0, 2, 1) + rng.integers(1, 3)
        counts[rng.integers(0, len(counts))] += rng.integers(0, 200)
        tokens = int(rng.choice([1, 8, 9, 21, 64]))
        borders = np.concatenate(([0], np.cumsum(counts))).tolist()
        total = int(borders[-1])
        units = step_units(torch.zeros((len(counts), 4), dtype=torch.int32), torch.zeros(total, dtype=torch.long), borders, tokens)
        assert not units.single
        assert (units.first.dtype, units.count.dtype, units.row.dtype) == (torch.int32, torch.int32, torch.int64)
        seen = []
        for first, count, row in zip(units.first.tolist(), units.count.tolist(), units.row.tolist(), strict=True):
            assert 1 <= count <= tokens and borders[row] <= first and first + count <= borders[row + 1]
            assert (first - borders[row]) % tokens == 0, "units of a chunk are full but for its last"
            seen += range(first, first + count)
        assert sorted(seen) == list(range(total))
        depth = [(f - borders[r]) // tokens for f, r in zip(units.first.tolist(), units.row.tolist(), strict=True)]
        assert depth == sorted(depth, reverse=True), "those that see most keys begin first"


def test_sequences_without_rows_have_no_unit() -> None:
    units = step_units(torch.zeros((3, 1), dtype=torch.int32), torch.zeros(5, dtype=torch.long), [0, 2, 2, 5], 8)
    assert sorted(zip(units.first.tolist(), units.count.tolist(), units.row.tolist(), strict=True)) == [(0, 2, 0), (2, 3, 2)]


def test_single_rows_are_units_in_order() -> None:
    table, position, row = torch.zeros((4, 2), dtype=torch.int32), torch.arange(5), torch.tensor([3, 1, 1, 0, 2])
    units = one_row_units(table, position, row)
    assert units.single and units.row is row and units.position is position
    assert units.first.tolist() == [0, 1, 2, 3, 4] and units.count.tolist() == [1] * 5
    counting = torch.arange(5, dtype=torch.int32), torch.ones(5, dtype=torch.int32)
    again = one_row_units(table, position, row, counting)
    assert again.first is counting[0] and again.count is counting[1]


def test_a_unit_fits_a_block() -> None:
    for group in range(1, 65):
        assert 1 <= unit_tokens(2 * group, 2) <= 64 and unit_tokens(2 * group, 2) * group <= 64
        assert 1 <= wide_unit_tokens(2 * group, 2, 128) <= 128 and wide_unit_tokens(2 * group, 2, 128) * group <= 128
    assert wide_unit_tokens(8, 2, 64) == 32 and not wide_unit_tokens(8, 2, 96) and not wide_unit_tokens(8, 2, 128, fp8=True)


def test_what_no_kernel_has_a_form_for_is_refused() -> None:
    assert attention_programs(64, 1, 128, 16, 0, "bfloat16")
    with pytest.raises(KernelBuildError, match="65 query heads of a KV head"):
        attention_programs(65, 1, 128, 16, 0, "bfloat16")
    for head_dim, page_tokens in ((128, 48), (128, 96), (64, 96)):
        with pytest.raises(KernelBuildError, match=f"pages of {page_tokens} tokens"):
            attention_programs(8, 2, head_dim, page_tokens, 0, "bfloat16")


def test_few_rows_have_their_segments_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is launched, by the number of rows and who they are; room for partial results grows with the table."""
    stand_in(monkeypatch)
    case = make_case("stand-in", FEW_KINDS[2], (2 * SPLIT_ROWS, 300))
    launched: list[tuple[str, tuple[int, ...]]] = []
    for name in ("_units", "_wide", "_single", "_split", "_add"):
        kernel = getattr(case.attention, name)

        class Noted:
            def launch(self, grid: tuple[int, ...], *args: object, kernel: object = kernel, name: str = name) -> None:
                launched.append((name, grid))
                kernel.launch(grid, *args)  # type: ignore[attr-defined]

        monkeypatch.setattr(case.attention, name, Noted())
    assert case.scratch.segments == 1
    case.singles([(1, 299)] * SPLIT_ROWS)
    case.singles([(0, 31)])
    room = case.table.shape[1] * case.kind.page_tokens
    assert case.scratch.segments == -(-room // 128) == 4
    assert launched == [("_split", (16 * 2 * SPLITS,)), ("_add", (16, 2)), ("_split", (2 * SPLITS,)), ("_add", (1, 2))]
    launched.clear()
    case.pieces([(0, 0, 1)])
    case.pieces([(0, 0, 2 * SPLIT_ROWS), (1, 0, 65)])
    case.pieces([(0, 0, 2 * SPLIT_ROWS), (1, 0, 129)], wide=True)
    case.singles([(1, 299)] * (SPLIT_ROWS + 1))
    # as many blocks as the stand-in's 4 multiprocessors hold
    assert launched == [("_units", (1, 2)), ("_units", (3, 2)), ("_wide", (3, 2)), ("_single", (8,))]


# Machine code


def read_early(program: Program) -> set[str]:
    """What a kernel reads before it waits: the older keys of single rows, and where they are."""
    return {"k", "v", "table", "position", "table_row"} if program.factory == "decode_attention" else set()


@pytest.mark.parametrize("kind", [KINDS[0], KINDS[6]], ids=str)
def test_machine_code(kind: Kind, tmp_path: Path) -> None:
    """Of one query head a KV head, whose queries are fewer than a block's threads, and of three."""
    for program in programs_of(kind)[1:]:
        check_machine_code(program, tmp_path, blocks=1 if program.factory == "wide_attention" else 2)
        assert read_before_waiting(program) == read_early(program)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_machine_code_of_all(kind: Kind, tmp_path: Path) -> None:
    for program in programs_of(kind):
        check_machine_code(program, tmp_path, blocks=1 if program.factory == "wide_attention" else 2)
        assert read_before_waiting(program) == read_early(program)


def test_a_table_cut_to_the_longest_sequence_is_read_by_its_own_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step's table is a slice: kernels are told how far its rows lie apart, not how long they are."""
    stand_in(monkeypatch)
    case = make_case("stand-in", FEW_KINDS[0], (200, 300, 64))
    assert case.table.stride(0) > case.table.shape[1]
    told: list[int] = []
    for name, place in (("_units", 10), ("_wide", 11), ("_single", 10), ("_split", 11)):
        kernel = getattr(case.attention, name)

        class Noted:
            def launch(self, grid: tuple[int, ...], *args: object, kernel: object = kernel, place: int = place) -> None:
                told.append(args[place])  # type: ignore[arg-type]
                kernel.launch(grid, *args)  # type: ignore[attr-defined]

        monkeypatch.setattr(case.attention, name, Noted())
    case.pieces([(0, 0, 200), (1, 100, 300)])
    case.pieces([(0, 0, 200), (1, 100, 300)], wide=True)
    case.singles([(1, 299), (2, 63)])
    with shared_out_up_to(case, 0):
        case.singles([(1, 299), (2, 63)])
    assert len(told) == 4 and all(width > case.table.shape[1] for width in told)
