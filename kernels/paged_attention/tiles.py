"""What the kernels of paged attention have in common: sizes that are part of what the bits mean, and the copy of a tile."""

# Annotations of TileLang functions are values that it reads: no `from __future__ import annotations` here.

from typing import Any

from ..toolchain import Dialect


def tile_keys(head_dim: int) -> int:
    """Keys of a tile, by whose maximum weights are made. Part of what the bits mean."""
    return 128 if head_dim <= 64 else 64


ROWS = 64
"""Rows of a block: tokens times query heads of a KV head."""

WIDE_ROWS = 128
"""Those of a block of ``wide_attention``."""

SEGMENT = 128
"""Keys of a partial result. Part of what the bits mean."""

SUMS = 16
"""Columns of the product with ones that adds up weights: tensor cores add in the same order whatever a row's place is."""

LOWEST = -1e30
"""Below every score; finite, so that a row that sees nothing of a tile makes no NaN."""


def fetching(dialect: Dialect, keys: int, page_tokens: int, fp8: bool = False) -> Any:
    """``fetch(source, target, table, row, tile, last, head, stage)``: begins the copy of a tile of keys or values, one group a page; of
    pages behind the one of key ``last`` nothing is read. ``fp8``: they are 8-bit floats."""
    T = dialect.T
    copies = max(1, keys // page_tokens)
    chunk = min(keys, page_tokens)

    @T.macro
    def fetch(source, target, table, row, tile, last, head, stage):
        for n in T.unroll(copies):
            if tile * keys + n * chunk <= last:
                start = tile * keys % page_tokens if copies == 1 else 0
                page = table[row, (tile * keys + n * chunk) // page_tokens]
                if fp8:  # 16 bytes a thread, whether or not all threads have any
                    T.async_copy(
                        source[page, start : start + chunk, head, :], target[stage, n * chunk : (n + 1) * chunk, :], coalesced_width=16
                    )
                else:
                    T.async_copy(source[page, start : start + chunk, head, :], target[stage, n * chunk : (n + 1) * chunk, :])
            else:
                T.ptx_commit_group()

    return fetch


def widening(dialect: Dialect, keys: int, head_dim: int, dtype: str) -> Any:
    """``widen(narrow, stage, wide, seen)``: the numbers of a tile of 8-bit floats, exact in ``dtype``, and zeros from row ``seen`` on: what
    lies behind the newest key may be anything, and zero times NaN is NaN. Threads have to meet before and behind it."""
    T = dialect.T

    @T.macro
    def widen(narrow, stage, wide, seen):
        for i, j in T.Parallel(keys, head_dim):
            wide[i, j] = T.if_then_else(i < seen, T.cast(T.cast(narrow[stage, i, j], "float32"), dtype), T.cast(0, dtype))

    return widen
