"""What runs a number of rows: the fastest form found on an H200 (docs/kernels.md has the times)."""

from __future__ import annotations

from .few_rows import Few
from .many_rows import Many

_KB = 1024

LIMITS = (8, 16, 32, 64, 128, 192, 256)
"""Rows between which the choice may change; beyond the last the library runs."""

_BLOCKS = 132
"""Blocks that run side by side, one a multiprocessor."""

_MEMORY = 226 * _KB
"""Shared memory of a block without its barriers."""

_WIDE = 2048
"""Input channels from which on the weights are what a product waits for."""

_HEAD = 32768
"""Outputs that only a vocabulary has."""


def choose(in_features: int, out_features: int, rows: int, gated: bool = False) -> Few | Many | None:
    """The kernel for ``rows`` rows; ``None``: the library is faster, or there is no kernel for the sizes.

    ``gated``: for the activation of ``out_features`` behind a product of twice as many.
    """
    rows = next((limit for limit in LIMITS if rows <= limit), rows)
    if gated:
        return _gated(in_features, out_features, rows)
    return _many(in_features, out_features, rows) or _few(in_features, out_features, rows)


def _few(in_features: int, out_features: int, rows: int) -> Few | None:
    if out_features % 64 or in_features % 16:
        return None
    if in_features >= 4096:  # weights are what is waited for; only their start can be hidden
        if rows > 16 or in_features >= 8192:
            return None
        if out_features <= 4096:
            return Few(8, 16, 48 * _KB) if rows <= 8 else Few(16, 16, 48 * _KB)
        if out_features <= 8192:
            return Few(8, 64, 48 * _KB) if rows <= 8 else Few(16, 16, 24 * _KB)
        return Few(8, 16, 24 * _KB) if rows <= 8 else None
    if out_features >= 16384:
        return Few(8, 32, 36 * _KB) if rows <= 8 else Few(16, 32, 36 * _KB) if rows <= 16 else None
    if rows <= 8:
        return Few(8, 16, 48 * _KB)
    if out_features >= 2048:
        return Few(16, 32, 36 * _KB) if rows <= 16 else Few(32, 32, 36 * _KB) if rows <= 32 else None
    if in_features >= 1024:
        return Few(16, 16, 48 * _KB) if rows <= 64 else Few(16, 32, 48 * _KB) if rows <= 128 else None
    return Few(16, 32, 36 * _KB) if rows <= 64 else Few(32, 32, 36 * _KB) if rows <= 256 else None


def _many(in_features: int, out_features: int, rows: int) -> Many | None:
    if in_features % 64 or out_features % 16 or rows > LIMITS[-1]:
        return None
    if in_features >= _WIDE:
        if out_features >= _HEAD:
            return _even(64, 224, 64) if 16 < rows <= 64 else None
        tile = _tile(out_features, 1)
        return _even(64, tile, 128) if 32 < rows <= 64 and 32 <= tile <= 96 and in_features % 128 == 0 else None
    if rows <= 64 or out_features >= 2048:
        return None
    if in_features < 1024:
        return _even(64, 48, 64, in_features // 64) if rows * out_features > 96 * _KB else None
    chunk = next(c for c in (192, 128, 64) if in_features % c == 0)
    x_stages = min(in_features // chunk // 2, _MEMORY // (2 * chunk * (64 + 2 * 32)))
    return Many(64, 32, chunk, 2 * x_stages, x_stages)


def _gated(in_features: int, out_features: int, rows: int) -> Many | None:
    if in_features % 64 or out_features % 16 or not 8 < rows <= LIMITS[-1]:
        return None
    if in_features < _WIDE:
        tile = max(32, _tile(out_features, -(-rows // 64)))
        return _even(64, tile, 64, min(in_features // 64, 9 if tile <= 32 else 6), 2) if tile <= 64 and in_features >= 128 else None
    tile = min(112, _tile(out_features, 1))
    if rows <= 64:
        return _even(64, tile, 128, 8, 2) if in_features % 128 == 0 else None
    if rows <= 128:
        return _even(128, tile, 64, 8, 2)
    pairs = _BLOCKS // 2  # of blocks that share the weight; every one of them has to have as many tiles, or nearly
    for tile in (112, 96, 80):
        tiles = -(-out_features // tile)
        if rows > 192 and in_features % 256 == 0 and tiles >= 0.9 * pairs * -(-tiles // pairs):
            return Many(128, tile, 64, 4, 4, cluster=2, walkers=pairs)
    return None


def _tile(out_features: int, row_blocks: int) -> int:
    """Outputs of a block by which all blocks run side by side: a multiple of 16."""
    return -(-out_features * row_blocks // (_BLOCKS * 16)) * 16


def _even(tokens: int, tile: int, chunk: int, most: int = 8, halves: int = 1) -> Many:
    """With as many chunks of the weight as of the rows under way: what memory holds, up to ``most``."""
    stages = min(most, _MEMORY // (2 * chunk * (tokens + halves * tile)))
    return Many(tokens, tile, chunk, stages, stages)
