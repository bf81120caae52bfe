"""Paged attention of a GPU under test: cases with garbage wherever nothing may look, every way to run a row, the exact answer.

Where there is no GPU stand-ins in torch take the kernels' places: they get what the kernels get and work on a row after another. What
they show is that units, grids, tables and the choice among kernels are right, and that the tests can fail.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise, product
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from deepinfer.kernels.fp8_cache import FP8, CacheScales, decode, encode
from deepinfer.kernels.paged_attention import cuda as op
from deepinfer.kernels.paged_attention.cuda import SEGMENT, PagedAttention, Scratch, attention_programs, cache_factors
from deepinfer.kernels.paged_attention.units import Units, one_row_units, step_units
from deepinfer.kernels.toolchain import Program, default_store
from deepinfer.kernels.toolchain.shapes import run_dtype
from kernel_kit import device_of, kept_as

LOWEST = -1e30


def _cut(table: torch.Tensor) -> torch.Tensor:
    """``table`` as a step has it: the columns that its longest sequence needs, of a wider one. What lies between its rows is no page."""
    wide = torch.full((len(table), table.shape[1] + 3), 2**30, dtype=table.dtype, device=table.device)
    wide[:, : table.shape[1]] = table
    return wide[:, : table.shape[1]]


@dataclass(frozen=True)
class Kind:
    """A kind of layer. ``window``: positions a row sees, 0 = all."""

    heads: int
    kv_heads: int
    head_dim: int
    page_tokens: int
    window: int

    def __str__(self) -> str:
        return f"{self.heads}x{self.head_dim}by{self.kv_heads}-pages{self.page_tokens}-window{self.window or 'none'}"

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.heads // self.kv_heads


@dataclass(frozen=True)
class Case:
    """Sequences in pages. ``q`` holds the queries of all of their tokens, one sequence after another from ``starts`` on."""

    kind: Kind
    attention: PagedAttention
    scratch: Scratch
    lengths: tuple[int, ...]
    starts: tuple[int, ...]
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    table: torch.Tensor
    scales: CacheScales | None = None
    """Of caches in 8 bits."""

    # Ways to run rows of a sequence

    def pieces(self, pieces: Sequence[tuple[int, int, int]], wide: bool = False) -> list[torch.Tensor]:
        """One step of rows ``first … end - 1`` of sequences, in units, ``wide`` or not, as forwards make them; answers of each piece."""
        rows = [torch.arange(first, end, device=self.q.device) for _, first, end in pieces]
        of = torch.tensor([sequence for sequence, _, _ in pieces], device=self.q.device)
        q = torch.cat([self.q[self.starts[s] + first : self.starts[s] + end] for s, first, end in pieces])
        borders = [0]
        for _, first, end in pieces:
            borders.append(borders[-1] + end - first)
        tokens = self.attention.wide_tokens if wide else self.attention.tokens
        units = step_units(_cut(self.table[of]), torch.cat(rows), borders, tokens, wide)
        out = self.run(q, units)
        return [out[a:b] for a, b in pairwise(borders)]

    def singles(self, rows: Sequence[tuple[int, int]]) -> torch.Tensor:
        """A decode step of rows (sequence, position), which may be of one sequence."""
        sequence, position = (torch.tensor(part, device=self.q.device) for part in zip(*rows, strict=True))
        starts = torch.tensor(self.starts, device=self.q.device)
        return self.run(self.q[starts[sequence] + position], one_row_units(self.table, position, sequence))

    def run(self, q: torch.Tensor, units: Units) -> torch.Tensor:
        """What the operator writes for ``q``; NaN where it writes nothing."""
        out = torch.full_like(q, torch.nan)
        factors = None if self.scales is None else cache_factors(self.kind.head_dim, self.scales, q.device)
        self.attention(q.contiguous(), self.k, self.v, units, out, factors)
        return out

    def whole(self, sequence: int, first: int) -> torch.Tensor:
        """Rows of a sequence from ``first`` on as one piece: what every other way is compared with."""
        return self.pieces([(sequence, first, self.lengths[sequence])])[0]

    # The same sequences elsewhere

    def moved(self, seed: int, garbage: float) -> Case:
        """With the sequences on other pages and ``garbage`` wherever none of their tokens is."""
        generator = torch.Generator().manual_seed(seed)
        pages, page_tokens = self.k.shape[:2]
        to = torch.cat((torch.zeros(1, dtype=torch.long), 1 + torch.randperm(pages - 1, generator=generator)))
        k, v = (torch.full_like(x, garbage) for x in (self.k, self.v))
        table = _cut(torch.zeros_like(self.table))
        for sequence, length in enumerate(self.lengths):
            for column in range(-(-length // page_tokens)):
                old, used = int(self.table[sequence, column]), min(page_tokens, length - column * page_tokens)
                new = int(to[old])
                table[sequence, column] = new
                k[new, :used], v[new, :used] = self.k[old, :used], self.v[old, :used]
        return replace(self, k=k, v=v, table=table)

    # The exact answer

    def exact(self, sequence: int, first: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The answer for rows from ``first`` on in float64, and how far one of the run dtype may be from it: ``[rows, heads, d]``.

        Weights are rounded before they multiply values and are added up, answers once more, each by up to half a unit in the last place
        (2^-8 of a bfloat16); float32 sums and exponents add little.
        """
        kind, length = self.kind, self.lengths[sequence]
        pages = self.table[sequence, : -(-length // kind.page_tokens)].long()
        scales = self.scales or CacheScales()
        k, v = (
            x[pages].flatten(0, 1)[:length].double().repeat_interleave(kind.group, 1) * scale
            for x, scale in ((self.k, scales.key), (self.v, scales.value))
        )
        q = self.q[self.starts[sequence] + first : self.starts[sequence] + length].double()
        score = torch.einsum("rhd,khd->rhk", q, k) * kind.head_dim**-0.5
        key, row = (torch.arange(n, length, device=q.device) for n in (0, first))
        seen = key <= row[:, None]
        if kind.window:
            seen &= key > row[:, None] - kind.window
        weight = score.masked_fill(~seen[:, None], -torch.inf).softmax(-1)
        smallest = {torch.float16: 2.0**-25, torch.bfloat16: 0.0, torch.float32: 0.0}[q_dtype := self.q.dtype]
        rounding = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float32: 2.0**-23}[q_dtype]
        size = torch.einsum("rhk,khd->rhd", weight, v.abs())
        below = torch.einsum("rk,khd->rhd", seen.double(), v.abs()) * smallest  # fp16 weights may have fewer digits
        return torch.einsum("rhk,khd->rhd", weight, v), (3 * rounding + 3e-5) * size + below


def make_case(
    place: str,
    kind: Kind,
    lengths: Sequence[int],
    dtype: torch.dtype = torch.bfloat16,
    garbage: float = torch.nan,
    scales: CacheScales | None = None,
) -> Case:
    """Sequences of random tokens on scattered pages. The null page, entries behind a sequence's end and free pages hold ``garbage``.
    ``scales``: of keys and values kept in 8 bits."""
    device, kept = device_of(place), kept_as("c" if place == "stand-in" else place, dtype)
    generator = torch.Generator().manual_seed(11)
    width = max(-(-n // kind.page_tokens) for n in lengths) + 1
    used = [-(-n // kind.page_tokens) for n in lengths]
    order = iter((1 + torch.randperm(sum(used) + 2, generator=generator)).tolist())
    shape = (sum(used) + 3, kind.page_tokens, kind.kv_heads, kind.head_dim)
    k, v = torch.full(shape, garbage), torch.full(shape, garbage)
    table = torch.zeros((len(lengths), width), dtype=torch.int32)
    for sequence, length in enumerate(lengths):
        for column in range(used[sequence]):
            page = next(order)
            table[sequence, column] = page
            here = min(kind.page_tokens, length - column * kind.page_tokens)
            k[page, :here] = torch.randn(here, *shape[2:], generator=generator)
            v[page, :here] = torch.randn(here, *shape[2:], generator=generator)
    q = 2 * torch.randn(sum(lengths), kind.heads, kind.head_dim, generator=generator)
    # what bfloat16 would keep, in every place
    q, k, v = (x.to(dtype).to(device=device, dtype=kept) for x in (q, k, v))
    if scales is not None:
        k, v = encode(k, scales.key), encode(v, scales.value)
    scratch = Scratch(kind.heads, kind.head_dim, device)
    sizes = (kind.heads, kind.kv_heads, kind.head_dim, kind.page_tokens, kind.window or None)
    attention = PagedAttention(*sizes, dtype, device, scratch, scales is not None)
    starts = tuple(sum(lengths[:i]) for i in range(len(lengths)))
    return Case(kind, attention, scratch, tuple(lengths), starts, q, k, v, _cut(table.to(device)), scales)


def wrong(case: Case, sequence: int, first: int, got: torch.Tensor) -> str:
    """What is wrong with the answers of a sequence's rows from ``first`` on; empty = nothing."""
    want, tolerance = case.exact(sequence, first)
    off = (got.double() - want).abs() - tolerance
    if not bool((off > 0).any()) and bool(got.isfinite().all()):
        return ""
    row = int((off.nan_to_num(torch.inf).amax((1, 2))).argmax())
    return f"{case.lengths[sequence]} tokens, position {first + row}: {int((off > 0).sum())} numbers beyond rounding"


# Cases of a file of tests


@dataclass(frozen=True)
class Cases:
    """The kinds of layers of a file: ``few`` on stand-ins, which are slow, ``kinds`` on a GPU."""

    few: tuple[Kind, ...]
    kinds: tuple[Kind, ...]
    scales: CacheScales | None = None
    """Of caches in 8 bits."""

    def places(self) -> list[Any]:
        """Parameters ``place, kind`` of tests."""
        return [
            *[pytest.param("stand-in", kind, id=f"stand-in-{kind}") for kind in self.few],
            *[pytest.param("cuda", kind, id=f"cuda-{kind}", marks=pytest.mark.gpu) for kind in self.kinds],
        ]

    def make(self, place: str, kind: Kind, lengths: Sequence[int], patch: pytest.MonkeyPatch) -> Case:
        """One of them, on stand-ins or on kernels, all of which are built side by side when the first is wanted."""
        if place == "stand-in":
            stand_in(patch)
        else:
            _build(self.kinds, (False,) if self.scales is None else (False, True))
        return make_case(place, kind, lengths, scales=self.scales)


@cache
def _build(kinds: tuple[Kind, ...], forms: tuple[bool, ...]) -> None:
    """``forms``: of caches in 8 bits or not."""
    default_store().get_all([p for kind in kinds for fp8 in forms for p in programs_of(kind, fp8=fp8)])


def programs_of(kind: Kind, dtype: torch.dtype = torch.bfloat16, fp8: bool = False) -> list[Program]:
    """Kernels of a kind of layer."""
    return attention_programs(kind.heads, kind.kv_heads, kind.head_dim, kind.page_tokens, kind.window, run_dtype(dtype), fp8)


@contextmanager
def shared_out_up_to(case: Case, rows: int) -> Iterator[None]:
    """Segments are shared out among blocks in decode steps of up to ``rows`` rows, instead of as many as is fastest."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(op, "SPLIT_ROWS", rows)
        case.scratch.reserve(case.table.shape[1] * case.kind.page_tokens)
        yield
    case.scratch.reserve(SEGMENT)


CUTS = (1, 2, 7, 64, 300)


def differing_ways(case: Case, sequence: int, first: int, cuts: Sequence[int] = CUTS) -> list[str]:
    """Every way in which some row of a sequence, from ``first`` on, has other bits than among all of them in one piece."""
    want, length = case.whole(sequence, first), case.lengths[sequence]
    rows = [(sequence, position) for position in range(first, length)]
    found: dict[str, torch.Tensor] = {}

    def cut(size: int, wide: bool) -> torch.Tensor:
        return torch.cat([case.pieces([(sequence, a, min(a + size, length))], wide)[0] for a in range(first, length, size)])

    forms = ("", "wide ") if case.attention.wide_tokens else ("",)
    for size, form in product((*cuts, length), forms):
        found[f"{form}cuts of {size}"] = cut(size, form != "")
    with shared_out_up_to(case, 0):
        found["rows by themselves, each in a step"] = torch.cat([case.singles([row]) for row in rows[-70:]])
        found["rows by themselves, together"] = case.singles(rows)
        found["backwards"] = case.singles(rows[::-1]).flip(0)
        blocks = case.attention._blocks
        for few in (1, 3, 7) if blocks else ():
            case.attention._blocks = few
            found[f"{few} blocks for all rows"] = case.singles(rows)
        case.attention._blocks = blocks
    for size in (1, 7, op.SPLIT_ROWS):
        found[f"segments shared out, {size} rows"] = torch.cat([case.singles(rows[i : i + size]) for i in range(0, len(rows), size)])
    with shared_out_up_to(case, 64):
        found["segments shared out, 64 rows"] = torch.cat([case.singles(rows[i : i + 64]) for i in range(0, len(rows), 64)])
    mates = [(s, max(0, n - 9 - s), n) for s, n in enumerate(case.lengths) if s != sequence]
    middle = (sequence, first, length)
    for form in forms:
        found[f"{form}among mates"] = case.pieces([*mates[::2], middle, *mates[1::2]], form != "")[len(mates[::2])]
        halves = case.pieces([(sequence, first, (first + length) // 2), *mates, (sequence, (first + length) // 2, length)], form != "")
        found[f"{form}halves of it in one step"] = torch.cat((halves[0], halves[-1]))
    tails = [(s, n - 1) for s, n in enumerate(case.lengths)] * (1 + 20 // len(case.lengths))
    found["last row among other sequences'"] = case.singles([*tails, rows[-1]])[-1:]
    return [way for way, got in found.items() if not torch.equal(got, want[len(want) - len(got) :])]


# Stand-ins for the kernels


def stand_in(patch: pytest.MonkeyPatch, total: Callable[..., torch.Tensor] | None = None) -> None:
    """Operators made from now on run on torch. ``total``: adds up segments that were shared out, in place of ``in_order``."""
    kernels = {"paged_attention": _Units, "wide_attention": _Wide, "add_segments": _Add}

    def taken(program: Program) -> _Kernel:
        kind = kernels.get(program.factory) or (_Single if dict(program.constants)["splits"] == 1 else _Split)
        return kind(total or in_order if kind is _Add else in_order).of(program)

    patch.setattr(op, "require", lambda programs, device, after: [taken(p) for p in programs])
    patch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=4))


def in_order(parts: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """Sum of partial results (maximum, sum, values), one after another."""
    top, total, value = torch.full_like(parts[0][0], LOWEST), torch.zeros_like(parts[0][1]), torch.zeros_like(parts[0][2])
    for part_top, part_sum, part_value in parts:
        newer = torch.maximum(top, part_top)
        keep, take = torch.exp2(top - newer), torch.exp2(part_top - newer)
        top, total = newer, total * keep + part_sum * take
        value = value * keep[:, None] + part_value * take[:, None]
    return value / total[:, None] + 0.0


@dataclass(frozen=True)
class _Kernel:
    total: Callable[..., torch.Tensor]
    heads: int = 0
    window: int = 0
    # two blocks fit a multiprocessor
    stored: ClassVar = SimpleNamespace(resources=SimpleNamespace(registers=256), threads=128, shared=0)

    def of(self, program: object) -> _Kernel:
        """Of one program."""
        constants = dict(program.constants)  # type: ignore[attr-defined]
        return replace(self, heads=constants["heads"], window=constants["window"])

    def first_segment(self, last: int) -> int:
        """Of those that a row at ``last`` sees."""
        return max(last - (self.window - 1), 0) // SEGMENT if self.window else 0

    def parts(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pages: torch.Tensor, last: int, scale: float | torch.Tensor
    ) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """(maximum ``[heads]``, sum ``[heads]``, values ``[heads, d]``) of every segment that a row at position ``last`` sees."""
        page_tokens, kv_heads, head_dim = k.shape[1:]
        if k.dtype == FP8:
            k, v, scale = decode(k), decode(v), scale[0]  # type: ignore[index]
        found = []
        for segment in range(self.first_segment(last), last // SEGMENT + 1):
            at = segment * SEGMENT + torch.arange(SEGMENT)
            entry = pages[(at // page_tokens).clamp(max=len(pages) - 1)].long() * page_tokens + at % page_tokens
            keys, values = (x.flatten(0, 1)[entry] for x in (k, v))
            seen = (at <= last) & (at > last - self.window) if self.window else at <= last
            score = torch.einsum("hgd,khd->hgk", q.view(kv_heads, -1, head_dim), keys) * scale
            score = torch.where(seen, score, LOWEST)
            top = score.amax(-1)
            weight = torch.exp2(score - top[..., None])
            value = torch.einsum("hgk,khd->hgd", weight, torch.where(at[:, None, None] <= last, values, 0.0))
            found.append((top.flatten(), weight.sum(-1).flatten(), value.flatten(0, 1)))
        return found


def _value_scale(scale: float | torch.Tensor) -> float:
    return float(scale[1]) if isinstance(scale, torch.Tensor) else 1.0


class _Units(_Kernel):
    most: ClassVar = op.ROWS

    def launch(self, grid, q, k, v, table, position, first, count, row, out, scale, width, units) -> None:  # type: ignore[no-untyped-def]
        assert grid == (units, k.shape[2]) and width == table.stride(0) and units == len(first) == len(count) == len(row)
        for begin, number, of in zip(first.tolist(), count.tolist(), row.tolist(), strict=True):
            assert number * (self.heads // k.shape[2]) <= self.most
            for r in range(begin, begin + number):
                out[r] = in_order(self.parts(q[r], k, v, table[of], int(position[r]), scale)) * _value_scale(scale)


class _Wide(_Units):
    most: ClassVar = op.WIDE_ROWS

    def launch(self, grid, q, k, v, table, position, first, count, row, out, scale, pages, width, units) -> None:  # type: ignore[no-untyped-def]
        assert pages == k.shape[0]
        super().launch(grid, q, k, v, table, position, first, count, row, out, scale, width, units)


class _Single(_Kernel):
    def launch(self, grid, q, k, v, table, position, row, out, scale, blocks, rows, width) -> None:  # type: ignore[no-untyped-def]
        assert grid == (blocks,) and 0 < blocks <= rows * k.shape[2] and width == table.stride(0) and rows == len(row) <= len(position)
        for r in range(rows):
            out[r] = in_order(self.parts(q[r], k, v, table[int(row[r])], int(position[r]), scale)) * _value_scale(scale)


class _Split(_Kernel):
    def launch(  # type: ignore[no-untyped-def]
        self, grid, q, k, v, table, position, row, value, sums, scale, blocks, rows, width, part_rows, segments
    ) -> None:
        assert (
            rows == len(row)
            and grid == (blocks,) == (len(row) * k.shape[2] * op.SPLITS,)
            and width == table.stride(0)
            and len(row) <= part_rows
        )
        assert value.shape == (part_rows, self.heads, segments, q.shape[2]) and sums.shape == (2, part_rows, self.heads, segments)
        for r, of in enumerate(row.tolist()):
            last = int(position[r])
            for n, part in enumerate(self.parts(q[r], k, v, table[of], last, scale)):
                sums[0, r, :, self.first_segment(last) + n], sums[1, r, :, self.first_segment(last) + n] = part[:2]
                value[r, :, self.first_segment(last) + n] = part[2]


class _Add(_Kernel):
    def launch(self, grid, value, sums, position, out, *rest) -> None:  # type: ignore[no-untyped-def]
        *scale, part_rows, _, rows = rest
        assert grid == (rows, self.heads) and rows == len(position) <= part_rows
        for r in range(grid[0]):
            last = int(position[r])
            of = range(self.first_segment(last), last // SEGMENT + 1)
            parts = [(sums[0, r, :, n], sums[1, r, :, n], value[r, :, n]) for n in of]
            out[r] = self.total(parts) * (_value_scale(*scale) if scale else 1.0)
