"""Paged attention on a GPU: the same arithmetic for decoding rows, drafts and prompts.

A *unit* is some consecutive rows of one sequence with the query heads of one KV head, up to 64 rows of a matrix product, or 128 of a wide
unit. A block walks the unit's tiles; every ``SEGMENT`` keys, counted from position 0, it closes a partial result (maximum, sum, weighted
values) and adds it to the total, in the order of the segments. With few units the segments of one unit go to several blocks, which leave
their partial results in memory, and a second kernel adds them up in the same order with the same operations: so the bits of a row depend
neither on how its segments were spread nor on which rows stand beside it. Keys a row does not see have weight exactly zero.

Formula: softmax(q k^T * scale) v with the maximum taken out (Milakov & Gimelshein 2018), weights rounded to the run dtype before the
product with v and before they are summed, which is a product with ones: tensor cores add alike whatever an element's place is.

Keys and values may be 8-bit floats (``fp8_cache``): the same kernels, which make them the run dtype in shared memory.
"""

from __future__ import annotations

import torch

from deepinfer.errors import KernelBuildError

from ..fp8_cache import CacheScales
from ..toolchain import ModelShape, Program, StoredKernel, shape_config
from ..toolchain.device_code import FILE
from ..toolchain.loading import require
from ..toolchain.shapes import run_dtype
from .decode import add_segments, decode_attention
from .prompt import paged_attention
from .tiles import ROWS, SEGMENT, WIDE_ROWS, tile_keys
from .units import Units
from .wide import wide_attention

__all__ = [
    "PagedAttention", "Scratch", "add_segments", "attention_programs", "decode_attention", "paged_attention", "programs_for",
    "wide_attention",
]  # fmt: skip

PASSES = (("tl.disable_safe_memory_legalize", True), ("tl.disable_tma_lower", True))

BY_COPY_ENGINE = (("tl.disable_safe_memory_legalize", True),)
"""For ``wide_attention``."""

BY_WARPS = (("tl.disable_wgmma", True), *PASSES)
"""For ``decode_attention``: products of single warps, which take operands as they lie and want no fence that waits for copies under way."""


_FILES = (FILE, *(f"paged_attention/{name}.py" for name in ("tiles", "prompt", "decode", "wide")))


def unit_tokens(heads: int, kv_heads: int) -> int:
    """Most rows of a step in one unit."""
    return ROWS // (heads // kv_heads)


def wide_unit_tokens(heads: int, kv_heads: int, head_dim: int, fp8: bool = False) -> int:
    """Most rows of a step in one wide unit; 0: there are none for such heads."""
    return WIDE_ROWS // (heads // kv_heads) if head_dim in (64, 128) and not fp8 else 0


def attention_programs(
    heads: int, kv_heads: int, head_dim: int, page_tokens: int, window: int, dtype: str, fp8: bool = False
) -> list[Program]:
    """The kernels of one kind of layer: units; wide units, where there are such; rows by themselves, in ``SPLITS`` splits, and what adds
    the latter up, unless rows are units like others. ``fp8``: keys and values are 8-bit floats. Raises ``KernelBuildError`` for such heads
    that are not read 16 bytes at a time, more than 64 query heads of a KV head, and pages that do not share out a tile."""
    if fp8 and head_dim % 16:
        raise KernelBuildError(f"heads of {head_dim} channels in 8 bits cannot be read 16 bytes at a time")
    if not unit_tokens(heads, kv_heads):
        raise KernelBuildError(f"{heads // kv_heads} query heads of a KV head are more than the {ROWS} rows of a block")
    if tile_keys(head_dim) % page_tokens and page_tokens % SEGMENT:
        raise KernelBuildError(f"pages of {page_tokens} tokens do not share out tiles of {tile_keys(head_dim)} keys")
    kept = {"fp8": True} if fp8 else {}  # left out of the constants of others, whose names stay

    def program(factory: str, passes: tuple[tuple[str, bool], ...], **choices: int) -> Program:
        constants = shape_config(
            heads=heads, kv_heads=kv_heads, head_dim=head_dim, page_tokens=page_tokens, window=window, dtype=dtype, **choices, **kept
        )
        return Program("paged_attention", factory, constants, _FILES, passes)

    adding = shape_config(heads=heads, head_dim=head_dim, window=window, dtype=dtype, **kept)
    found = [program("paged_attention", PASSES, stages=2)]
    if wide_unit_tokens(heads, kv_heads, head_dim, fp8):
        found.append(program("wide_attention", BY_COPY_ENGINE))
    if head_dim % 64 == 0 and heads // kv_heads <= 16:  # else no even shares for four warps
        found += [
            program("decode_attention", BY_WARPS, splits=1),
            program("decode_attention", BY_WARPS, splits=SPLITS),
            Program("paged_attention", "add_segments", adding, _FILES, PASSES),
        ]
    return found


SPLITS = 16
"""Blocks that share the segments of a unit where there are few units."""

SPLIT_ROWS = 16
"""Most rows of a step whose segments are shared out: with more, units fill the GPU by themselves."""

_SHARED, _REGISTERS = 227 * 1024, 65536
"""Of a multiprocessor: bytes of shared memory, registers."""


def _blocks_of_processor(kernel: StoredKernel) -> int:
    """Blocks of ``kernel`` that a multiprocessor holds at once."""
    registers = -(-kernel.resources.registers // 8) * 8 * kernel.threads
    return max(1, min(_SHARED // (kernel.shared + 1024), _REGISTERS // registers))


_LOG2_E = 1.4426950408889634


def cache_factors(head_dim: int, scales: CacheScales, device: torch.device) -> torch.Tensor:
    """What a call over 8-bit keys and values of these scales takes: float32 ``[2]``, the factor of the scores and that of the answer."""
    return torch.tensor([head_dim**-0.5 * _LOG2_E * scales.key, scales.value], dtype=torch.float32, device=device)


class Scratch:
    """Room for partial results of ``SPLIT_ROWS`` rows, shared by the layers of a model, as long as the longest sequence so far."""

    def __init__(self, heads: int, head_dim: int, device: torch.device) -> None:
        self._heads, self._head_dim, self._device = heads, head_dim, device
        self.reserve(SEGMENT)

    def reserve(self, max_tokens: int) -> None:
        """Makes room for sequences of ``max_tokens`` tokens. What is captured keeps the room it has: reserve the longest before."""
        segments = -(-max_tokens // SEGMENT)
        self.value = torch.empty((SPLIT_ROWS, self._heads, segments, self._head_dim), dtype=torch.float32, device=self._device)
        self.scale = torch.empty((2, SPLIT_ROWS, self._heads, segments), dtype=torch.float32, device=self._device)

    @property
    def segments(self) -> int:
        """Segments of a sequence there is room for."""
        return self.scale.shape[-1]


class PagedAttention:
    """Attention of one kind of layer over pages of ``page_tokens`` tokens, on a GPU.

    Args:
        heads, kv_heads, head_dim: of the layer; ``window`` sees the last so many positions, ``None`` = all.
        scratch: where partial results go.
        fp8: keys and values are 8-bit floats.

    Attributes:
        tokens, wide_tokens: most rows of a unit, and of a wide one; 0 if there are none.

    Raises ``KernelBuildError`` if a kernel cannot be had.
    """

    def __init__(
        self, heads: int, kv_heads: int, head_dim: int, page_tokens: int, window: int | None, dtype: torch.dtype, device: torch.device,
        scratch: Scratch, fp8: bool = False,
    ) -> None:  # fmt: skip
        programs = attention_programs(heads, kv_heads, head_dim, page_tokens, window or 0, run_dtype(dtype), fp8)
        self._units, *others = require(programs, device, after=True)
        self.wide_tokens = wide_unit_tokens(heads, kv_heads, head_dim, fp8)
        if self.wide_tokens:
            self._wide, *others = others
        self._blocks = 0  # of a step's single rows; 0 = they are units like others
        if others:
            self._single, self._split, self._add = others
            processors = torch.cuda.get_device_properties(device).multi_processor_count
            self._blocks = processors * _blocks_of_processor(self._single.stored)
        self._shape = (heads, head_dim)
        self._kv_heads = kv_heads
        self._scale = head_dim**-0.5 * _LOG2_E
        self._scratch = scratch
        self.tokens = unit_tokens(heads, kv_heads)

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, units: Units, out: torch.Tensor, factors: torch.Tensor | None = None
    ) -> None:
        """``q`` ``[R, heads, head_dim]`` → ``out``, the same shape; ``k``, ``v`` ``[pages, page_tokens, kv_heads, head_dim]`` hold the
        rows' own entries. Rows that are in no unit are not written. ``factors``: those of ``cache_factors``, for 8-bit keys and values.
        Allocates nothing."""
        scale = self._scale if factors is None else factors
        count, width = units.first.shape[0], units.table.stride(0)  # rows of a table cut to its longest sequence lie apart
        if not units.single or not self._blocks:
            common = (q, k, v, units.table, units.position, units.first, units.count, units.row)
            if units.wide:
                self._wide.launch((count, self._kv_heads), *common, out, scale, k.shape[0], width, count)
            else:
                self._units.launch((count, self._kv_heads), *common, out, scale, width, count)
            return
        taken = (q, k, v, units.table, units.position, units.row)
        if count > SPLIT_ROWS:
            blocks = min(self._blocks, count * self._kv_heads)
            self._single.launch((blocks,), *taken, out, scale, blocks, count, width)
            return
        longest = units.table.shape[1] * k.shape[1]
        if self._scratch.segments * SEGMENT < longest:
            self._scratch.reserve(longest)
        value, sums, segments = self._scratch.value, self._scratch.scale, self._scratch.segments
        blocks = count * self._kv_heads * SPLITS
        self._split.launch((blocks,), *taken, value, sums, scale, blocks, count, width, SPLIT_ROWS, segments)
        of_cache = () if factors is None else (factors,)
        self._add.launch((count, self._shape[0]), value, sums, units.position, out, *of_cache, SPLIT_ROWS, segments, count)


def programs_for(shape: ModelShape) -> list[Program]:
    """What a model of ``shape`` launches."""
    sizes = (shape.heads, shape.kv_heads, shape.head_dim, shape.page_tokens)
    return list(attention_programs(*sizes, 0, shape.dtype, shape.kv == "fp8"))
