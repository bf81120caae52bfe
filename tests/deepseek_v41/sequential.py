"""DeepSeek-V4.1 for one sequence in plain torch: every token at once, no pages, no rings, no batches.

Use: ``model = Sequential(topology, weights, Run(caches=False))``, then

- ``model.forward(ids)`` → ``Forward``: logits ``[R, vocab]`` float32, the input of every layer, window rows, entries, index keys,
  selections, candidate blocks, chosen experts, draft taps. ``R`` is the number of tokens unless rows were left out:
  ``first`` starts at a later position with ``restored`` entries (a prefix hit without windows), ``keep`` runs decoder layers on the
  last ``keep`` tokens only. ``image`` marks tokens of image spans, whose embeddings are given in ``span_rows``. ``forced`` and
  ``given`` put another implementation's layer inputs and shared values in place of the computed ones.
- ``model.layer(index, streams, pre, ...)`` → one layer alone, for comparisons that give each layer the same input.
- ``model.head(streams, pre)`` → logits of any layer's output, so a model of any depth can be read off one forward.
- ``drafts.draft(model, forward.taps, ...)`` → one call of the draft stages.

Weights are a mapping from checkpoint names to float32 tensors of logical shape (see ``weights_kit``). A window never reaches below
the first row that a layer runs on: with ``first`` or ``keep`` that is the floor of a replay. To go on behind a long context instead,
call ``layer`` with ``first``, ``restored`` entries and window rows in ``shared.history``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from deepinfer.models.deepseek_v41.shared_layers import LayerKind
from deepinfer.models.deepseek_v41.topology import DeepseekV41Topology, LayerPlan
from deepseek_v41 import arithmetic
from deepseek_v41.parts import Parts, Run

__all__ = ["Forward", "LayerOutput", "Run", "Sequential", "Shared", "in_order"]

_CHUNK = 64
"""Tokens whose scores or gathered rows are held at a time."""


@dataclass
class Shared:
    """What layers hand down within one forward, by the layer it comes from. What is already there is used, not computed."""

    entries: dict[int, torch.Tensor] = field(default_factory=dict)
    """``[E, head_dim]``, entry ``j`` of ratio ``r`` made of tokens ``j r … j r + r - 1``; turned and rounded."""
    index_keys: dict[int, torch.Tensor] = field(default_factory=dict)
    """``[E, index_dim]``."""
    selections: dict[int, torch.Tensor] = field(default_factory=dict)
    """int64 ``[R, min(topk, E)]``: entries ascending, −1 behind them."""
    scores: dict[int, torch.Tensor] = field(default_factory=dict)
    """Index scores ``[R, E]``, −inf where an entry is not visible or no candidate. Kept only on request."""
    pool: torch.Tensor | None = None
    """Candidate blocks, bool ``[R, blocks]``."""
    windows: dict[int, torch.Tensor] = field(default_factory=dict)
    """Window rows of every layer ``[R, head_dim]``, turned and rounded."""
    history: dict[int, torch.Tensor] = field(default_factory=dict)
    """Window rows of the positions just before the first row, oldest first: given to continue a sequence, never made."""

    def copy(self) -> Shared:
        """The same tensors in dictionaries of their own."""
        return Shared(
            entries=dict(self.entries),
            index_keys=dict(self.index_keys),
            selections=dict(self.selections),
            scores=dict(self.scores),
            pool=self.pool,
            windows=dict(self.windows),
            history=dict(self.history),
        )

    def without(self, layer: int, candidate_source: int | None) -> Shared:
        """A copy in which ``layer`` has shared nothing yet."""
        fewer = self.copy()
        for values in (fewer.entries, fewer.index_keys, fewer.selections, fewer.scores, fewer.windows):
            values.pop(layer, None)
        if layer == candidate_source:
            fewer.pool = None
        return fewer


def in_order(chosen: torch.Tensor) -> torch.Tensor:
    """Selections of any implementation as ``Shared`` keeps them: ascending with −1 behind them, int64."""
    last = torch.iinfo(torch.int64).max
    rising = torch.where(chosen < 0, last, chosen.long()).sort(-1).values
    return torch.where(rising == last, -1, rising)


@dataclass
class LayerOutput:
    """Streams ``[R, n, d]`` and the mix ``[R, n]`` that the next layer collapses them with; chosen experts ``[R, k]``."""

    streams: torch.Tensor
    pre: torch.Tensor
    experts: torch.Tensor


@dataclass
class Forward:
    """Results of one forward; ``logits``, ``taps`` and inputs of decoder layers start at position ``first_row``."""

    logits: torch.Tensor
    first_row: int
    inputs: list[tuple[torch.Tensor, torch.Tensor]]
    """(streams, pre) that enter layer ``i``, before Engram; the last ones enter the head."""
    shared: Shared
    experts: list[torch.Tensor]
    taps: torch.Tensor
    """``[R, taps, d]``: mean over the streams that enter the tapped layers."""


class Sequential(Parts):
    """The backbone; ``token_map`` int64 ``[vocab]`` gives compressed ids for Engram, identity unless given."""

    def __init__(
        self,
        topology: DeepseekV41Topology,
        weights: Mapping[str, torch.Tensor],
        run: Run = Run(),  # noqa: B008 (frozen)
        token_map: torch.Tensor | None = None,
    ) -> None:
        super().__init__(topology, weights, run)
        self.topology: DeepseekV41Topology = topology
        self.token_map = torch.arange(topology.vocab) if token_map is None else token_map

    # Engram

    def dead(self, ids: torch.Tensor, image: torch.Tensor | None) -> torch.Tensor:
        """Tokens that take no part in n-grams: of image spans, or without a compressed id."""
        dead = self.token_map[ids] < 0
        return dead if image is None else dead | image

    def engram_rows(self, table: int, ids: torch.Tensor, image: torch.Tensor | None = None) -> torch.Tensor:
        """Table rows int64 ``[T, columns]`` of every token, n-gram size major; −1 for dead tokens."""
        e = self.topology.engram
        assert e is not None
        compressed, dead = self.token_map[ids].tolist(), self.dead(ids, image).tolist()
        pad = int(self.token_map[e.pad_token])
        rows = torch.full((len(compressed), e.columns), -1)
        for t in range(len(compressed)):
            if dead[t]:
                continue
            mixed, column, offset, reached = compressed[t] * e.multipliers[table][0], 0, 0, True
            for back in range(1, e.longest):
                reached = reached and t >= back and not dead[t - back]
                mixed ^= (compressed[t - back] if reached else pad) * e.multipliers[table][back]
                for prime in e.primes[table][back - 1]:
                    rows[t, column] = mixed % prime + offset
                    column, offset = column + 1, offset + prime
        return rows

    def add_engram(self, streams: torch.Tensor, index: int, rows: torch.Tensor) -> torch.Tensor:
        """Streams plus the gated value; ``rows`` ``[R, columns]`` as of ``engram_rows``."""
        return self.engram_gate(streams, index, rows)[0]

    def engram_gate(self, streams: torch.Tensor, index: int, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """New streams, and the gates ``[R, n]``."""
        w, t, prefix = self.weights, self.topology, f"layers.{index}.engram."
        found = w[f"{prefix}embed.weight"][rows.clamp_min(0)].flatten(1).to(self.run.dtype)
        key, value = self.linear(found, f"{prefix}wkv").float().split([t.streams * t.hidden, t.hidden], -1)
        key, x = key.view(-1, t.streams, t.hidden), streams.float()
        dot = (x * w[f"{prefix}q_weight"].float() * w[f"{prefix}k_weight"].float() * key).sum(-1)
        dot = dot * torch.rsqrt(x.square().mean(-1) + t.eps) * torch.rsqrt(key.square().mean(-1) + t.eps) * t.hidden**-0.5
        gate = torch.sigmoid(torch.copysign(dot.abs().clamp_min(1e-6).sqrt(), dot))
        gate = torch.where(rows[:, :1] < 0, 0.0, gate)
        return (x + gate[..., None] * value[:, None]).to(streams.dtype), gate

    # Compressed entries and their selection

    def compress(self, index: int, u: torch.Tensor, first: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Entries ``[E, head_dim]`` and index keys ``[E, index_dim]`` of the whole groups in ``u``, which starts at position ``first``."""
        plan, prefix = self.topology.layers[index], f"layers.{index}.attn."
        ratio, name = plan.ratio, f"{prefix}compressor"
        groups = u.shape[0] // ratio
        if ratio == 1:
            latent = self.norm(self.plain(u, f"{name}.wkv"), f"{name}.norm")
        else:
            pairs = u[: groups * ratio].float()
            content = arithmetic.product(pairs, self.weights[f"{name}.wkv.weight"], torch.float32)
            gate = arithmetic.product(pairs, self.weights[f"{name}.wgate.weight"], torch.float32)
            mixed = (content.unflatten(0, (-1, ratio)) * gate.unflatten(0, (-1, ratio)).softmax(1)).sum(1)
            latent = self.norm(mixed, f"{name}.norm")
        positions = first + torch.arange(groups) * ratio
        rope = self.topology.rope_compress
        keys = self.norm(self.plain(latent, f"{prefix}indexer.wk"), f"{prefix}indexer.k_norm")
        return self.round_entries(arithmetic.turn(latent, positions, rope)), self.round_index(arithmetic.turn(keys, positions, rope))

    def _fill(self, index: int, u: torch.Tensor, first: int, shared: Shared, restored: tuple[torch.Tensor, torch.Tensor] | None) -> None:
        """Entries of a source; those that were ``restored`` stay as they are."""
        if index in shared.entries:
            return
        ratio = self.topology.layers[index].ratio
        assert first % ratio == 0, "rows that start within a group"
        entries, keys = self.compress(index, u, first)
        if restored is not None:
            new = restored[0].shape[0] - first // ratio
            assert new >= 0, "entries between the restored ones and the first row are missing"
            entries, keys = torch.cat((restored[0], entries[new:])), torch.cat((restored[1], keys[new:]))
        shared.entries[index], shared.index_keys[index] = entries, keys

    def _pool(self, scores: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
        """The best blocks of entries for each token, by their best entry; the one with the newest visible entry is always in."""
        sizes, rows = self.topology.attention, scores.shape[0]
        blocks = -(-scores.shape[1] // sizes.candidate_block)
        padded = torch.full((rows, blocks * sizes.candidate_block), -torch.inf)
        padded[:, : scores.shape[1]] = scores
        best = padded.view(rows, blocks, sizes.candidate_block).amax(-1)
        newest = (visible - 1) // sizes.candidate_block
        best[(torch.arange(blocks) == newest[:, None]) & (visible > 0)[:, None]] = torch.inf
        chosen = arithmetic.highest(best, min(sizes.candidate_blocks, blocks))
        pool = torch.zeros(rows, blocks + 1, dtype=torch.bool)
        pool.scatter_(1, torch.where(chosen < 0, blocks, chosen), True)
        return pool[:, :blocks]

    def _select(self, plan: LayerPlan, u: torch.Tensor, low: torch.Tensor, positions: torch.Tensor, shared: Shared, keep: bool) -> None:
        """Selection of an index source, and the pool if it is the candidate source."""
        if plan.index in shared.selections or plan.index_source != plan.index:
            return
        assert plan.index_key_source is not None
        sizes, prefix = self.topology.attention, f"layers.{plan.index}.attn.indexer"
        keys = shared.index_keys[plan.index_key_source].float()
        heads = self.linear(low, f"{prefix}.wq_b").view(-1, sizes.index_heads, sizes.index_dim)
        heads = self.round_index(arithmetic.turn(heads, positions, self.topology.rope_compress)).float()
        weights = self.plain(u, f"{prefix}.weights_proj").float() * sizes.index_dim**-0.5 * sizes.index_heads**-0.5
        count, source = min(sizes.index_topk, keys.shape[0]), plan.index == self.topology.shared.candidate_source
        chosen, pools, kept = [], [], []
        for start in range(0, u.shape[0], _CHUNK):
            part = slice(start, start + _CHUNK)
            visible = (positions[part] + 1) // plan.ratio
            scores = torch.zeros(heads[part].shape[0], keys.shape[0])
            for head in range(sizes.index_heads):
                scores += weights[part, head, None] * (heads[part, head] @ keys.T).relu()
            scores = scores.masked_fill(torch.arange(keys.shape[0]) >= visible[:, None], -torch.inf)
            if source:
                pools.append(self._pool(scores, visible))
            if plan.candidates:
                assert shared.pool is not None
                member = shared.pool[part].repeat_interleave(sizes.candidate_block, 1)[:, : keys.shape[0]]
                scores = scores.masked_fill(~member, -torch.inf)
            chosen.append(arithmetic.highest(scores, count))
            if keep:
                kept.append(scores)
        shared.selections[plan.index] = torch.cat(chosen)
        if source and shared.pool is None:
            shared.pool = torch.cat(pools)
        if keep:
            shared.scores[plan.index] = torch.cat(kept)

    def _attend(self, q: torch.Tensor, window: torch.Tensor, plan: LayerPlan, shared: Shared) -> torch.Tensor:
        """Heads over their window and, if the layer has a source, over its selected entries."""
        sizes = self.topology.attention
        sink, results = self.weights[f"layers.{plan.index}.attn.attn_sink"], []
        back = torch.arange(sizes.window - 1, -1, -1)
        earlier = shared.history.get(plan.index)
        before = 0 if earlier is None else earlier.shape[0]
        if earlier is not None:
            window = torch.cat((earlier, window))
        for start in range(0, q.shape[0], _CHUNK):
            part = slice(start, start + _CHUNK)
            row = before + start + torch.arange(q[part].shape[0])[:, None] - back
            rows, present = window[row.clamp_min(0)], row >= 0
            if plan.kv_source is not None and plan.index_source is not None:
                entries, chosen = shared.entries[plan.kv_source], shared.selections[plan.index_source][part]
                if chosen.shape[1]:
                    rows = torch.cat((rows, entries[chosen.clamp_min(0)]), 1)
                    present = torch.cat((present, chosen >= 0), 1)
            results.append(arithmetic.attend(q[part], rows, present, sink, sizes.head_dim**-0.5))
        return torch.cat(results)

    # Layers

    def layer(
        self,
        index: int,
        streams: torch.Tensor,
        pre: torch.Tensor,
        shared: Shared,
        *,
        first: int = 0,
        rows: torch.Tensor | None = None,
        image: torch.Tensor | None = None,
        restored: tuple[torch.Tensor, torch.Tensor] | None = None,
        keep_scores: bool = False,
    ) -> LayerOutput:
        """Layer ``index`` on the tokens from position ``first`` on; its window reaches below that only into ``shared.history``.

        ``streams`` ``[R, n, d]`` and ``pre`` ``[R, n]`` as the layer before left them; ``rows`` ``[R, columns]`` for Engram.
        What the layer shares is added to ``shared`` (or taken from there, if present).
        """
        plan, prefix = self.topology.layers[index], f"layers.{index}."
        if rows is not None and plan.engram is not None and self.run.engram:
            streams = self.add_engram(streams, index, rows)
        positions = first + torch.arange(streams.shape[0])
        rope = self.topology.rope_compress if plan.stretched_rope else self.topology.rope_main
        u, pre, post, comb = self.enter(streams, pre, prefix, "attn")
        q, low = self.queries(u, prefix, positions, rope)
        if index not in shared.windows:
            shared.windows[index] = self.window(u, prefix, positions, rope)
        if plan.kind is LayerKind.FULL:
            self._fill(index, u, first, shared, restored)
        if plan.index_source is not None:
            self._select(plan, u, low, positions, shared, keep_scores)
        y = self.output(self._attend(q, shared.windows[index], plan, shared), prefix, positions, rope)
        streams = arithmetic.expand(y, streams, post, comb)
        u, pre, post, comb = self.enter(streams, pre, prefix, "ffn")
        y, experts = self.moe(u, prefix, self.topology.moe.chosen, image)
        return LayerOutput(arithmetic.expand(y, streams, post, comb), pre, experts)

    def head(self, streams: torch.Tensor, pre: torch.Tensor) -> torch.Tensor:
        """Logits float32 ``[R, vocab]``."""
        return self.vocabulary(self.norm(self.last_row(streams, pre, ""), "norm"))

    def forward(
        self,
        ids: torch.Tensor,
        *,
        image: torch.Tensor | None = None,
        span_rows: torch.Tensor | None = None,
        first: int = 0,
        restored: Mapping[int, tuple[torch.Tensor, torch.Tensor]] | None = None,
        keep: int | None = None,
        forced: Mapping[int, tuple[torch.Tensor, torch.Tensor]] | None = None,
        given: Shared | None = None,
        keep_scores: bool = False,
    ) -> Forward:
        """All layers on ``ids`` int64 ``[T]``.

        ``image`` bool ``[T]`` and ``span_rows`` ``[image.sum(), d]``: embeddings of image spans. ``first``, with ``restored`` entries and
        index keys per source: only positions from ``first`` on are computed. ``keep``: decoder layers run on the last ``keep`` of these
        (the decoder's entries still come from all of them). ``forced`` replaces the (streams, pre) that enter a layer, ``given``
        the values that layers share.
        """
        t, restored, forced = self.topology, restored or {}, forced or {}
        embeddings = self.embed(ids)
        if image is not None and span_rows is not None:
            embeddings = embeddings.index_put((image,), span_rows.to(embeddings.dtype))
        tables: dict[int, torch.Tensor] = {}
        if t.engram is not None and self.run.engram:
            tables = {layer: self.engram_rows(number, ids, image)[first:] for number, layer in enumerate(t.engram.layers)}
        streams, pre = self.start(embeddings[first:])
        span = None if image is None else image[first:]
        shared = Shared() if given is None else given.copy()
        inputs, experts, taps = [], [], []
        for plan in t.layers:
            index = plan.index
            if index == t.encoder_layers and keep is not None and keep < streams.shape[0]:
                u = self.norm(arithmetic.collapse(streams, pre, self.run.dtype), f"layers.{index}.attn_norm")
                self._fill(index, u, first, shared, restored.get(index))
                first += streams.shape[0] - keep
                streams, pre = streams[-keep:], pre[-keep:]
                span = None if span is None else span[-keep:]
            streams, pre = forced.get(index, (streams, pre))
            inputs.append((streams, pre))
            if plan.tapped:
                taps.append(streams.float().mean(1).to(self.run.dtype))
            out = self.layer(
                index,
                streams,
                pre,
                shared,
                first=first,
                rows=tables.get(index),
                image=span,
                restored=restored.get(index),
                keep_scores=keep_scores,
            )
            streams, pre = out.streams, out.pre
            experts.append(out.experts)
        inputs.append((streams, pre))
        tapped = torch.stack(taps, 1) if taps else torch.empty(streams.shape[0], 0, t.hidden)
        return Forward(self.head(streams, pre), first, inputs, shared, experts, tapped)
