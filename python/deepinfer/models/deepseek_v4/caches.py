"""What a sequence keeps: pages of compressed entries with index keys where there are any, and one block of state.

Stored region: windows of the layers before the last one that makes entries, and of every overlapping compressor the raw rows of tokens
that may be taken back or that the next window pools. Dropped region: raw rows of the other compressors, of which a sequence at a page
boundary needs none, and the remaining windows. Rows are kept as floats.
"""

from __future__ import annotations

from typing import Literal

import torch

from ...errors import ConfigError
from ...kernels.cache_rows import RowKind
from ..base import WindowHits
from ..deepseek_v41.caches import CachePlan, FieldSpec, StateRegion
from .topology import DeepseekV4Topology, LayerKind, LayerPlan

Storage = Literal["bfloat16", "float32"]


def pending_places(plan: LayerPlan, backtracking: int) -> int:
    """Raw rows that a compressor keeps: those before a step that its first entry may pool, and those that may be taken back."""
    return plan.pooled - 1 + backtracking


def window_hits(t: DeepseekV4Topology, page_tokens: int, backtracking: int) -> WindowHits:
    """How rows are computed again behind a hit.

    Where windows begin at a position without rows before it, layer ``n`` is right from ``n (window - 1)`` rows on. An overlapping entry
    pools up to ``ratio`` rows before the hit's end besides, which counts as the reach of further layers.
    """
    window, writer = t.attention.window, t.sources[-1].index
    before = max((plan.ratio for plan in t.sources if plan.overlaps), default=0)
    encoder = writer + -(-before // (window - 1))
    return WindowHits(encoder, len(t.layers) - writer, window, page_tokens, backtracking)


def plan_caches(t: DeepseekV4Topology, storage: Storage, page_tokens: int, backtracking: int) -> CachePlan:
    """Caches of ``t``; raises ``ConfigError`` for pages that cut an entry.

    ``backtracking``: most rows a step may write past the last one that counts.
    """
    sizes, ring = t.attention, t.attention.window + backtracking
    for plan in t.sources:
        if page_tokens <= 0 or page_tokens % plan.ratio:
            raise ConfigError(
                f"pages of {page_tokens} tokens cut the entries of layer {plan.index}, which join {plan.ratio} tokens; "
                f"leave block_size out for pages of {t.page_tokens}"
            )
    dtype = torch.bfloat16 if storage == "bfloat16" else torch.float32
    row, key = RowKind(sizes.head_dim, None, False, dtype), RowKind(sizes.index_dim, None, False, dtype)

    def window(plan: LayerPlan) -> FieldSpec:
        return f"layers.{plan.index}.window", (ring, *row.shape), row.dtype, sizes.window

    def pending(plan: LayerPlan) -> FieldSpec:
        width = 2 * (sizes.head_dim + sizes.index_dim) if plan.overlaps else sizes.head_dim
        keep = plan.ratio if plan.overlaps else 0
        return f"layers.{plan.index}.pending", (pending_places(plan, backtracking), 2, width), torch.float32, keep

    stored = [window(plan) for plan in t.layers if not plan.decoder] + [pending(plan) for plan in t.sources if plan.overlaps]
    dropped = [pending(plan) for plan in t.sources if not plan.overlaps] + [window(plan) for plan in t.layers if plan.decoder]
    return CachePlan(
        page_tokens=page_tokens,
        window=row,
        entry=row,
        index_key=key,
        sources=tuple((plan.index, page_tokens // plan.ratio) for plan in t.sources),
        stored=StateRegion.lay_out(stored),
        dropped=StateRegion.lay_out(dropped),
        ring=ring,
        backtracking=backtracking,
        hits=window_hits(t, page_tokens, backtracking),
        unindexed=frozenset(plan.index for plan in t.sources if plan.kind is LayerKind.LONG),
    )
