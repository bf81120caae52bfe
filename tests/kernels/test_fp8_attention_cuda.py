"""Attention of a GPU over 8-bit keys and values: bit for bit that over wide ones which hold the same numbers, whatever computes a row."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from attention_kit import Case, Cases, Kind, differing_ways, make_case, programs_of, shared_out_up_to, wrong
from deepinfer.errors import KernelBuildError
from deepinfer.kernels.fp8_cache import FP8, CacheScales, decode
from deepinfer.kernels.paged_attention.cuda import PagedAttention, attention_programs, cache_factors
from deepinfer.kernels.paged_attention.units import Units, one_row_units
from kernel_kit import check_machine_code, read_before_waiting, replayed

# Groups of 1, 3, 4, 8 and 5 heads; pages of 16 … 128 tokens; heads of 64, 128 and, by units alone, 96; windows.
KINDS = (
    Kind(2, 2, 64, 16, 0), Kind(9, 3, 64, 64, 0), Kind(9, 3, 64, 32, 100), Kind(8, 2, 128, 64, 0), Kind(8, 2, 128, 16, 100),
    Kind(32, 8, 128, 128, 0), Kind(8, 1, 128, 64, 100), Kind(5, 1, 64, 64, 0), Kind(4, 2, 96, 16, 0),
)  # fmt: skip
LENGTHS = {"stand-in": (1, 64, 129, 257), "cuda": (1, 63, 64, 65, 128, 129, 257, 1000, 1537)}
SCALES = CacheScales(0.037, 0.25)
"""A scale of values by which nothing is rounded, so that answers may be compared to the bit."""

CASES = Cases((Kind(9, 3, 64, 64, 0), Kind(4, 1, 64, 16, 100), Kind(4, 2, 48, 16, 0)), KINDS, SCALES)
PLACES = CASES.places()


@pytest.fixture
def case(place: str, kind: Kind, monkeypatch: pytest.MonkeyPatch) -> Case:
    return CASES.make(place, kind, LENGTHS[place], monkeypatch)


def widened(case: Case, dtype: torch.dtype) -> Case:
    """The same over caches of the run dtype that hold what is stored, with the scale of keys in the scores' factor."""
    kind = case.kind
    sizes = (kind.heads, kind.kv_heads, kind.head_dim, kind.page_tokens, kind.window or None)
    attention = PagedAttention(*sizes, dtype, case.q.device, case.scratch)
    attention._scale *= SCALES.key
    k, v = (decode(x).to(case.q.dtype) for x in (case.k, case.v))
    return replace(case, attention=attention, k=k, v=v, scales=None)


def same(got: torch.Tensor, wide: torch.Tensor) -> bool:
    """Bit for bit ``wide`` times the scale of values, which is rounded again only where it has no normal number: off by the least one."""
    want, numbers = wide * SCALES.value, torch.finfo(wide.dtype)
    small = want.abs() < numbers.tiny
    return torch.equal(got[~small], want[~small]) and bool(((got - want)[small].abs() <= numbers.smallest_normal * numbers.eps).all())


def check_equal(case: Case, dtype: torch.dtype = torch.bfloat16) -> None:
    """Rows around the end of every sequence, by every kernel."""
    wide = widened(case, dtype)
    assert case.k.dtype == FP8 and case.k.nbytes * wide.k.dtype.itemsize == wide.k.nbytes
    for sequence, length in enumerate(case.lengths):
        first = max(0, length - 70)
        rows = [(sequence, p) for p in range(first, length)]
        want = wide.whole(sequence, first)
        assert want.isfinite().all() and bool(want.any())
        assert same(case.whole(sequence, first), want), f"{length} tokens as units"
        assert same(case.singles(rows[-16:]), wide.singles(rows[-16:])), f"{length} tokens, segments shared out"
        with shared_out_up_to(case, 0):
            assert same(case.singles(rows), wide.singles(rows)), f"{length} tokens, rows by themselves"


@pytest.mark.parametrize(("place", "kind"), PLACES)
def test_answers_are_those_over_a_wide_cache_of_the_stored_numbers(case: Case) -> None:
    check_equal(case)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [KINDS[1], KINDS[4]], ids=str)
def test_the_same_in_float16(kind: Kind) -> None:
    check_equal(make_case("cuda", kind, LENGTHS["cuda"], torch.float16, scales=SCALES), torch.float16)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [KINDS[1], KINDS[3]], ids=str)
def test_every_number_there_is(kind: Kind) -> None:
    """Keys and values of all codes, the smallest and the largest among them."""
    case = make_case("cuda", kind, (1000, 257), scales=SCALES)
    every = torch.tensor([code for code in range(256) if code & 0x7F != 0x7F], dtype=torch.uint8, device="cuda")
    for cache in (case.k, case.v):
        random = torch.randint(0, len(every), cache.shape, device="cuda", generator=torch.Generator("cuda").manual_seed(1))
        cache.view(torch.uint8).copy_(every[random])
    case.q.mul_(2.0**-8)
    check_equal(case)


@pytest.mark.parametrize(("place", "kind"), PLACES)
def test_every_way_to_a_row_gives_its_bits(case: Case) -> None:
    for sequence, length in enumerate(case.lengths):
        first = 0 if length == 257 else max(0, length - 40)
        assert differing_ways(case, sequence, first, (1, 7, 64)) == [], f"{length} tokens from {first} on"


@pytest.mark.parametrize(("place", "kind"), PLACES)
def test_values(case: Case) -> None:
    """Near float64, with scales that are no powers of two."""
    scales = CacheScales(0.8, 1.7)
    case = make_case("cuda" if case.q.is_cuda else "stand-in", case.kind, case.lengths, scales=scales)
    for sequence, length in enumerate(case.lengths):
        first = max(0, length - 30)
        rows = [(sequence, p) for p in range(first, length)]
        with shared_out_up_to(case, 0):
            alone = case.singles(rows)
        for got in (case.whole(sequence, first), alone, torch.cat([case.singles(rows[i : i + 16]) for i in range(0, len(rows), 16)])):
            assert not wrong(case, sequence, first, got)
            assert torch.equal(got, alone)


@pytest.mark.parametrize(("place", "kind"), PLACES)
def test_pages_and_what_lies_around_the_sequences_do_not_matter(case: Case) -> None:
    sequence = len(case.lengths) - 1
    first, end = max(0, case.lengths[sequence] - 40), case.lengths[sequence]
    want = case.whole(sequence, first)
    rows = [(sequence, p) for p in range(end - 20, end)]
    for seed, garbage in enumerate((torch.nan, 0.0, 448.0, -448.0)):
        other = case.moved(seed, garbage)
        assert other.k.dtype == FP8 and torch.equal(other.whole(sequence, first), want), garbage
        assert torch.equal(other.singles(rows), want[-20:]) and torch.equal(other.singles(rows[-9:]), want[-9:]), garbage


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [KINDS[1], KINDS[3]], ids=str)
def test_captured_launches_give_the_bits_of_separate_ones(kind: Kind) -> None:
    case = make_case("cuda", kind, LENGTHS["cuda"], scales=SCALES)
    factors = cache_factors(kind.head_dim, SCALES, case.q.device)
    case.scratch.reserve(case.table.shape[1] * kind.page_tokens)
    for count in (5, 40):
        want = case.singles([(8, 1536 - i) for i in range(count)])
        position = torch.arange(1536, 1536 - count, -1, device="cuda")
        units = one_row_units(case.table, position, torch.full_like(position, 8))
        q = case.q[case.starts[8] + position].contiguous()
        out = torch.zeros_like(q)

        def step(q: torch.Tensor = q, units: Units = units, out: torch.Tensor = out) -> None:
            case.attention(q, case.k, case.v, units, out, factors)

        replay = replayed(step)
        out.zero_()
        replay()
        assert torch.equal(out, want)


@pytest.mark.parametrize("kind", [KINDS[1]], ids=str)
def test_machine_code(kind: Kind, tmp_path: Path) -> None:
    check_all(kind, tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", [*KINDS[:1], *KINDS[2:]], ids=str)
def test_machine_code_of_all(kind: Kind, tmp_path: Path) -> None:
    check_all(kind, tmp_path)


def check_all(kind: Kind, folder: Path) -> None:
    """No kernel spills, and none reads before it waits what a step writes."""
    early = {"paged_attention": {"factors"}, "add_segments": set()}
    early["decode_attention"] = {"factors", "k", "v", "table", "position", "table_row"}
    for program in programs_of(kind, fp8=True):
        assert dict(program.constants)["fp8"] and "fp8" not in program.factory
        check_machine_code(program, folder)
        assert read_before_waiting(program) == early[program.factory]


def test_heads_that_cannot_be_copied_are_refused() -> None:
    with pytest.raises(KernelBuildError, match="heads of 72 channels in 8 bits cannot be read 16 bytes at a time"):
        attention_programs(4, 2, 72, 16, 0, "bfloat16", True)
    assert len(attention_programs(4, 2, 72, 16, 0, "bfloat16")) == 1


def test_names_of_the_kernels_for_wide_caches_stay() -> None:
    """By which they are found in stores and in what is recorded of them."""
    assert all("fp8" not in program.name for program in programs_of(KINDS[1]))
    assert not {p.name for p in programs_of(KINDS[1])} & {p.name for p in programs_of(KINDS[1], fp8=True)}
