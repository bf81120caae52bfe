"""Attention of one layer: queries over a low rank, the layer's own window, and compressed entries of its source.

Full layers first add the step's entries and index keys to their cache, and select; Reindex layers select with queries of their own;
Reuse layers take a selection; window layers have none.
"""

from __future__ import annotations

import torch

from ...kernels.block_formats import fake_quantise
from ...kernels.compressor import compress
from ...kernels.indexer import safe_row_tile, select_entries
from ...kernels.kv_write import kv_write
from ...kernels.rms_norm import rms_norm
from ...kernels.rope import RopeTable, rotate_pairs
from ...kernels.sparse_attention import two_source_attention
from ...kernels.window_rows import WindowPlan, WindowRows
from .caches import CachePlan
from .containers import LayerParameters
from .heads import Heads
from .packed import PackedCompressor, PackedIndexer
from .step import LayerRows, Step
from .topology import DeepseekV41Topology, LayerPlan


class Attention:
    """One layer's attention in runtime layout."""

    def __init__(self, p: LayerParameters, t: DeepseekV41Topology, plan: LayerPlan, dtype: torch.dtype) -> None:
        self._t, self._plan, self._dtype, self._sizes = t, plan, dtype, t.attention
        self._heads = Heads(p.attn, t.attention, t.eps, t.quantised_weights, dtype)
        self._compressor = None if p.compressor is None else PackedCompressor.pack(p.compressor)
        self._indexer = None if p.indexer is None else PackedIndexer.pack(p.indexer, t.quantised_weights)
        if self._indexer is not None:
            # compares bits, which reads them back: at load, for the steps to come
            safe_row_tile(self._heads.sink.device, t.attention.index_heads, t.attention.index_dim)
        self._index_scale = t.attention.index_dim**-0.5 * t.attention.index_heads**-0.5

    def fill(self, u: torch.Tensor, step: Step, caches: CachePlan, rope: RopeTable) -> None:
        """Writes the entries and index keys that end in the step's rows; ``u`` ``[T, d]`` are all of them, normed."""
        w, index, plan, t = self._compressor, self._indexer, self._plan, self._t
        assert w is not None and index is not None and index.keys is not None and index.key_norm is not None
        rows, name = step.encoder.step, f"layers.{plan.index}"
        raw = w.raw(u.float() if w.pools else u)
        if w.pools:
            values, gates = raw.chunk(2, -1)
            pending = step.state[f"{name}.pending"]
            raw = compress(values.contiguous(), gates.contiguous(), WindowPlan(rows, plan.ratio, pending.shape[1]), pending)
        latent = rms_norm(raw, w.norm, t.eps, self._dtype)
        keys = rms_norm(index.keys(latent), index.key_norm, t.eps, self._dtype)
        # an entry turns by the position of its first token
        angles = rope.pair_cos_sin(torch.div(rows.pos, plan.ratio, rounding_mode="floor") * plan.ratio)
        slots = step.slots[caches.page_tokens // plan.ratio]
        kv_write(step.kv[f"{name}.kv"], caches.entry.store(rotate_pairs(latent, *angles)), slots)
        kv_write(step.kv[f"{name}.index"], caches.index_key.store(rotate_pairs(keys, *angles)), slots)

    def __call__(self, u: torch.Tensor, step: Step, rows: LayerRows, caches: CachePlan) -> torch.Tensor:
        """``u`` ``[D, d]`` normed rows of ``rows`` → ``[D, d]``; the step's window rows are kept in the ring."""
        heads, plan = self._heads, self._plan
        angles = rows.compress if plan.stretched_rope else rows.main
        q, low, own = heads.enter(u, angles)
        window = WindowRows(rows.window, step.state[f"layers.{plan.index}.window"], caches.window.store(own), caches.window)
        if self._indexer is not None:
            self._select(u, low, step, rows, caches)
        entries = None if plan.kv_source is None else step.entries(plan.kv_source, caches)
        selected = None if plan.index_source is None else step.selections[plan.index_source]
        attended = two_source_attention(q, window, entries, selected, heads.sink, heads.scale)
        window.store()
        return heads.leave(attended, angles)

    def _select(self, u: torch.Tensor, low: torch.Tensor, step: Step, rows: LayerRows, caches: CachePlan) -> None:
        """Selection of the layer's own, and the candidates of later layers where this one makes them."""
        w, sizes, plan, source = self._indexer, self._sizes, self._plan, self._plan.index_key_source
        assert w is not None and source is not None
        q = rotate_pairs(w.queries(low).view(-1, sizes.index_heads, sizes.index_dim), *rows.compress)
        if caches.index_key.form is not None:
            q = fake_quantise(q, caches.index_key.form)
        weights = w.weights(u).float() * self._index_scale
        # entries that a step's longest context may have; at least one, so that there is something to look at
        bound = -(-step.max_len // plan.ratio)
        keep = sizes.candidate_blocks if plan.index == self._t.shared.candidate_source else None
        step.selections[plan.index], pool = select_entries(
            q,
            weights,
            step.index_keys(source, caches),
            rows.step,
            plan.ratio,
            bound,
            sizes.index_topk,
            block=sizes.candidate_block or 1,
            keep=keep,
            blocks=step.pool if plan.candidates else None,
        )
        if keep is not None:
            step.pool = pool
