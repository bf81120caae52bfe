"""Which rows are computed together, and where their keys lie: made once a step, used by every layer.

A *unit* is a bundle of ``B`` equal problems: decoding rows are ``B`` problems of one row each, a prefill block is one
problem of up to ``QUERY_BLOCK`` rows. How rows are bundled never changes bits (see ``reference``), only speed.
All sizes come from host integers of the batch; nothing is read back from the device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from deepinfer.platforms import to_device

KEY_TILE = 64
"""Keys of one tile; tile ``t`` holds positions ``64 t … 64 t + 63`` of its sequence."""

QUERY_BLOCK = 128
"""Most prefill rows computed together."""

_TILE_BUDGET = 4096
"""Most key tiles (over the sequences of a unit) gathered at once: bounds memory when one long sequence meets many short ones."""


@dataclass
class Unit:
    """``B`` problems of ``q`` rows each; rows ``start … start + B * q`` of the step."""

    start: int
    problems: int
    rows: int
    entries: torch.Tensor
    """int64 ``[B, n * 64]``: KV entry of each key; keys that count for no row point at the sequence's first tile."""
    mask: torch.Tensor
    """float32 ``[B, m, q, 64]`` added to the scores of the last ``m`` tiles: 0 or −inf."""
    tiles: int
    _by_heads: dict[tuple[int, int, int], tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    @property
    def stop(self) -> int:
        """First row after the unit."""
        return self.start + self.problems * self.rows

    def by_heads(self, kv_heads: int, group: int, padded: int) -> tuple[torch.Tensor, torch.Tensor]:
        """What every layer of one head layout shares: rows of a KV tensor seen as ``[pages * entries * kv_heads, d]``
        (int64 ``[B, kv_heads, tiles, 64]``) and the mask for ``padded`` query rows (``[B, 1, m, padded or 1, 64]``), where each
        of the unit's rows stands ``group`` times and padding rows are not restricted.
        """
        key = (kv_heads, group, padded)
        if key not in self._by_heads:
            heads = torch.arange(kv_heads, device=self.entries.device)[:, None]
            rows = (self.entries[:, None, :] * kv_heads + heads).view(self.problems, kv_heads, self.tiles, KEY_TILE)
            mask = self.mask
            if self.rows > 1:
                mask = F.pad(mask.repeat_interleave(group, dim=2), (0, 0, 0, padded - self.rows * group))
            self._by_heads[key] = (rows, mask.unsqueeze(1))
        return self._by_heads[key]


@dataclass
class AttentionPlan:
    """Units of a step by window (None = full attention); made on first use of a window."""

    positions: torch.Tensor
    block_table: torch.Tensor
    cu_q: Sequence[int]
    seq_len: Sequence[int]
    decodes: int
    page_tokens: int
    row_sequence: torch.Tensor
    query_block: int = QUERY_BLOCK
    _units: dict[int | None, list[Unit]] = field(default_factory=dict)

    def units(self, window: int | None) -> list[Unit]:
        """Units for layers that see the last ``window`` keys, the row's own included; None sees all."""
        if window not in self._units:
            self._units[window] = list(_decode_units(self, window)) + list(_prefill_units(self, window))
        return self._units[window]


def make_plan(
    positions: torch.Tensor,
    block_table: torch.Tensor,
    cu_q: Sequence[int],
    seq_len: Sequence[int],
    decodes: int,
    page_tokens: int,
    query_block: int = QUERY_BLOCK,
) -> AttentionPlan:
    """Plan of a step.

    ``positions`` int64 ``[T]`` (absolute), ``block_table`` integer ``[n, W]`` (page of each ``page_tokens`` tokens),
    ``cu_q`` host ``[n + 1]`` row borders, ``seq_len`` host ``[n]`` upper bounds of the KV length with this step's rows,
    ``decodes`` leading sequences whose rows are handled one by one (one row, or a few draft rows). For the other sequences
    ``seq_len`` is exact. ``query_block`` ≤ ``QUERY_BLOCK``: most prefill rows computed together (``census``).
    """
    device = positions.device
    rows = cu_q[decodes] if decodes else 0
    if rows == decodes:
        row_sequence = torch.arange(decodes, device=device)
    else:
        borders = to_device(torch.tensor(cu_q[1 : decodes + 1]), device)
        row_sequence = torch.searchsorted(borders, torch.arange(rows, device=device), right=True)
    return AttentionPlan(positions, block_table, cu_q, seq_len, decodes, page_tokens, row_sequence, query_block)


def ring_tiles(window: int) -> int:
    """Tiles that hold every key any row of a query block may see under ``window``."""
    return -(-(window + QUERY_BLOCK) // KEY_TILE) + 1


def _tile_numbers(last: torch.Tensor, tiles: int) -> torch.Tensor:
    """Tile at each place: place ``s`` holds the newest tile ``t ≤ last`` with ``t mod tiles = s``; negative = none.

    ``last`` int64 ``[B]`` → ``[B, tiles]``. While ``last < tiles`` this is ``t = s``; later the places are a ring, so a
    tile keeps its place in the summation tree whatever part of the sequence is in view.
    """
    place = torch.arange(tiles, device=last.device)
    return last[:, None] - (last[:, None] - place) % tiles


def _keys(last: torch.Tensor, tiles: int) -> torch.Tensor:
    """Absolute position of every key, ``[B, tiles, 64]``; negative = none."""
    inner = torch.arange(KEY_TILE, device=last.device)
    return _tile_numbers(last, tiles)[:, :, None] * KEY_TILE + inner


def _entries(table: torch.Tensor, keys: torch.Tensor, newest: torch.Tensor, page_tokens: int) -> torch.Tensor:
    """KV entries ``[B, n * 64]`` of ``keys``; keys outside ``0 … newest`` are replaced by ``newest``, which is written."""
    flat = keys.flatten(1)
    flat = torch.where((flat < 0) | (flat > newest[:, None]), newest[:, None], flat)
    page = table.long().gather(1, flat // page_tokens)
    return page * page_tokens + flat % page_tokens


def _mask(keys: torch.Tensor, positions: torch.Tensor, window: int | None) -> torch.Tensor:
    """``keys`` ``[B, m, 64]``, ``positions`` ``[B, q]`` → float32 ``[B, m, q, 64]``: 0 where seen, −inf elsewhere."""
    key, row = keys[:, :, None, :], positions[:, None, :, None]
    seen = (key <= row) & (key >= 0)
    if window is not None:
        seen &= key > row - window
    zero = torch.zeros((), device=keys.device)
    return torch.where(seen, zero, zero - torch.inf)


def _decode_bundles(plan: AttentionPlan) -> Iterator[tuple[int, int, int]]:
    """Decoding sequences computed together: (first, end, longest context). One bundle, found without a loop, if memory allows."""
    if plan.decodes:
        longest = max(plan.seq_len[: plan.decodes])
        if -(-longest // KEY_TILE) * plan.cu_q[plan.decodes] <= _TILE_BUDGET:
            yield 0, plan.decodes, longest
            return
    sequence = 0
    while sequence < plan.decodes:
        first, longest = sequence, 0
        while sequence < plan.decodes:
            tiles = -(-max(longest, plan.seq_len[sequence]) // KEY_TILE)
            if sequence > first and tiles * (plan.cu_q[sequence + 1] - plan.cu_q[first]) > _TILE_BUDGET:
                break
            longest = max(longest, plan.seq_len[sequence])
            sequence += 1
        yield first, sequence, longest


def _decode_units(plan: AttentionPlan, window: int | None) -> list[Unit]:
    units: list[Unit] = []
    for first, end, longest in _decode_bundles(plan):
        tiles = max(1, -(-longest // KEY_TILE))
        if window is not None:
            tiles = min(tiles, ring_tiles(window))
        start, stop = plan.cu_q[first], plan.cu_q[end]
        if start == stop:
            continue
        positions = plan.positions[start:stop]
        keys = _keys(positions // KEY_TILE, tiles)
        table = plan.block_table.index_select(0, plan.row_sequence[start:stop])
        units.append(
            Unit(start, stop - start, 1, _entries(table, keys, positions, plan.page_tokens), _mask(keys, positions[:, None], window), tiles)
        )
    return units


def _prefill_units(plan: AttentionPlan, window: int | None) -> list[Unit]:
    units: list[Unit] = []
    for sequence in range(plan.decodes, len(plan.cu_q) - 1):
        first, end = plan.cu_q[sequence], plan.cu_q[sequence + 1]
        length = plan.seq_len[sequence]
        table = plan.block_table[sequence : sequence + 1]
        for start in range(first, end, plan.query_block):
            stop = min(start + plan.query_block, end)
            newest = length - 1 - (end - stop)  # position of the block's last row
            tiles = newest // KEY_TILE + 1
            masked = min(tiles, tiles - (newest - (stop - start) + 1) // KEY_TILE)  # tiles a row of the block may not see whole
            if window is not None:
                masked = tiles = min(tiles, ring_tiles(window))
            positions = plan.positions[start:stop]
            keys = _keys(positions[-1:] // KEY_TILE, tiles)
            entries = _entries(table, keys, positions[-1:], plan.page_tokens)
            units.append(Unit(start, 1, stop - start, entries, _mask(keys[:, tiles - masked :], positions[None], window), tiles))
    return units
