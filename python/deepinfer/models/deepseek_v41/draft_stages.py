"""DSpark: stages that make a block of drafts at once, a Markov head that chains them, a head that says how likely each is right.

The stages read the backbone through its taps: every row of a step leaves a window row in each stage's ring, by position, so that rows of
drafts that are taken back are overwritten like those of any layer. A block's first row is the newest token, the others are a noise token;
each row sees the window before the block and the whole block.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F

from ...distributed import spread_experts
from ...kernels.cache_rows import PagedRows, StepRows
from ...kernels.linear import PackedLinear, row_bucket
from ...kernels.rms_norm import rms_norm
from ...kernels.rope import RopeTable
from ...kernels.sparse_attention import two_source_attention
from ...kernels.stream_mix import collapse
from ...kernels.window_rows import WindowPlan, WindowRows
from ..base import Drafts, DrawDrafts, ForwardBatch, NewTokens
from .caches import CachePlan
from .containers import DraftParameters, LayerParameters
from .heads import Heads
from .layer import Sites
from .ops import begin_streams
from .packed import PackedHeads, Projection
from .step import LayerRows
from .topology import DeepseekV41Topology


class _Block:
    """A draft call's rows: ``b`` for each of ``m`` places, padded; what all stages share."""

    def __init__(self, size: int, new: NewTokens, slots: torch.Tensor, floor: torch.Tensor, rope: RopeTable, padded: int) -> None:
        places, device = new.token.shape[0], new.token.device
        self.size, self.rows = size, places * size
        more = (0, padded - self.rows)
        row_seq = torch.arange(places, device=device).repeat_interleave(size)
        last = new.position - 1  # the ring's newest row that counts
        cu_q = torch.arange(places + 1, dtype=torch.int32, device=device) * size
        self.step = StepRows(F.pad(last[row_seq], more), F.pad(row_seq, more), cu_q, slots)
        self.floor = F.pad(floor[row_seq], more)
        self.angles = rope.pair_cos_sin(F.pad((new.position[:, None] + torch.arange(size, device=device)).flatten(), more))
        self.table = torch.arange(places, dtype=torch.int32, device=device)[:, None]
        self.all = torch.arange(size, dtype=torch.int32, device=device).expand(padded, size)


class DraftStage:
    """One stage in runtime layout."""

    def __init__(self, p: LayerParameters, t: DeepseekV41Topology, name: str, dtype: torch.dtype) -> None:
        self._t, self._ring = t, f"{name}.window"
        self._heads = Heads(p.attn, t.attention, t.eps, t.quantised_weights, dtype)
        self._latent = Projection(p.attn.wkv, t.quantised_weights)
        self._sites = Sites(p, t, t.drafts.chosen, dtype)

    def keep(self, main: torch.Tensor, rows: LayerRows, state: Mapping[str, torch.Tensor], caches: CachePlan) -> None:
        """Window rows of ``main`` ``[T, d]``, stored by position."""
        own = self._heads.turned(self._latent(main), rows.main)
        rows.window.store(state[self._ring], caches.window.store(own))

    def __call__(
        self,
        streams: tuple[torch.Tensor, torch.Tensor],
        block: _Block,
        window: WindowPlan,
        state: Mapping[str, torch.Tensor],
        caches: CachePlan,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Streams of the block's rows behind the stage."""
        ring = WindowRows(window, state[self._ring], None, caches.window)
        return self._sites(streams, lambda u: self._attend(u, block, ring, caches))

    def _attend(self, u: torch.Tensor, block: _Block, window: WindowRows, caches: CachePlan) -> torch.Tensor:
        heads = self._heads
        q, _, latent = heads.enter(u, block.angles)
        own = caches.window.store(latent)
        entries = PagedRows(own[: block.rows].unflatten(0, (-1, block.size)), block.table, caches.window)
        return heads.leave(two_source_attention(q, window, entries, block.all, heads.sink, heads.scale), block.angles)


class DraftStages:
    """All stages with their heads; ``head`` and ``embed`` are the backbone's."""

    def __init__(self, p: DraftParameters, t: DeepseekV41Topology, embed: torch.Tensor, head: PackedLinear, dtype: torch.dtype) -> None:
        self._t, self._embed, self._head, self._dtype = t, embed, head, dtype
        self._heads = PackedHeads.pack(p, t.quantised_weights)
        with spread_experts(None):  # as their parameters are
            self._stages = [DraftStage(stage, t, f"mtp.{index}", dtype) for index, stage in enumerate(p.stages)]

    def keep(self, taps: list[torch.Tensor], rows: LayerRows, state: Mapping[str, torch.Tensor], caches: CachePlan) -> None:
        """Stores what the stages remember of a step: ``taps`` ``[D, d]`` of each tapped layer, of ``rows``."""
        h = self._heads
        main = rms_norm(h.main(torch.cat(taps, -1)), h.main_norm, self._t.eps)
        for stage in self._stages:
            stage.keep(main, rows, state, caches)

    def __call__(
        self,
        batch: ForwardBatch,
        new: NewTokens,
        state: Mapping[str, torch.Tensor],
        caches: CachePlan,
        rope: RopeTable,
        quantum: int,
        draw: DrawDrafts,
        count: int,
    ) -> Drafts:
        """See ``models.base.Drafter``. The block is always whole; of its drafts the first ``count`` are made."""
        t, size, places = self._t, self._t.drafts.block, new.token.shape[0]
        if batch.state is None:
            raise ValueError("a model with state needs a batch that says where it is (ForwardBatch.state)")
        slots = batch.state.state_row.index_select(0, new.sequence)
        floors = torch.maximum(batch.state.floor[:, 1], batch.state.decoder_from).long()
        block = _Block(size, new, slots, floors.index_select(0, new.sequence), rope, row_bucket(places * size, quantum))
        window = WindowPlan(block.step, t.attention.window, caches.ring, block.floor, own=False)
        ids = torch.full((places, size), t.drafts.noise_token, dtype=torch.int64, device=new.token.device)
        ids[:, 0] = new.token
        streams = begin_streams(F.embedding(F.pad(ids.flatten(), (0, block.step.rows - block.rows)), self._embed), t.streams)
        for stage in self._stages:
            streams = stage(streams, block, window, state, caches)
        hidden = collapse(*streams, self._dtype)
        normed = rms_norm(hidden, self._heads.norm, t.eps)
        shape = (places, size, t.hidden)
        return self._chain(hidden[: block.rows].view(shape), normed[: block.rows].view(shape), new.token, draw, count)

    def _chain(self, hidden: torch.Tensor, normed: torch.Tensor, before: torch.Tensor, draw: DrawDrafts, count: int) -> Drafts:
        """Drafts one behind the other, each given the one before it; ``hidden`` and ``normed`` ``[m, b, d]``."""
        h = self._heads
        made: list[torch.Tensor] = []
        confidence: list[torch.Tensor] = []
        for nth in range(count):
            seen = F.embedding(before, h.markov).float()
            logits = self._head(normed[:, nth].float()) + h.spread(seen)
            confidence.append((torch.cat((hidden[:, nth].float(), seen), -1) * h.confidence).sum(-1))
            past = torch.stack(made, 1) if made else before.new_empty((before.shape[0], 0))
            before = draw(logits, nth, past)
            made.append(before)
        return Drafts(torch.stack(made, 1), torch.stack(confidence, 1))
