"""Drawing on a GPU: grammar masks, edits of logits, draws from whole vocabularies and under ``top_k``, ``top_p`` and ``min_p``.

Everything that differs between rows is read on the device: values and lists by state slot, rows by index, −1 = no row. So every launch can
be captured in a graph, and the grid is all that the host says. Tokens are those of ``worker.sampler`` with the weights of ``reference``,
bit for bit: integers decide, and pieces of a row add up exactly.
"""

# Annotations of TileLang functions are values that it reads: no `from __future__ import annotations` here.

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..toolchain import Dialect, ModelShape, Program, imported, row_blocks, shape_config
from ..toolchain.device_code import let_next_start, wait_for_previous
from ..toolchain.driver import Launchable
from ..toolchain.loading import require
from .columns import NUM_COLUMNS
from .ranked_text import LOGPROBS, PLACES, RANKED
from .reference import weight_power
from .text import EDIT, LISTED, MASK, PLAIN, functions

CHUNK = 4096
"""Ids of a block, where blocks share a row."""

FEW_ROWS = 16
"""Up to so many rows of a launch by rank have ``ROW_BLOCKS`` blocks each, more have one: 16 rows are 128 blocks, each with one of the 132
multiprocessors to itself. With more, rows would begin to wait for each other."""

ROW_BLOCKS = row_blocks.PORTABLE

ROOM = 160 << 10
"""Bytes of shared memory that a block's share of a row may take, of 227 KB that a block can have."""

_FILES = (*imported.FILES, "sample/text.py", "sample/reference.py", "sample/columns.py")
_RANKED_FILES = (*_FILES, row_blocks.FILE, "sample/ranked_text.py")
_C_TYPES = {"bfloat16": "bfloat16_t", "float16": "half_t", "float32": "float"}


def chunk_of(vocab: int) -> int:
    """Ids of a block for a vocabulary: ``CHUNK``, more where a row would have above 1024 blocks."""
    chunk = CHUNK
    while -(-vocab // chunk) > 1024:
        chunk *= 2
    return chunk


def _value(d: Dialect, dtype: str) -> str:
    return {"float32": "float", "float16": "half"}[d.stored(dtype)] if d.cpu else _C_TYPES[dtype]


def mask_rows(d: Dialect, vocab: int, threads: int) -> Any:
    """Minus infinity in rows ``which`` of ``x`` float32 ``[rows, vocab]`` where ``masks`` int32 ``[count, ceil(vocab / 32)]`` have a 0.

    Grid: ``(ceil(vocab / chunk), count)``.
    """
    T = d.T
    rows, count = T.dynamic("rows"), T.dynamic("count")
    words, chunk = -(-vocab // 32), chunk_of(vocab)
    text = imported.prelude(d, functions(MASK))

    @T.prim_func
    def mask_rows(x: T.Tensor((rows, vocab), "float32"), which: T.Tensor((count,), "int64"), masks: T.Tensor((count, words), "int32")):
        with T.Kernel(-(-vocab // chunk), count, threads=threads, prelude=text) as (part, nth):
            let_next_start(d)
            wait_for_previous(d)
            imported.call(d, "mask_part", T.address_of(x[0, 0]), T.address_of(which[0]), T.address_of(masks[0, 0]), part, nth, vocab, chunk)

    return mask_rows


def edit_rows(d: Dialect, vocab: int, threads: int) -> Any:
    """Bias, penalties, bad words and stop ids of rows ``which`` of ``x`` float32 ``[rows, vocab]``, as ``worker.sampler.Sampler`` has them.

    Lists are those of ``worker.sampling_state.SamplingState``, flat, with their widths; ``before`` int64 ``[rows, drafts]``. ``counted``:
    whether ``counts`` and ``in_prompt`` ``[slots, vocab]`` are there. Grid: ``(ceil(vocab / chunk), count)``.
    """
    T = d.T
    rows, count, seqs, slots_, b0, b1, b2, c0, c1, w0, w1, w2, s0 = (
        T.dynamic(name) for name in ("rows", "count", "seqs", "slots_", "b0", "b1", "b2", "c0", "c1", "w0", "w1", "w2", "s0")
    )
    chunk = chunk_of(vocab)
    text = imported.prelude(d, functions(EDIT))

    @T.prim_func
    def edit_rows(
        x: T.Tensor((rows, vocab), "float32"),
        which: T.Tensor((count,), "int64"),
        slots: T.Tensor((seqs,), "int64"),
        table: T.Tensor((slots_, NUM_COLUMNS), "int32"),
        positions: T.Tensor((seqs,), "int64"),
        before: T.Tensor((b0,), "int64"),
        bias_ids: T.Tensor((b1,), "int64"),
        bias: T.Tensor((b2,), "float32"),
        counts: T.Tensor((c0,), "int32"),
        in_prompt: T.Tensor((c1,), "uint8"),
        bad_last: T.Tensor((w0,), "int64"),
        bad_prefix: T.Tensor((w1,), "int64"),
        recent: T.Tensor((w2,), "int64"),
        stop_ids: T.Tensor((s0,), "int64"),
        drafts: T.int32,
        biases: T.int32,
        counted: T.int32,
        bad_words: T.int32,
        prefix: T.int32,
        stops: T.int32,
    ):
        with T.Kernel(-(-vocab // chunk), count, threads=threads, prelude=text) as (part, nth):
            let_next_start(d)
            wait_for_previous(d)
            lists = [T.address_of(t[0]) for t in (before, bias_ids, bias, counts, in_prompt, bad_last, bad_prefix, recent, stop_ids)]
            widths = [drafts, biases, counted, bad_words, prefix, stops]
            imported.call(
                d,
                "edit_part",
                T.address_of(x[0, 0]),
                T.address_of(which[0]),
                T.address_of(slots[0]),
                T.address_of(table[0, 0]),
                T.address_of(positions[0]),
                *lists,
                *widths,
                part,
                nth,
                vocab,
                chunk,
            )

    return edit_rows


def draw_plain(d: Dialect, vocab: int, threads: int, dtype: str) -> Any:
    """Draws ``tokens`` of rows ``which`` of ``x`` ``[rows, vocab]`` in ``dtype`` from the whole vocabulary, ``min_p`` included.

    ``tokens`` and ``largest`` hold what ``argmax`` found in each row; a row whose largest logit is not finite keeps its token. ``sums``
    int64 ``[most, ceil(vocab / chunk)]`` is scratch, ``arrived`` int32 ``[most]`` holds 0 before and after. Grid: ``(ceil(vocab / chunk),
    count)``.
    """
    T = d.T
    rows, count, seqs, slots_, most, scratch = (T.dynamic(name) for name in ("rows", "count", "seqs", "slots_", "most", "scratch"))
    chunk, power = chunk_of(vocab), weight_power(vocab)
    text = imported.prelude(d, functions(PLAIN, value=_value(d, dtype)))

    @T.prim_func
    def draw_plain(
        x: T.Tensor((rows, vocab), d.stored(dtype)),
        which: T.Tensor((count,), "int64"),
        slots: T.Tensor((seqs,), "int64"),
        table: T.Tensor((slots_, NUM_COLUMNS), "int32"),
        positions: T.Tensor((seqs,), "int64"),
        largest: T.Tensor((seqs,), "float32"),
        sums: T.Tensor((scratch,), "int64"),
        arrived: T.Tensor((most,), "int32"),
        tokens: T.Tensor((seqs,), "int32"),
    ):
        with T.Kernel(-(-vocab // chunk), count, threads=threads, prelude=text) as (part, nth):
            let_next_start(d)
            wait_for_previous(d)
            imported.call(
                d,
                "draw_plain",
                T.address_of(x[0, 0]),
                T.address_of(which[0]),
                T.address_of(slots[0]),
                T.address_of(table[0, 0]),
                T.address_of(positions[0]),
                T.address_of(largest[0]),
                T.address_of(sums[0]),
                T.address_of(arrived[0]),
                T.address_of(tokens[0]),
                part,
                nth,
                vocab,
                chunk,
                power,
            )

    return draw_plain


def _by_rank(d: Dialect, vocab: int, threads: int, blocks: int, dtype: str, part: str) -> tuple[str, int]:
    """Text of a kernel in which ``blocks`` blocks have a row, and how many logits a block has room for: its share, if it is kept at all."""
    wide = 16 // torch.empty(0, dtype=getattr(torch, d.stored(dtype))).itemsize
    share = -(-vocab // (blocks * wide)) * wide
    kept = blocks > 1 and share * 16 // wide <= ROOM
    sizes = f"#define SHARE {share}\n#define KEPT {int(kept)}\n"
    text = imported.prelude(d, sizes + functions(PLACES, part, value=_value(d, dtype)), threads, blocks)
    return text, share * (blocks if d.cpu else 1) if kept else 1


def draw_ranked(d: Dialect, vocab: int, threads: int, blocks: int, dtype: str) -> Any:
    """As ``draw_plain`` for rows under ``top_k``, ``top_p`` and ``min_p``, ``blocks`` blocks a row. Grid: ``(count * blocks,)``."""
    T = d.T
    rows, count, seqs, slots_ = (T.dynamic(name) for name in ("rows", "count", "seqs", "slots_"))
    text, room_size = _by_rank(d, vocab, threads, blocks, dtype, RANKED)
    power, side_by_side = weight_power(vocab), 1 if d.cpu else blocks

    @T.prim_func
    def draw_ranked(
        x: T.Tensor((rows, vocab), d.stored(dtype)),
        which: T.Tensor((count,), "int64"),
        slots: T.Tensor((seqs,), "int64"),
        table: T.Tensor((slots_, NUM_COLUMNS), "int32"),
        positions: T.Tensor((seqs,), "int64"),
        largest: T.Tensor((seqs,), "float32"),
        tokens: T.Tensor((seqs,), "int32"),
    ):
        with T.Kernel(count * side_by_side, threads=threads, prelude=text, cluster_dims=side_by_side) as block:
            T.annotate_min_blocks_per_sm(2)
            room = d.shared((room_size,), d.stored(dtype))
            let_next_start(d)
            wait_for_previous(d)
            imported.call(
                d,
                "draw_ranked",
                T.address_of(x[0, 0]),
                T.address_of(which[0]),
                T.address_of(slots[0]),
                T.address_of(table[0, 0]),
                T.address_of(positions[0]),
                T.address_of(largest[0]),
                T.address_of(tokens[0]),
                T.address_of(room[0]),
                block // side_by_side,
                vocab,
                power,
            )

    return draw_ranked


def logprob_rows(d: Dialect, vocab: int, threads: int, blocks: int) -> Any:
    """For each row of ``x`` float32 ``[rows, vocab]``: ``largest``, ``total`` of its weights at temperature 1 (−1 where the largest is not
    finite), ``rank`` of ``tokens``, and ``ids`` int32 ``[rows, most]``, the most likely in falling order, ``most`` ≤ 1024. Grid:
    ``(rows * blocks,)``."""
    T = d.T
    rows, listed = T.dynamic("rows"), T.dynamic("listed")
    text, room_size = _by_rank(d, vocab, threads, blocks, "float32", LOGPROBS)
    power, side_by_side = weight_power(vocab), 1 if d.cpu else blocks

    @T.prim_func
    def logprob_rows(
        x: T.Tensor((rows, vocab), "float32"),
        tokens: T.Tensor((rows,), "int64"),
        largest: T.Tensor((rows,), "float32"),
        total: T.Tensor((rows,), "int64"),
        rank: T.Tensor((rows,), "int32"),
        ids: T.Tensor((listed,), "int32"),
        most: T.int32,
    ):
        with T.Kernel(rows * side_by_side, threads=threads, prelude=text, cluster_dims=side_by_side) as block:
            T.annotate_min_blocks_per_sm(2)
            room = d.shared((room_size,), "float32")
            let_next_start(d)
            wait_for_previous(d)
            imported.call(
                d,
                "logprob_row",
                T.address_of(x[0, 0]),
                T.address_of(tokens[0]),
                T.address_of(largest[0]),
                T.address_of(total[0]),
                T.address_of(rank[0]),
                T.address_of(ids[0]),
                T.address_of(room[0]),
                block // side_by_side,
                most,
                vocab,
                power,
            )

    return logprob_rows


_THREADS, _ROW_THREADS = 256, 512  # of a block of masks, edits and plain draws, of one that works by rank


def _program(factory: str, **constants: int | str) -> Program:
    return Program("sample", factory, shape_config(**constants), _FILES)


def _programs_by_rank(factory: str, **constants: int | str) -> list[Program]:
    """For few rows, for many."""
    sizes = [shape_config(threads=_ROW_THREADS, blocks=blocks, **constants) for blocks in (ROW_BLOCKS, 1)]
    return [Program("sample", factory, size, _RANKED_FILES) for size in sizes]


@dataclass(frozen=True)
class EditLists:
    """What rows are edited by, on the device; widths may be 0. ``before`` int64 ``[rows, drafts]``, other lists by state slot."""

    before: torch.Tensor
    bias_ids: torch.Tensor  # int64 [slots, biases]
    bias: torch.Tensor  # float32, the same shape
    counts: torch.Tensor | None  # int32 [slots, vocab]
    in_prompt: torch.Tensor | None  # bool, the same shape
    bad_last: torch.Tensor  # int64 [slots, words], −1 = none
    bad_prefix: torch.Tensor  # int64 [slots, words, prefix], −1 matches anything
    recent: torch.Tensor  # int64 [slots, prefix]
    stop_ids: torch.Tensor  # int64 [slots, stops], −1 = none


class Edits:
    """Masks and edits of float32 logits, in place.

    Args:
        vocab: width of a row.
        device: where it runs.
        after: see ``driver.Kernel``.
        kernels: those of ``programs``, loaded elsewhere.

    Raises ``KernelBuildError`` if there are no such kernels.
    """

    def __init__(self, vocab: int, device: torch.device, after: bool = True, kernels: Sequence[Launchable] | None = None) -> None:
        self._mask, self._edit = require(self.programs(vocab), device, after) if kernels is None else kernels
        self._parts = -(-vocab // chunk_of(vocab))
        self._nothing = {t: torch.empty(0, dtype=t, device=device) for t in (torch.int32, torch.uint8)}

    @staticmethod
    def programs(vocab: int) -> list[Program]:
        """What it launches."""
        return [_program(factory, vocab=vocab, threads=_THREADS) for factory in ("mask_rows", "edit_rows")]

    def mask(self, x: torch.Tensor, which: torch.Tensor, masks: torch.Tensor) -> None:
        """Minus infinity in ``x`` ``[R, vocab]`` where ``masks`` int32 ``[m, words]`` forbid an id in rows ``which`` int64 ``[m]``."""
        if count := len(which):
            self._mask.launch((self._parts, count), x, which, masks, count)

    def __call__(
        self, x: torch.Tensor, which: torch.Tensor, slots: torch.Tensor, table: torch.Tensor, positions: torch.Tensor, lists: EditLists
    ) -> None:
        """Edits rows ``which`` int64 ``[m]`` of ``x`` ``[R, vocab]``; ``slots`` and ``positions`` int64 ``[R]``, ``table`` int32 by
        slot."""
        counted = lists.counts is not None and lists.in_prompt is not None
        counts = lists.counts if lists.counts is not None else self._nothing[torch.int32]
        in_prompt = lists.in_prompt.view(torch.uint8) if lists.in_prompt is not None else self._nothing[torch.uint8]
        flat = [lists.before, lists.bias_ids, lists.bias, counts, in_prompt, lists.bad_last, lists.bad_prefix, lists.recent, lists.stop_ids]
        widths = [t.shape[1] for t in (lists.before, lists.bias_ids)]
        widths += [int(counted), lists.bad_last.shape[1], lists.recent.shape[1], lists.stop_ids.shape[1]]
        count = len(which)
        if count:
            self._edit.launch((self._parts, count), x, which, slots, table, positions, *(t.view(-1) for t in flat), *widths, count)


class Draws:
    """Draws of rows that do not take their most likely token, from logits of one type.

    Args:
        vocab: width of a row.
        dtype: bfloat16, float16 or float32.
        max_rows: most rows of a call.
        device: where it runs; one stream at a time, the scratch is its own.
        after, kernels: see ``Edits``.
        few_rows: most rows that get ``ROW_BLOCKS`` blocks each; tokens are the same.

    Raises ``KernelBuildError`` if there are no such kernels.
    """

    def __init__(
        self,
        vocab: int,
        dtype: torch.dtype,
        max_rows: int,
        device: torch.device,
        after: bool = True,
        kernels: Sequence[Launchable] | None = None,
        few_rows: int = FEW_ROWS,
    ) -> None:
        if kernels is None:
            kernels = require(self.programs(vocab, str(dtype).removeprefix("torch.")), device, after)
        self._plain, self._few, self._many = kernels
        self._few_rows = few_rows
        self._parts = -(-vocab // chunk_of(vocab))
        self._sums = torch.zeros(max_rows * self._parts, dtype=torch.int64, device=device)
        self._arrived = torch.zeros(max_rows, dtype=torch.int32, device=device)

    @staticmethod
    def programs(vocab: int, dtype: str) -> list[Program]:
        """What it launches."""
        return [
            _program("draw_plain", vocab=vocab, threads=_THREADS, dtype=dtype),
            *_programs_by_rank("draw_ranked", vocab=vocab, dtype=dtype),
        ]

    def plain(
        self,
        x: torch.Tensor,
        which: torch.Tensor,
        slots: torch.Tensor,
        table: torch.Tensor,
        positions: torch.Tensor,
        largest: torch.Tensor,
        tokens: torch.Tensor,
    ) -> None:
        """Draws rows ``which`` int64 ``[m]`` of ``x`` ``[R, vocab]`` from the whole vocabulary. ``tokens`` int32 and ``largest`` float32
        ``[R]`` are what ``Argmax`` gave; ``slots`` and ``positions`` int64 ``[R]``, ``table`` int32 by slot."""
        if count := len(which):
            scratch = (self._sums, self._arrived)
            self._plain.launch((self._parts, count), x, which, slots, table, positions, largest, *scratch, tokens, count)

    def ranked(
        self,
        x: torch.Tensor,
        which: torch.Tensor,
        slots: torch.Tensor,
        table: torch.Tensor,
        positions: torch.Tensor,
        largest: torch.Tensor,
        tokens: torch.Tensor,
    ) -> None:
        """As ``plain``, under ``top_k`` and ``top_p``."""
        if count := len(which):
            kernel, blocks = (self._few, ROW_BLOCKS) if count <= self._few_rows else (self._many, 1)
            kernel.launch((count * blocks,), x, which, slots, table, positions, largest, tokens, count)


class Logprobs:
    """What log-probabilities of rows of float32 logits need.

    Args:
        vocab: width of a row.
        device, after, kernels: see ``Edits``.
        few_rows: see ``Draws``.

    Raises ``KernelBuildError`` if there are no such kernels.
    """

    MOST = LISTED
    """Most ids of a row."""

    def __init__(
        self,
        vocab: int,
        device: torch.device,
        after: bool = True,
        kernels: Sequence[Launchable] | None = None,
        few_rows: int = FEW_ROWS,
    ) -> None:
        self._few, self._many = require(self.programs(vocab), device, after) if kernels is None else kernels
        self._few_rows = few_rows

    @staticmethod
    def programs(vocab: int) -> list[Program]:
        """What it launches."""
        return _programs_by_rank("logprob_rows", vocab=vocab)

    def __call__(
        self, x: torch.Tensor, tokens: torch.Tensor, largest: torch.Tensor, total: torch.Tensor, rank: torch.Tensor, ids: torch.Tensor
    ) -> None:
        """``x`` float32 ``[R, vocab]``, ``tokens`` int64 ``[R]``. Writes ``largest`` float32, ``total`` int64 and ``rank`` int32 ``[R]``
        and ``ids`` int32 ``[R, n]``, ``n`` at most ``MOST`` and ``vocab``: the most likely ids in falling order, ties to the lowest id."""
        if rows := x.shape[0]:
            kernel, blocks = (self._few, ROW_BLOCKS) if rows <= self._few_rows else (self._many, 1)
            kernel.launch((rows * blocks,), x, tokens, largest, total, rank, ids.view(-1), ids.shape[1], rows)


def programs_for(shape: ModelShape) -> list[Program]:
    """For a model's own logits, and for those that are edited in float32."""
    draws = Draws.programs(shape.vocab, shape.dtype) + Draws.programs(shape.vocab, "float32")
    return Edits.programs(shape.vocab) + draws + Logprobs.programs(shape.vocab)
