"""Parameters of a DeepSeek-V4 model under the release's names; no forward.

Attention, experts and mixes are stored as V4.1's. Norms, mixes, routing, sinks and compressors are float32, tables of experts int64,
everything else has the run dtype.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..deepseek_v41.containers import AttentionParameters, BlockParameters, MixParameters, MoeParameters
from .topology import DeepseekV4Topology, LayerKind, LayerPlan


@dataclass
class CompressorParameters:
    """Float32; ``c`` columns are the width of an entry, or twice as many where windows overlap."""

    wkv: torch.Tensor
    """``[c, d]``."""
    wgate: torch.Tensor
    """``[c, d]``."""
    ape: torch.Tensor
    """``[ratio, c]``: what gates have added, by place in the window."""
    norm: torch.Tensor
    """Of an entry's width."""


@dataclass
class IndexerParameters:
    """Of a layer that selects entries."""

    wq_b: torch.Tensor
    """``[index_heads * index_dim, q_rank]``."""
    weights_proj: torch.Tensor
    """``[index_heads, d]``."""
    keys: CompressorParameters


@dataclass
class LayerParameters:
    """One layer."""

    attn_norm: torch.Tensor
    """float32 ``[d]``."""
    ffn_norm: torch.Tensor
    """float32 ``[d]``."""
    attn: AttentionParameters
    compressor: CompressorParameters | None
    indexer: IndexerParameters | None
    moe: MoeParameters
    table: torch.Tensor | None
    """int64 ``[V, k]``: experts of every token, where they are given."""
    hc_attn: MixParameters
    hc_ffn: MixParameters


class DeepseekV4Parameters(BlockParameters):
    """All tensors of a model; attributes for the forward, ``places`` for the loaders.

    ``embed`` ``[V, d]`` and ``head`` ``[V, d]`` in the run dtype, ``norm`` float32 ``[d]``, ``hc_head`` float32 (``fn`` ``[n, n d]``,
    ``base`` ``[n]``, ``scale`` ``[1]``), ``layers``. Tensors are allocated, not set.
    """

    def __init__(self, topology: DeepseekV4Topology, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__(topology, dtype, device)
        self.topology = topology
        t, make = topology, self._make
        self.embed = make.plain("embed.weight", t.vocab, t.hidden)
        self.layers = [self._layer(plan) for plan in t.layers]
        self.hc_head = MixParameters(
            fn=make.float32("hc_head_fn", t.streams, t.streams * t.hidden),
            base=make.float32("hc_head_base", t.streams),
            scale=make.float32("hc_head_scale", 1),
        )
        self.norm = make.float32("norm.weight", t.hidden)
        self.head = make.plain("head.weight", t.vocab, t.hidden)

    def _compressor(self, prefix: str, plan: LayerPlan, width: int) -> CompressorParameters:
        make, hidden, columns = self._make, self.topology.hidden, 2 * width if plan.overlaps else width
        return CompressorParameters(
            wkv=make.float32(f"{prefix}wkv.weight", columns, hidden),
            wgate=make.float32(f"{prefix}wgate.weight", columns, hidden),
            ape=make.float32(f"{prefix}ape", plan.ratio, columns),
            norm=make.float32(f"{prefix}norm.weight", width),
        )

    def _indexer(self, prefix: str, plan: LayerPlan) -> IndexerParameters:
        t, a, make = self.topology, self.topology.attention, self._make
        return IndexerParameters(
            wq_b=make.plain(f"{prefix}wq_b.weight", a.index_heads * a.index_dim, a.q_rank),
            weights_proj=make.plain(f"{prefix}weights_proj.weight", a.index_heads, t.hidden),
            keys=self._compressor(f"{prefix}compressor.", plan, a.index_dim),
        )

    def _layer(self, plan: LayerPlan) -> LayerParameters:
        t, make, prefix = self.topology, self._make, f"layers.{plan.index}."
        attn, selects = f"{prefix}attn.", plan.kind is LayerKind.SPARSE
        table = make.plain(table_name(plan), t.vocab, t.moe.chosen, dtype=torch.int64) if plan.hashed else None
        return LayerParameters(
            attn_norm=make.float32(f"{prefix}attn_norm.weight", t.hidden),
            ffn_norm=make.float32(f"{prefix}ffn_norm.weight", t.hidden),
            attn=self._attention(attn),
            compressor=self._compressor(f"{attn}compressor.", plan, t.attention.head_dim) if plan.ratio else None,
            indexer=self._indexer(f"{attn}indexer.", plan) if selects else None,
            moe=self._moe(f"{prefix}ffn.", t.moe.experts, biased=not plan.hashed),
            table=table,
            hc_attn=self._mix(f"{prefix}hc_attn"),
            hc_ffn=self._mix(f"{prefix}hc_ffn"),
        )

    def optional_tensors(self) -> tuple[str, ...]:
        """Draft stages of the checkpoint are not run; routers of layers with tables may have a bias that nothing reads."""
        return ("mtp.*", *(f"layers.{plan.index}.ffn.gate.bias" for plan in self.topology.layers if plan.hashed))


def table_name(plan: LayerPlan) -> str:
    """Checkpoint name of a layer's experts by token."""
    return f"layers.{plan.index}.ffn.gate.tid2eid"
