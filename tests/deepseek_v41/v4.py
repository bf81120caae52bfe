"""DeepSeek-V4 (not V4.1) for one sequence: `sequential` with V4's wiring.

What differs from V4.1: a site collapses the streams by its own mix, and the head by one of its own (``hc_head``); queries are
normed per head, without a weight; CSA layers (ratio 4) pool each window of tokens together with the one before it and select by index
keys pooled in the same way with weights of their own; HCA layers pool long windows and read all of them; ``ape`` is added to the gates of
a window by place; the first layers take their experts from a table by token id. Every layer has its own cache, nothing is shared.

Use: ``model = SequentialV4(plan, weights)`` (see ``v4_kit``), ``model.forward(ids)`` → logits ``[T, vocab]`` float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from deepinfer.kernels.rope import RopeParameters
from deepinfer.models.deepseek_v41.topology import AttentionSizes, DraftTopology, MoeSizes
from deepseek_v41 import arithmetic
from deepseek_v41.parts import Parts, Run

_CHUNK = 64


@dataclass(frozen=True)
class V4Plan:
    """Sizes and wiring; ``ratios`` per layer: 0 = window only, ``csa_ratio`` = CSA, anything else = HCA."""

    vocab: int
    hidden: int
    eps: float
    streams: int
    sinkhorn_iterations: int
    mix_eps: float
    attention: AttentionSizes
    moe: MoeSizes
    ratios: tuple[int, ...]
    csa_ratio: int
    hashed: tuple[bool, ...]
    """Layers whose experts are given by token id."""
    rope_main: RopeParameters
    rope_compress: RopeParameters
    drafts: DraftTopology


@dataclass
class V4Forward:
    """Results of one forward; lists have one place per layer, None where a layer has no such thing."""

    logits: torch.Tensor
    inputs: list[torch.Tensor]
    """Streams ``[T, n, d]`` that enter layer ``i``; the last ones enter the head."""
    windows: list[torch.Tensor]
    entries: list[torch.Tensor | None]
    index_keys: list[torch.Tensor | None]
    selections: list[torch.Tensor | None]
    """int64 ``[T, k]``, ascending, −1 behind."""
    experts: list[torch.Tensor]


class SequentialV4(Parts):
    """The model, with draft stages if its plan has any (``drafts.draft``).

    V4's caches are not rounded unless ``run`` says so (in V4.1's formats).
    """

    single_pass = False

    def __init__(self, plan: V4Plan, weights: Mapping[str, torch.Tensor], run: Run = Run(caches=False)) -> None:  # noqa: B008 (frozen)
        super().__init__(plan, weights, run)
        self.topology: V4Plan = plan

    def queries(self, u: torch.Tensor, prefix: str, positions: torch.Tensor, rope: RopeParameters) -> tuple[torch.Tensor, torch.Tensor]:
        """As in V4.1, each head normed before it is turned."""
        sizes = self.topology.attention
        low = self.norm(self.linear(u, f"{prefix}attn.wq_a"), f"{prefix}attn.q_norm")
        heads = self.linear(low, f"{prefix}attn.wq_b").view(-1, sizes.heads, sizes.head_dim)
        heads = arithmetic.norm(heads, None, self.topology.eps, self.run.dtype)
        return arithmetic.turn(heads, positions, rope), low

    def pool(self, u: torch.Tensor, name: str, ratio: int, width: int, overlap: bool) -> torch.Tensor:
        """Entries ``[T // ratio, width]`` of the whole windows in ``u``, normed and turned to each window's first position.

        With ``overlap`` projections have two halves: a window's entry is pooled from its own tokens' second halves and the first
        halves of the tokens of the window before it.
        """
        windows, columns = u.shape[0] // ratio, 2 * width if overlap else width
        whole = u[: windows * ratio].float()
        content = arithmetic.product(whole, self.weights[f"{name}.wkv.weight"], torch.float32).view(windows, ratio, columns)
        gate = arithmetic.product(whole, self.weights[f"{name}.wgate.weight"], torch.float32).view(windows, ratio, columns)
        gate = gate + self.weights[f"{name}.ape"].float()
        if overlap:
            # the first window has none before it
            none, never = torch.zeros(1, ratio, width), torch.full((1, ratio, width), -torch.inf)
            earlier = torch.cat((none, content[:, :, :width]))[:windows]
            earlier_gate = torch.cat((never, gate[:, :, :width]))[:windows]
            content = torch.cat((earlier, content[:, :, width:]), 1)
            gate = torch.cat((earlier_gate, gate[:, :, width:]), 1)
        latent = self.norm((content * gate.softmax(1)).sum(1), f"{name}.norm")
        return arithmetic.turn(latent, torch.arange(windows) * ratio, self.topology.rope_compress)

    def _select(self, u: torch.Tensor, low: torch.Tensor, prefix: str, ratio: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Selection ``[T, k]`` and index keys of a CSA layer."""
        sizes, name, positions = self.topology.attention, f"{prefix}attn.indexer", torch.arange(u.shape[0])
        keys = self.round_index(self.pool(u, f"{name}.compressor", ratio, sizes.index_dim, True)).float()
        heads = self.linear(low, f"{name}.wq_b").view(-1, sizes.index_heads, sizes.index_dim)
        heads = self.round_index(arithmetic.turn(heads, positions, self.topology.rope_compress)).float()
        weights = self.plain(u, f"{name}.weights_proj").float() * sizes.index_dim**-0.5 * sizes.index_heads**-0.5
        scores = torch.zeros(u.shape[0], keys.shape[0])
        for head in range(sizes.index_heads):
            scores += weights[:, head, None] * (heads[:, head] @ keys.T).relu()
        visible = (positions + 1) // ratio
        scores = scores.masked_fill(torch.arange(keys.shape[0]) >= visible[:, None], -torch.inf)
        return arithmetic.highest(scores, min(sizes.index_topk, keys.shape[0])), keys

    def _attend(
        self, q: torch.Tensor, window: torch.Tensor, entries: torch.Tensor | None, chosen: torch.Tensor | None, sink: torch.Tensor
    ) -> torch.Tensor:
        """Heads over their window and the ``chosen`` ``[T, k]`` entries."""
        sizes, results, back = self.topology.attention, [], torch.arange(self.topology.attention.window - 1, -1, -1)
        for start in range(0, q.shape[0], _CHUNK):
            part = slice(start, start + _CHUNK)
            row = start + torch.arange(q[part].shape[0])[:, None] - back
            rows, present = window[row.clamp_min(0)], row >= 0
            if entries is not None and chosen is not None and chosen.shape[1]:
                rows = torch.cat((rows, entries[chosen[part].clamp_min(0)]), 1)
                present = torch.cat((present, chosen[part] >= 0), 1)
            results.append(arithmetic.attend(q[part], rows, present, sink, sizes.head_dim**-0.5))
        return torch.cat(results)

    def layer(self, index: int, streams: torch.Tensor, ids: torch.Tensor, seen: V4Forward) -> torch.Tensor:
        """Streams behind layer ``index``; what it makes is added to ``seen``."""
        t, prefix, ratio, positions = self.topology, f"layers.{index}.", self.topology.ratios[index], torch.arange(streams.shape[0])
        pre = torch.empty(0)  # nothing is carried from site to site
        rope = t.rope_compress if ratio else t.rope_main
        u, pre, post, comb = self.enter(streams, pre, prefix, "attn")
        q, low = self.queries(u, prefix, positions, rope)
        window = self.window(u, prefix, positions, rope)
        entries = chosen = keys = None
        if ratio:
            csa = ratio == t.csa_ratio
            entries = self.round_entries(self.pool(u, f"{prefix}attn.compressor", ratio, t.attention.head_dim, csa))
            if csa:
                chosen, keys = self._select(u, low, prefix, ratio)
            else:
                every = torch.arange(entries.shape[0]).expand(streams.shape[0], -1)
                chosen = torch.where(every < ((positions + 1) // ratio)[:, None], every, -1)
        heads = self._attend(q, window, entries, chosen, self.weights[f"{prefix}attn.attn_sink"])
        streams = arithmetic.expand(self.output(heads, prefix, positions, rope), streams, post, comb)
        u, pre, post, comb = self.enter(streams, pre, prefix, "ffn")
        if t.hashed[index]:
            experts = self.weights[f"{prefix}ffn.gate.tid2eid"][ids]
            y = self.experts(u, prefix, experts, self.expert_weights(self.scores(u, prefix), experts))
        else:
            y, experts = self.moe(u, prefix, t.moe.chosen, None)
        seen.windows.append(window)
        seen.entries.append(entries)
        seen.index_keys.append(keys)
        seen.selections.append(chosen)
        seen.experts.append(experts)
        return arithmetic.expand(y, streams, post, comb)

    def last_row(self, streams: torch.Tensor, carried: torch.Tensor, prefix: str) -> torch.Tensor:
        """As in V4.1, with a mix that the head has weights for."""
        t, flat, name = self.topology, streams.flatten(1).float(), f"{prefix}hc_head"
        mix = (flat @ self.weights[f"{name}_fn"].float().T) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + t.eps)
        pre = torch.sigmoid(mix * self.weights[f"{name}_scale"] + self.weights[f"{name}_base"]) + t.mix_eps
        return arithmetic.collapse(streams, pre, self.run.dtype)

    def head(self, streams: torch.Tensor) -> torch.Tensor:
        """Logits float32 ``[T, vocab]``."""
        return self.vocabulary(self.norm(self.last_row(streams, torch.empty(0), ""), "norm"))

    def forward(self, ids: torch.Tensor) -> V4Forward:
        """All layers on ``ids`` int64 ``[T]``."""
        streams, _ = self.start(self.embed(ids))
        seen = V4Forward(torch.empty(0), [streams], [], [], [], [], [])
        for index in range(len(self.topology.ratios)):
            seen.inputs.append(self.layer(index, seen.inputs[-1], ids, seen))
        seen.logits = self.head(seen.inputs[-1])
        return seen
