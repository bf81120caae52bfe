"""One backbone layer: Engram where it has one, attention, experts; between them the streams are mixed.

A site's coefficients come from the streams before it; the collapse that they give is used by the next site.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ...kernels.engram_gate import engram_gate
from ...kernels.rms_norm import rms_norm
from ...kernels.rope import RopeTable
from ...kernels.stream_mix import collapse, expand, mix_coefficients
from .attention import Attention
from .caches import CachePlan
from .containers import LayerParameters
from .experts import Experts
from .packed import PackedEngram, PackedMix
from .shared_layers import LayerKind
from .step import LayerRows, Step
from .topology import DeepseekV41Topology, LayerPlan

Streams = tuple[torch.Tensor, torch.Tensor]
"""Streams ``[T, s, d]`` in the run dtype, and the mix float32 ``[T, s]`` that the next site collapses them with."""


class Sites:
    """The two sites of a layer or draft stage: attention, which the caller gives, and experts, with the mixing around them."""

    def __init__(self, p: LayerParameters, t: DeepseekV41Topology, chosen: int, dtype: torch.dtype) -> None:
        self._t, self._dtype = t, dtype
        self._attn_norm, self._ffn_norm = p.attn_norm, p.ffn_norm
        self._mix_attn, self._mix_ffn = PackedMix.pack(p.hc_attn), PackedMix.pack(p.hc_ffn)
        self._experts = Experts(p.moe, t.moe, chosen, t.quantised_weights, dtype)

    @property
    def expert_loads(self) -> torch.Tensor:
        """See ``Experts``."""
        return self._experts.loads

    def _mixes(self, x: torch.Tensor, site: PackedMix) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        t = self._t
        return mix_coefficients(x, site.fn, site.base, site.scale, t.eps, t.sinkhorn_iterations, t.mix_eps)

    def enter(self, streams: Streams) -> torch.Tensor:
        """What attention reads: the streams collapsed with the mix that came with them, normed, ``[T, d]``."""
        return rms_norm(collapse(*streams, self._dtype), self._attn_norm, self._t.eps)

    def __call__(
        self,
        streams: Streams,
        attention: Callable[[torch.Tensor], torch.Tensor],
        image: torch.Tensor | None = None,
        real: int | None = None,
    ) -> Streams:
        """``attention``: ``[T, d]`` normed rows → ``[T, d]``; ``image`` marks rows of image spans; ``real``: see ``Experts``."""
        x = streams[0]
        after_attention, post, comb = self._mixes(x, self._mix_attn)
        x = expand(attention(self.enter(streams)), x, post, comb)
        after, post, comb = self._mixes(x, self._mix_ffn)
        u = rms_norm(collapse(x, after_attention, self._dtype), self._ffn_norm, self._t.eps)
        return expand(self._experts(u, image, real=real), x, post, comb), after


class Layer:
    """One layer in runtime layout."""

    def __init__(self, p: LayerParameters, t: DeepseekV41Topology, plan: LayerPlan, dtype: torch.dtype) -> None:
        self.plan, self._t = plan, t
        self._sites = Sites(p, t, t.moe.chosen, dtype)
        self._attention = Attention(p, t, plan, dtype)
        self._engram = None if p.engram is None else PackedEngram.pack(p.engram, t.quantised_weights)

    @property
    def expert_loads(self) -> torch.Tensor:
        """See ``Experts``."""
        return self._sites.expert_loads

    def add_engram(self, x: torch.Tensor, found: torch.Tensor, dead: torch.Tensor) -> torch.Tensor:
        """Streams plus the gated value of table rows ``found`` ``[T, width]``; rows that are ``dead`` (bool ``[T]``) stay."""
        w = self._engram
        return x if w is None else engram_gate(x, w.key_value(found), w.q_weight, w.k_weight, self._t.eps, dead)

    def fill(self, streams: Streams, step: Step, caches: CachePlan, rope: RopeTable) -> None:
        """Only what a source writes to its cache, for all rows of the step: where the layer itself runs on a part of them."""
        self._attention.fill(self._sites.enter(streams), step, caches, rope)

    def __call__(self, streams: Streams, step: Step, rows: LayerRows, caches: CachePlan, rope: RopeTable, filled: bool = False) -> Streams:
        """The layer on ``rows``; a source fills its cache first unless that is done (``filled``)."""

        def attention(u: torch.Tensor) -> torch.Tensor:
            if self.plan.kind is LayerKind.FULL and not filled:
                self._attention.fill(u, step, caches, rope)
            return self._attention(u, step, rows, caches)

        return self._sites(streams, attention, rows.image, rows.real)
