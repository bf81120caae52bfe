"""One layer: attention and experts, each between a mix of the streams and their collapse with the same mix.

Every layer sees its window. Besides, a sparse layer makes entries with index keys, pooled in one go, and selects by them; a long-window
layer makes entries and reads them all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from ...kernels.compressor import PoolPlan, pool_windows
from ...kernels.indexer import safe_row_tile, select_entries
from ...kernels.kv_write import kv_write
from ...kernels.linear import pack_linear
from ...kernels.rms_norm import rms_norm
from ...kernels.rope import RopeTable, rotate_pairs
from ...kernels.sparse_attention import full_attention, two_source_attention
from ...kernels.stream_mix import collapse, expand, mix_coefficients
from ...kernels.window_rows import WindowRows
from ..deepseek_v41.caches import CachePlan
from ..deepseek_v41.experts import Experts
from ..deepseek_v41.heads import Heads
from ..deepseek_v41.packed import PackedMix
from ..deepseek_v41.step import LayerRows, Step
from .containers import CompressorParameters, IndexerParameters, LayerParameters
from .topology import DeepseekV4Topology, LayerKind, LayerPlan

Pools = Mapping[LayerKind, PoolPlan]
"""Windows that end in a step, by the kind of layer that pools them."""


class Compressor:
    """Makes a layer's entries, and in the same product and pooling its index keys where it has them."""

    def __init__(self, p: CompressorParameters, keys: CompressorParameters | None, plan: LayerPlan, rope: RopeTable) -> None:
        self._plan, self._rope = plan, rope
        parts = [p] if keys is None else [p, keys]
        self._norms = [part.norm for part in parts]
        self._widths = [norm.shape[0] for norm in self._norms]
        values, gates = self._joined([part.wkv for part in parts]), self._joined([part.wgate for part in parts])
        self._raw = pack_linear(torch.cat((values, gates)))
        self._place = self._joined([part.ape.t() for part in parts]).t().contiguous()

    def _joined(self, columns: list[torch.Tensor]) -> torch.Tensor:
        """Rows of the parts, first halves before second ones where windows overlap, as ``pool_windows`` takes them apart."""
        halves = 2 if self._plan.overlaps else 1
        split = [part.chunk(halves) for part in columns]
        return torch.cat([part[half] for half in range(halves) for part in split])

    def __call__(self, u: torch.Tensor, step: Step, pool: PoolPlan, caches: CachePlan, eps: float, dtype: torch.dtype) -> None:
        """Writes what ends in the step's rows; ``u`` ``[T, d]`` are all of them, normed."""
        plan, name = self._plan, f"layers.{self._plan.index}"
        values, gates = self._raw(u.float()).chunk(2, -1)
        gates = gates + self._place.index_select(0, step.encoder.step.pos % plan.ratio)
        pooled = pool_windows(values, gates, pool, step.state[f"{name}.pending"]).split(self._widths, -1)
        # an entry turns by the position of its first token
        angles = self._rope.pair_cos_sin(pool.first)
        slots = pool.at_ends(step.slots[caches.page_tokens // plan.ratio])
        for what, kind, latent, norm in zip(("kv", "index"), (caches.entry, caches.index_key), pooled, self._norms, strict=False):
            kv_write(step.kv[f"{name}.{what}"], kind.store(rotate_pairs(rms_norm(latent, norm, eps, dtype), *angles)), slots)


class Indexer:
    """Selects entries by the index keys that the layer's compressor makes."""

    def __init__(self, p: IndexerParameters, t: DeepseekV4Topology, plan: LayerPlan) -> None:
        self._sizes, self._plan = t.attention, plan
        self._queries, self._weights = pack_linear(p.wq_b), pack_linear(p.weights_proj)
        self._scale = t.attention.index_dim**-0.5 * t.attention.index_heads**-0.5
        # compares bits, which reads them back: at load, for the steps to come
        safe_row_tile(p.wq_b.device, t.attention.index_heads, t.attention.index_dim)

    def __call__(self, u: torch.Tensor, low: torch.Tensor, step: Step, rows: LayerRows, caches: CachePlan, bound: int) -> torch.Tensor:
        """int32 ``[T, k]`` for ``u`` ``[T, d]`` and the low rank ``[T, q_rank]`` of its queries."""
        sizes, plan = self._sizes, self._plan
        q = rotate_pairs(self._queries(low).view(-1, sizes.index_heads, sizes.index_dim), *rows.compress)
        weights = self._weights(u).float() * self._scale
        keys = step.index_keys(plan.index, caches)
        return select_entries(q, weights, keys, rows.step, plan.ratio, bound, sizes.index_topk)[0]


class Layer:
    """In runtime layout."""

    def __init__(self, p: LayerParameters, t: DeepseekV4Topology, plan: LayerPlan, rope: RopeTable, dtype: torch.dtype) -> None:
        self.plan, self._t, self._dtype = plan, t, dtype
        self._attn_norm, self._ffn_norm = p.attn_norm, p.ffn_norm
        self._mix_attn, self._mix_ffn = PackedMix.pack(p.hc_attn), PackedMix.pack(p.hc_ffn)
        self._heads = Heads(p.attn, t.attention, t.eps, t.quantised_weights, dtype, normed=True)
        keys = None if p.indexer is None else p.indexer.keys
        self._compressor = None if p.compressor is None else Compressor(p.compressor, keys, plan, rope)
        self._indexer = None if p.indexer is None else Indexer(p.indexer, t, plan)
        self._experts, self._table = Experts(p.moe, t.moe, t.moe.chosen, t.quantised_weights, dtype), p.table

    @property
    def expert_loads(self) -> torch.Tensor:
        """See ``Experts``."""
        return self._experts.loads

    def __call__(self, x: torch.Tensor, step: Step, pools: Pools, caches: CachePlan) -> torch.Tensor:
        """Streams ``[T, s, d]`` behind the layer; its caches have the step's rows."""
        x = self._site(x, self._mix_attn, self._attn_norm, lambda u: self._attend(u, step, pools, caches))
        given = None if self._table is None else self._table.index_select(0, step.ids)
        return self._site(x, self._mix_ffn, self._ffn_norm, lambda u: self._experts(u, given=given, real=step.encoder.real))

    def _site(self, x: torch.Tensor, mix: PackedMix, norm: torch.Tensor, sublayer: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        t = self._t
        pre, post, comb = mix_coefficients(x, mix.fn, mix.base, mix.scale, t.eps, t.sinkhorn_iterations, t.mix_eps)
        return expand(sublayer(rms_norm(collapse(x, pre, self._dtype), norm, t.eps)), x, post, comb)

    def _attend(self, u: torch.Tensor, step: Step, pools: Pools, caches: CachePlan) -> torch.Tensor:
        plan, heads = self.plan, self._heads
        rows = step.decoder if plan.decoder else step.encoder
        angles = rows.main if plan.kind is LayerKind.WINDOW else rows.compress
        q, low, own = heads.enter(u, angles)
        window = WindowRows(rows.window, step.state[f"layers.{plan.index}.window"], caches.window.store(own), caches.window)
        if self._compressor is None:
            attended = two_source_attention(q, window, None, None, heads.sink, heads.scale)
        else:
            self._compressor(u, step, pools[plan.kind], caches, self._t.eps, self._dtype)
            entries = step.entries(plan.index, caches)
            # entries that a step's longest context may have; at least one, so that there is something to look at
            bound = -(-step.max_len // plan.ratio)
            if self._indexer is None:
                attended = full_attention(q, window, entries, plan.ratio, bound, heads.sink, heads.scale)
            else:
                selected = self._indexer(u, low, step, rows, caches, bound)
                attended = two_source_attention(q, window, entries, selected, heads.sink, heads.scale)
        window.store()
        return heads.leave(attended, angles)
