"""Sublayers that backbone layers and draft stages have in common, by the prefix of their checkpoint names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from deepinfer.kernels.rope import RopeParameters
from deepinfer.models.deepseek_v41.topology import AttentionSizes, MoeSizes
from deepseek_v41 import arithmetic


@dataclass(frozen=True)
class Run:
    """How a reference computes.

    ``caches``: window rows, entries, index keys and index queries are rounded to their formats (a width that is no multiple of
    a format's block is left as it is). ``activations``: inputs of products whose weights the release keeps in FP8 or MXFP4 are
    rounded to FP8 per 32. ``dtype``: what values between operators are kept in; sums are float32 whatever it is.
    """

    caches: bool = True
    activations: bool = False
    engram: bool = True
    dtype: torch.dtype = torch.float32


class Sizes(Protocol):
    """What is read here of a topology."""

    @property
    def streams(self) -> int:
        """Residual streams."""

    @property
    def eps(self) -> float:
        """Added to the mean square in every norm."""

    @property
    def mix_eps(self) -> float:
        """Added to mixes and to the sums that divide them."""

    @property
    def sinkhorn_iterations(self) -> int:
        """Divisions by column sums."""

    @property
    def attention(self) -> AttentionSizes:
        """Widths of attention and indexer."""

    @property
    def moe(self) -> MoeSizes:
        """Experts of a layer."""


class Parts:
    """Weights under checkpoint names (float32, logical shapes ``[out, in]``) and what is computed with one layer's."""

    single_pass = True
    """A site collapses the streams with the mix of the site before it; otherwise with its own."""

    def __init__(self, topology: Sizes, weights: Mapping[str, torch.Tensor], run: Run) -> None:
        self.topology, self.weights, self.run = topology, weights, run

    def _rounded(self, x: torch.Tensor, block: int, how: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        return how(x) if self.run.caches and x.shape[-1] % block == 0 else x

    def round_window(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows of a window or a draft block as a cache keeps them."""
        return self._rounded(rows, 32, arithmetic.round_fp8)

    def round_entries(self, rows: torch.Tensor) -> torch.Tensor:
        """Compressed entries as a cache keeps them."""
        return self._rounded(rows, 16, arithmetic.round_fp4)

    def round_index(self, rows: torch.Tensor) -> torch.Tensor:
        """Index keys and queries."""
        return self._rounded(rows, 32, arithmetic.round_mxfp4)

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """RMSNorm with the weight ``name``."""
        return arithmetic.norm(x, self.weights[f"{name}.weight"], self.topology.eps, self.run.dtype)

    def plain(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """Product with a weight that the release does not quantise."""
        return arithmetic.product(x, self.weights[f"{name}.weight"], self.run.dtype)

    def linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """Product with a weight that the release quantises."""
        if self.run.activations and x.shape[-1] % 32 == 0:
            x = arithmetic.round_fp8(x)
        return self.plain(x, name)

    def site(self, streams: torch.Tensor, name: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Coefficients (pre, post, comb) of the site ``<prefix>hc_attn`` or ``<prefix>hc_ffn``."""
        w, t = self.weights, self.topology
        return arithmetic.mixes(streams, w[f"{name}_fn"], w[f"{name}_base"], w[f"{name}_scale"], t.eps, t.mix_eps, t.sinkhorn_iterations)

    def enter(
        self, streams: torch.Tensor, carried: torch.Tensor, prefix: str, site: str
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Normed input ``[R, d]`` of a sublayer (``attn`` or ``ffn``), and its site's pre, post and comb; ``carried`` is the pre before."""
        pre, post, comb = self.site(streams, f"{prefix}hc_{site}")
        collapsed = arithmetic.collapse(streams, carried if self.single_pass else pre, self.run.dtype)
        return self.norm(collapsed, f"{prefix}{site}_norm"), pre, post, comb

    def last_row(self, streams: torch.Tensor, carried: torch.Tensor, prefix: str) -> torch.Tensor:
        """Streams collapsed for a head ``[R, d]``, before its norm; ``prefix`` is empty for the model's own."""
        return arithmetic.collapse(streams, carried, self.run.dtype)

    def vocabulary(self, row: torch.Tensor) -> torch.Tensor:
        """Logits float32 ``[R, vocab]`` of normed rows."""
        return row.float() @ self.weights["head.weight"].to(self.run.dtype).float().T

    def start(self, embeddings: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Streams and mix that enter the first layer."""
        streams = embeddings.to(self.run.dtype)[:, None].repeat(1, self.topology.streams, 1)
        pre = torch.zeros(streams.shape[:2])
        pre[:, 0] = 1.0
        return streams, pre

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Embeddings ``[R, d]``."""
        return self.weights["embed.weight"][ids].to(self.run.dtype)

    def queries(self, u: torch.Tensor, prefix: str, positions: torch.Tensor, rope: RopeParameters) -> tuple[torch.Tensor, torch.Tensor]:
        """Turned heads ``[R, H, D]`` and the low-rank row ``[R, q_rank]`` they come from."""
        sizes = self.topology.attention
        low = self.norm(self.linear(u, f"{prefix}attn.wq_a"), f"{prefix}attn.q_norm")
        heads = self.linear(low, f"{prefix}attn.wq_b").view(-1, sizes.heads, sizes.head_dim)
        return arithmetic.turn(heads, positions, rope), low

    def window(self, u: torch.Tensor, prefix: str, positions: torch.Tensor, rope: RopeParameters) -> torch.Tensor:
        """Window rows ``[R, D]``, turned and rounded."""
        rows = self.norm(self.linear(u, f"{prefix}attn.wkv"), f"{prefix}attn.kv_norm")
        return self.round_window(arithmetic.turn(rows, positions, rope))

    def output(self, heads: torch.Tensor, prefix: str, positions: torch.Tensor, rope: RopeParameters) -> torch.Tensor:
        """Attention results ``[R, H, D]`` turned back and projected, group by group, to ``[R, d]``."""
        sizes = self.topology.attention
        grouped = arithmetic.turn(heads, positions, rope, back=True).reshape(-1, sizes.o_groups, sizes.group_width)
        down = self.weights[f"{prefix}attn.wo_a.weight"].view(sizes.o_groups, sizes.o_rank, sizes.group_width)
        low = [arithmetic.product(grouped[:, g], down[g], self.run.dtype) for g in range(sizes.o_groups)]
        return self.linear(torch.cat(low, -1), f"{prefix}attn.wo_b")

    def scores(self, u: torch.Tensor, prefix: str) -> torch.Tensor:
        """What experts are chosen and weighed by, float32 ``[R, experts]``."""
        logits = u.float() @ self.weights[f"{prefix}ffn.gate.weight"].to(self.run.dtype).float().T
        return F.softplus(logits / self.topology.moe.temperature).sqrt()

    def expert_weights(self, scores: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Weights ``[R, chosen]`` of the experts ``ids``."""
        moe, weights = self.topology.moe, scores.gather(1, ids)
        if moe.normalise and ids.shape[1] > 1:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return weights * moe.scale

    def route(self, u: torch.Tensor, prefix: str, chosen: int, image: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Experts ``[R, chosen]`` (best first) and their weights; ``image`` rows are routed by the bias of their own."""
        scores = self.scores(u, prefix)
        bias = self.weights[f"{prefix}ffn.gate.bias"].float().expand_as(scores)
        if image is not None:
            bias = torch.where(image[:, None], self.weights[f"{prefix}ffn.gate.bias_vl"].float(), bias)
        ids = (scores + bias).sort(dim=-1, descending=True, stable=True).indices[:, :chosen]
        return ids, self.expert_weights(scores, ids)

    def _expert(self, u: torch.Tensor, name: str, weight: torch.Tensor | None) -> torch.Tensor:
        inner = arithmetic.swiglu(self.linear(u, f"{name}.w1"), self.linear(u, f"{name}.w3"), self.topology.moe.limit)
        if weight is not None:
            inner = inner * weight[:, None]
        return self.linear(inner.to(self.run.dtype), f"{name}.w2").float()

    def experts(self, u: torch.Tensor, prefix: str, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Sum of the experts ``ids`` by their ``weights`` and the shared one, ``[R, d]``."""
        total = torch.zeros(u.shape)
        for expert in ids.unique().tolist():
            row, place = (ids == expert).nonzero(as_tuple=True)
            total[row] += self._expert(u[row], f"{prefix}ffn.experts.{expert}", weights[row, place])
        total += self._expert(u, f"{prefix}ffn.shared_experts", None)
        return total.to(self.run.dtype)

    def moe(self, u: torch.Tensor, prefix: str, chosen: int, image: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """The expert layer's result ``[R, d]``, and which were chosen."""
        ids, weights = self.route(u, prefix, chosen, image)
        return self.experts(u, prefix, ids, weights), ids
