"""What a sequence keeps: pages of compressed entries, and one block of state with its two regions.

Stored region: windows of the encoder layers, the only state worth keeping beyond the sequence. Dropped region: windows of the
decoder layers and of the draft stages, raw compressor rows of tokens that may still be taken back, the latest compressed ids.
Rings are addressed by ``position mod rows``.

Rows are kept packed (528, 288 and 68 bytes in the full model) or as floats. Since every packed value is a bfloat16 number, a
bfloat16 cache of rounded rows holds the same values as a packed one.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Literal

import torch

from ...errors import ConfigError
from ...kernels.block_formats import FP4_ROWS, FP8_ROWS, MXFP4_ROWS, RowFormat
from ...kernels.cache_rows import RowKind
from ...kernels.state_replica import ReplicaRing
from ..base import ModelOptions, PagedGroup, Source, StateGroup, WindowHits
from .topology import DeepseekV41Topology

PAGE_TOKENS = 128
_WIDEST = 8  # bytes of the widest number in a state
Storage = Literal["packed", "bfloat16", "float32"]


@dataclass(frozen=True)
class StateField:
    """One tensor of a region."""

    name: str
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    keep: int
    """How many of its rows, the newest, a sequence at a page boundary still needs."""

    @property
    def nbytes(self) -> int:
        """Bytes it takes."""
        return prod(self.shape) * self.dtype.itemsize


FieldSpec = tuple[str, tuple[int, ...], torch.dtype, int]
"""Name, shape, dtype and ``keep`` of a field that has no place yet."""


@dataclass(frozen=True)
class StateRegion:
    """Tensors of a sequence one behind the other; ``nbytes`` is a multiple of 8, so that regions follow one another in a row."""

    fields: tuple[StateField, ...]
    nbytes: int

    @classmethod
    def lay_out(cls, fields: list[FieldSpec]) -> StateRegion:
        """Places fields in order; offsets and length are aligned for every dtype."""
        placed: list[StateField] = []
        offset = 0
        for name, shape, dtype, keep in fields:
            offset = -(-offset // dtype.itemsize) * dtype.itemsize
            placed.append(StateField(name, offset, shape, dtype, keep))
            offset += placed[-1].nbytes
        return cls(tuple(placed), -(-offset // _WIDEST) * _WIDEST)

    def views(self, state: torch.Tensor, start: int) -> dict[str, torch.Tensor]:
        """The fields ``[slots, *shape]`` of a region that begins at byte ``start`` of each row of ``state`` uint8 ``[slots, bytes]``."""
        found: dict[str, torch.Tensor] = {}
        for field in self.fields:
            first = start + field.offset
            found[field.name] = state[:, first : first + field.nbytes].view(field.dtype).unflatten(1, field.shape)
        return found


@dataclass(frozen=True)
class CachePlan:
    """Caches of a topology in one form of storage; build it with ``plan_caches``."""

    page_tokens: int
    window: RowKind
    entry: RowKind
    index_key: RowKind
    sources: tuple[tuple[int, int], ...]
    """(layer, entries on a page)."""
    stored: StateRegion
    dropped: StateRegion
    ring: int
    backtracking: int
    """Rows of a ring beyond a window."""
    hits: WindowHits
    id_reach: int = 0
    """Ids before a token that its n-grams read."""
    unindexed: frozenset[int] = frozenset()
    """Source layers whose entries are all read, so that they have no index keys."""

    @property
    def bytes_per_token(self) -> float:
        """Paged bytes a token of context costs over all sources."""
        return self.page_bytes / self.page_tokens

    @property
    def page_bytes(self) -> int:
        """Bytes of a page over all sources."""
        keys = sum(entries for layer, entries in self.sources if layer not in self.unindexed)
        return sum(entries for _, entries in self.sources) * self.entry.nbytes + keys * self.index_key.nbytes

    @property
    def state_bytes(self) -> int:
        """Device bytes of a sequence's state with its replica."""
        group = self.state_group()
        return group.stored * (1 + group.replicas) + group.dropped

    # A state row: stored, dropped, and the replica of both in the same order

    @property
    def live_bytes(self) -> int:
        """Bytes of both regions; the replica begins there."""
        return self.stored.nbytes + self.dropped.nbytes

    @property
    def stored_slice(self) -> slice:
        """Bytes of a state row with the replica of the stored region."""
        return slice(self.live_bytes, self.live_bytes + self.stored.nbytes)

    def views(self, state: torch.Tensor, replica: bool = False) -> dict[str, torch.Tensor]:
        """Every field by name ``[slots, *shape]``, of the live regions or of their replica, on ``state`` uint8 ``[slots, bytes]``."""
        start = self.live_bytes if replica else 0
        return {**self.stored.views(state, start), **self.dropped.views(state, start + self.stored.nbytes)}

    def replica_rings(self, state: torch.Tensor) -> list[ReplicaRing]:
        """Every field of ``state`` beside its replica."""
        live, replica = self.views(state), self.views(state, replica=True)
        fields = (*self.stored.fields, *self.dropped.fields)
        return [ReplicaRing(live[field.name], replica[field.name], field.keep) for field in fields]

    def state_group(self) -> StateGroup:
        """One replica is taken at every page boundary: of both regions, so that a hit can restore all windows.

        A group's ``replicas`` count copies of what is stored, hence the copy of the other region counts as dropped bytes.
        """
        return StateGroup(
            self.stored.nbytes,
            2 * self.dropped.nbytes,
            replicas=1,
            ring=self.ring,
            cut=self.page_tokens,
            replica_at=self.live_bytes,
            hits=self.hits,
            history=self.id_reach,
        )

    def kv_groups(self) -> tuple[list[PagedGroup], list[StateGroup]]:
        """One paged group; entries of layer ``l`` under ``layers.<l>.kv``, their index keys under ``layers.<l>.index``."""
        sources: list[Source] = []
        for layer, entries in self.sources:
            sources.append(Source((f"layers.{layer}.kv",), entries, self.entry.shape, self.entry.dtype))
            if layer not in self.unindexed:
                sources.append(Source((f"layers.{layer}.index",), entries, self.index_key.shape, self.index_key.dtype))
        return [PagedGroup(self.page_tokens, tuple(sources))], [self.state_group()]


def backtracking_of(options: ModelOptions, usual: int) -> int:
    """Most rows a step may write past the last one that counts: what was asked for, else ``usual`` or what drafts need.

    Raises ``ConfigError`` for fewer than drafts need.
    """
    least = options.max_draft + 1
    back = max(usual, least) if options.max_backtracking is None else options.max_backtracking
    if back < least:
        raise ConfigError(
            f"max_backtracking_tokens {back} does not cover the {options.max_draft} drafts and the token before them; "
            f"set it to at least {least}"
        )
    return back


def _row_kind(width: int, form: RowFormat, quantised: bool, storage: Storage, what: str) -> RowKind:
    used = form if quantised and form.fits(width) else None
    if storage != "packed":
        return RowKind(width, used, False, torch.bfloat16 if storage == "bfloat16" else torch.float32)
    if used is None:
        why = f"{width} is no multiple of {form.block}" if quantised else "'x_cache_quant' is 'none'"
        raise ConfigError(f"{what} cannot be kept packed as {form.name}: {why}; keep them in bfloat16")
    return RowKind(width, used, True, torch.uint8)


def plan_caches(
    topology: DeepseekV41Topology, storage: Storage = "packed", page_tokens: int = PAGE_TOKENS, backtracking: int | None = None
) -> CachePlan:
    """Caches of ``topology``; raises ``ConfigError`` for pages that cut an entry or rows that cannot be packed.

    ``backtracking``: most rows a step may write past the last one that counts, if not the topology's.
    """
    t, sizes = topology, topology.attention
    back = t.max_backtracking if backtracking is None else backtracking
    ring = sizes.window + back
    ratios = {layer: t.shared.ratios[layer] for layer in t.shared.kv_sources}
    for layer, ratio in ratios.items():
        if page_tokens <= 0 or page_tokens % ratio:
            raise ConfigError(f"pages of {page_tokens} tokens cut the entries of layer {layer}, which join {ratio} tokens")
    window = _row_kind(sizes.head_dim, FP8_ROWS, t.quantised_caches, storage, "window rows")
    entry = _row_kind(sizes.head_dim, FP4_ROWS, t.quantised_caches, storage, "compressed entries")
    index_key = _row_kind(sizes.index_dim, MXFP4_ROWS, t.quantised_caches, storage, "index keys")

    def rings(names: list[str]) -> list[FieldSpec]:
        return [(f"{name}.window", (ring, *window.shape), window.dtype, sizes.window) for name in names]

    # a draft may be taken back after its group has closed, so raw rows are kept one step deep
    pending = 1 << back.bit_length()
    dropped: list[FieldSpec] = []
    reach = 0 if t.engram is None else t.engram.longest - 1
    if reach:
        dropped.append(("token_ids", (reach + back,), torch.int64, reach))
    for layer, ratio in ratios.items():
        if ratio > 1:
            dropped.append((f"layers.{layer}.pending", (pending, 2, sizes.head_dim), torch.float32, 0))  # groups end there
    decoder = [f"layers.{plan.index}" for plan in t.layers if plan.decoder]
    dropped += rings(decoder + [f"mtp.{stage}" for stage in range(t.drafts.stages)])
    return CachePlan(
        page_tokens=page_tokens,
        window=window,
        entry=entry,
        index_key=index_key,
        sources=tuple((layer, page_tokens // ratio) for layer, ratio in ratios.items()),
        stored=StateRegion.lay_out(rings([f"layers.{plan.index}" for plan in t.layers if not plan.decoder])),
        dropped=StateRegion.lay_out(dropped),
        ring=ring,
        backtracking=back,
        hits=WindowHits(t.encoder_layers, len(t.layers) - t.encoder_layers, sizes.window, page_tokens, back),
        id_reach=reach,
    )


def packs(topology: DeepseekV41Topology) -> bool:
    """Whether all rows of ``topology`` have a packed form."""
    sizes = topology.attention
    fits = FP8_ROWS.fits(sizes.head_dim) and FP4_ROWS.fits(sizes.head_dim) and MXFP4_ROWS.fits(sizes.index_dim)
    return topology.quantised_caches and fits
