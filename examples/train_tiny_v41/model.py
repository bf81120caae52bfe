"""The backbone on a batch of equally long sequences, every layer dense and differentiable: what is trained.

Owns: parameters, the forward, the indexer's loss, routing loads. Never touches: data, optimisers, files.

The same model that the engine runs, in another form: attention is a product over all rows with a mask of window and selection, and
every expert sees every token with a weight that is 0 for most. Parameters carry checkpoint names; experts of a layer are stacked
(``…ffn.experts.w1`` ``[experts, out, in]``). Shapes: ``B`` sequences of ``S`` tokens, ``E`` compressed entries.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

import functions as f
import torch
import torch.nn.functional as F

from deepinfer.kernels.engram_hash import engram_hash
from deepinfer.kernels.rope import RopeTable
from deepinfer.models.deepseek_v41.parameters import weights
from deepinfer.models.deepseek_v41.shared_layers import LayerKind
from deepinfer.models.deepseek_v41.topology import DeepseekV41Topology, LayerPlan

_STACK = re.compile(r"^(.*\.experts)\.(w\d)$")
_EXPERT = re.compile(r"^(.*\.experts)\.(\d+)\.(w\d)\.weight$")


@dataclass
class Rounding:
    """What is rounded to the formats it is stored or multiplied in; all of it in what the engine runs."""

    caches: bool = False
    weights: bool = False
    activations: bool = False


@dataclass
class Shared:
    """What layers hand down within one forward, by source layer."""

    entries: dict[int, torch.Tensor] = field(default_factory=dict)
    """``[B, E, head_dim]``."""
    keys: dict[int, torch.Tensor] = field(default_factory=dict)
    """``[B, E, index_dim]``."""
    chosen: dict[int, torch.Tensor] = field(default_factory=dict)
    """Entries each token attends to, bool ``[B, S, E]``."""
    pool: torch.Tensor | None = None
    """Entries of candidate blocks, bool ``[B, S, E]``."""


@dataclass
class Forward:
    """Results of one forward; sums are over layers."""

    logits: torch.Tensor
    """float32 ``[B, S, vocab]``."""
    taps: torch.Tensor
    """``[B, S, taps, d]``: inputs of the draft stages."""
    indexer: torch.Tensor
    """KL of the index scores' softmax from the attention they should predict, mean over tokens, summed over index sources."""
    balance: torch.Tensor
    """Mean over layers of the sequence-wise balance loss."""
    loads: dict[str, torch.Tensor]
    """Share of tokens per expert ``[experts]`` of every expert layer, by prefix."""
    recall: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
    """By index source, where measured: recall of the selection against the entries attention would weigh most, share of the
    entries' attention it catches, and the share the best selection of that size would catch."""


def stacked_shapes(topology: DeepseekV41Topology) -> dict[str, tuple[int, ...]]:
    """Shapes of all parameters, experts of a layer in one."""
    shapes: dict[str, tuple[int, ...]] = {}
    for weight in weights(topology):
        found = _EXPERT.match(weight.name)
        if found is None:
            shapes[weight.name] = weight.shape
        else:
            shapes[f"{found[1]}.{found[3]}"] = (int(found[2]) + 1, *weight.shape)
    return shapes


def initial(name: str, shape: tuple[int, ...], generator: torch.Generator, depth: int, streams: int) -> torch.Tensor:
    """A parameter before training, float32: mixes near the identity, products that keep sizes, small results of sublayers."""
    last = name.rpartition(".")[2]
    if last.startswith("hc_") and last.endswith("_base"):
        base = torch.zeros(shape)
        base[2 * streams :] = 4 * torch.eye(streams).flatten()
        return base
    if last.startswith("hc_") and last.endswith("_scale"):
        return torch.full(shape, 0.1)
    if name.endswith(("norm.weight", "q_weight", "k_weight")):
        return torch.ones(shape)
    if last in ("attn_sink", "bias", "bias_vl"):
        return torch.zeros(shape)
    deviation = shape[-1] ** -0.5
    if last.endswith("_fn") or name in ("head.weight",) or "markov_head" in name or "confidence_head" in name:
        deviation = 0.02
    elif name.endswith(("embed.weight",)):
        deviation = 0.3
    elif re.search(r"wo_b\.weight$|w2(\.weight)?$|engram\.wkv\.weight$", name):
        deviation *= (2 * depth) ** -0.5
    return torch.randn(shape, generator=generator) * deviation


class TrainingModel:
    """Parameters (float32, by name) and the forward; ``dtype`` is what activations and operands of products are in."""

    def __init__(
        self,
        topology: DeepseekV41Topology,
        token_map: torch.Tensor,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> None:
        """``token_map`` int64 ``[vocab]``: compressed ids of Engram."""
        self.topology, self.dtype, self.device = topology, dtype, torch.device(device)
        self.rounding = Rounding()
        generator = torch.Generator().manual_seed(seed)
        depth = len(topology.layers)
        self.parameters = {
            name: initial(name, shape, generator, depth, topology.streams).to(self.device)
            for name, shape in stacked_shapes(topology).items()
        }
        for name, value in self.parameters.items():
            value.requires_grad_(not name.endswith((".bias", ".bias_vl")))  # steered, not learned
        self._map = token_map.to(self.device)
        self._main = RopeTable(topology.rope_main, self.device)
        self._compress = RopeTable(topology.rope_compress, self.device)
        assert topology.engram is not None
        self._hash = topology.engram.tensors(self.device)

    # parameters

    def freeze_backbone(self) -> None:
        """From here on only draft stages learn."""
        for name, value in self.parameters.items():
            if not name.startswith("mtp."):
                value.requires_grad_(False)

    def weight(self, name: str) -> torch.Tensor:
        """A parameter as an operand of a product."""
        return self.parameters[f"{name}.weight"].to(self.dtype)

    def plain(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """Product with a weight that stays in bfloat16."""
        return F.linear(x, self.weight(name))

    def _fp8(self, name: str) -> torch.Tensor:
        weight = self.parameters[f"{name}.weight"]
        return (f.round_blocks(weight) if self.rounding.weights else weight).to(self.dtype)

    def round_input(self, x: torch.Tensor) -> torch.Tensor:
        """Inputs of products with packed weights."""
        return f.round_rows(x, "fp8") if self.rounding.activations else x

    def linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """Product with an FP8 weight."""
        return F.linear(self.round_input(x), self._fp8(name))

    def cached(self, x: torch.Tensor, form: str) -> torch.Tensor:
        """Rows as a cache keeps them."""
        return f.round_rows(x, form) if self.rounding.caches else x

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """RMSNorm."""
        return f.norm(x, self.parameters[f"{name}.weight"], self.topology.eps)

    # sublayers that draft stages have, too

    def site(self, streams: torch.Tensor, name: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Coefficients of the site ``name``."""
        p, t = self.parameters, self.topology
        return f.mixes(streams, p[f"{name}_fn"], p[f"{name}_base"], p[f"{name}_scale"], t.eps, t.mix_eps, t.sinkhorn_iterations)

    def sublayer_input(self, streams: torch.Tensor, pre: torch.Tensor, name: str) -> torch.Tensor:
        """Collapsed and normed streams."""
        return f.collapse_norm(streams, pre, self.parameters[f"{name}.weight"], self.topology.eps)

    def start(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Streams and mix that enter the first layer."""
        embedded = F.embedding(ids, self.parameters["embed.weight"]).to(self.dtype)
        streams = embedded[..., None, :].expand(*ids.shape, self.topology.streams, -1)
        pre = torch.zeros(streams.shape[:-1], device=self.device)
        pre[..., 0] = 1.0
        return streams, pre

    def turns(self, positions: torch.Tensor, stretched: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin ``[*positions.shape, pairs]``."""
        table = self._compress if stretched else self._main
        cos, sin = table.pair_cos_sin(positions.flatten())
        return cos.view(*positions.shape, -1), sin.view(*positions.shape, -1)

    def queries(self, u: torch.Tensor, prefix: str, turns: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Turned heads ``[..., H, D]`` and the low-rank rows they come from."""
        sizes = self.topology.attention
        low = self.norm(self.linear(u, f"{prefix}attn.wq_a"), f"{prefix}attn.q_norm")
        heads = self.linear(low, f"{prefix}attn.wq_b").unflatten(-1, (sizes.heads, sizes.head_dim))
        return f.rotate(heads, turns[0][..., None, :], turns[1][..., None, :]), low

    def window_rows(self, u: torch.Tensor, prefix: str, turns: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Keys that are values as well ``[..., D]``."""
        rows = self.norm(self.linear(u, f"{prefix}attn.wkv"), f"{prefix}attn.kv_norm")
        return self.cached(f.rotate(rows, *turns), "fp8")

    def output(self, heads: torch.Tensor, prefix: str, turns: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Attention results ``[..., H, D]`` turned back and projected."""
        sizes = self.topology.attention
        back = f.rotate(heads, turns[0][..., None, :], -turns[1][..., None, :])
        grouped = back.flatten(-2).unflatten(-1, (sizes.o_groups, sizes.group_width))
        down = self._fp8(f"{prefix}attn.wo_a").view(sizes.o_groups, sizes.o_rank, sizes.group_width)
        low = torch.einsum("...gi,goi->...go", grouped, down).flatten(-2)
        return self.linear(low, f"{prefix}attn.wo_b")

    def moe(self, u: torch.Tensor, prefix: str, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Result ``[..., d]``, experts chosen bool ``[..., experts]``, and their scores."""
        moe, p, name = self.topology.moe, self.parameters, f"{prefix}ffn"
        logits = F.linear(u.float(), self.weight(f"{name}.gate").float())
        scores = F.softplus(logits / moe.temperature).sqrt()
        ids = (scores.detach() + p[f"{name}.gate.bias"]).topk(count, -1).indices
        share = scores.gather(-1, ids)
        if moe.normalise and count > 1:
            share = share / (share.sum(-1, keepdim=True) + 1e-20)
        by_expert = torch.zeros_like(scores).scatter(-1, ids, share * moe.scale)
        w1, w2, w3 = (p[f"{name}.experts.{w}"] for w in ("w1", "w2", "w3"))
        if self.rounding.weights:
            w1, w2, w3 = (f.round_rows(w, "mxfp4") for w in (w1, w2, w3))
        x = self.round_input(u)
        gate, up = (F.linear(x, w.flatten(0, 1).to(self.dtype)).unflatten(-1, (-1, moe.width)) for w in (w1, w3))
        inner = self.round_input(f.swiglu(gate, up, by_expert[..., None], moe.limit)).flatten(-2)
        routed = F.linear(inner, w2.permute(1, 0, 2).flatten(1).to(self.dtype))
        shared, other = (F.linear(x, self._fp8(f"{name}.shared_experts.{w}")) for w in ("w1", "w3"))
        everyone = self.linear(f.swiglu(shared, other, None, moe.limit), f"{name}.shared_experts.w2")
        chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, ids, True)
        return (routed.float() + everyone.float()).to(u.dtype), chosen, scores

    # what only the backbone has

    def engram_rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Table rows ``[tables, B, S, columns]`` of the n-grams that end at each token."""
        engram = self.topology.engram
        assert engram is not None
        batch, length = ids.shape
        none = torch.full((batch, engram.longest - 1), -1, device=self.device)
        cut = torch.arange(0, batch * length + 1, length, device=self.device, dtype=torch.int32)
        rows = engram_hash(self._map[ids.flatten()], none, cut, *self._hash, int(self._map[engram.pad_token]))
        return rows.view(len(engram.layers), batch, length, -1)

    def add_engram(self, streams: torch.Tensor, index: int, rows: torch.Tensor) -> torch.Tensor:
        """Streams plus what the n-grams' rows say."""
        t, prefix = self.topology, f"layers.{index}.engram"
        found = F.embedding(rows, self.parameters[f"{prefix}.embed.weight"]).to(self.dtype)
        if self.rounding.weights:
            found = f.round_rows(found, "fp8")
        both = self.linear(found.flatten(-2), f"{prefix}.wkv")
        key = both[..., : t.streams * t.hidden].unflatten(-1, (t.streams, t.hidden))
        p = self.parameters
        return f.engram_mix(streams, key, both[..., t.streams * t.hidden :], p[f"{prefix}.q_weight"], p[f"{prefix}.k_weight"], t.eps)

    def _compress_rows(self, plan: LayerPlan, u: torch.Tensor, shared: Shared) -> None:
        prefix, ratio = f"layers.{plan.index}.attn.", plan.ratio
        groups = u.shape[1] // ratio
        rows = u[:, : groups * ratio]
        if ratio == 1:
            latent = self.norm(self.plain(rows, f"{prefix}compressor.wkv"), f"{prefix}compressor.norm")
        else:
            content, gate = (F.linear(rows.float(), self.weight(f"{prefix}compressor.{w}").float()) for w in ("wkv", "wgate"))
            mixed = (content.unflatten(1, (-1, ratio)) * gate.unflatten(1, (-1, ratio)).softmax(2)).sum(2)
            latent = self.norm(mixed, f"{prefix}compressor.norm").to(self.dtype)
        turns = self.turns(torch.arange(groups, device=self.device) * ratio, True)
        shared.entries[plan.index] = self.cached(f.rotate(latent, *turns), "fp4")
        # the indexer learns from attention and never moves what attention is made of
        keys = self.norm(self.plain(latent.detach(), f"{prefix}indexer.wk"), f"{prefix}indexer.k_norm")
        shared.keys[plan.index] = self.cached(f.rotate(keys, *turns), "mxfp4")

    def _scores(self, plan: LayerPlan, u: torch.Tensor, low: torch.Tensor, shared: Shared, turns: tuple[torch.Tensor, ...]) -> torch.Tensor:
        sizes, prefix = self.topology.attention, f"layers.{plan.index}.attn.indexer"
        assert plan.index_key_source is not None
        heads = self.linear(low.detach(), f"{prefix}.wq_b").unflatten(-1, (sizes.index_heads, sizes.index_dim))
        heads = self.cached(f.rotate(heads, turns[0][..., None, :], turns[1][..., None, :]), "mxfp4")
        share = self.plain(u.detach(), f"{prefix}.weights_proj").float() * sizes.index_dim**-0.5 * sizes.index_heads**-0.5
        dots = torch.einsum("bshd,bed->bshe", heads, shared.keys[plan.index_key_source])
        return f.index_scores(dots, share)

    def _choose(self, plan: LayerPlan, scores: torch.Tensor, visible: torch.Tensor, shared: Shared) -> torch.Tensor:
        sizes, entries = self.topology.attention, scores.shape[-1]
        masked = scores.detach().masked_fill(~visible, -torch.inf)
        if plan.index == self.topology.shared.candidate_source:
            block = sizes.candidate_block
            best = F.pad(masked, (0, -entries % block), value=-torch.inf).unflatten(-1, (-1, block)).amax(-1)
            newest = (visible.sum(-1) - 1).clamp_min(0) // block
            best = best.scatter(-1, newest[..., None].expand(*best.shape[:-1], 1), torch.inf)
            pool = f.lowest_ties(best, sizes.candidate_blocks)
            shared.pool = pool.repeat_interleave(block, -1)[..., :entries]
        if plan.candidates:
            assert shared.pool is not None
            masked = masked.masked_fill(~shared.pool, -torch.inf)
        return f.lowest_ties(masked, sizes.index_topk)

    def _window_mask(self, blocks: int, floor: int) -> torch.Tensor:
        """Keys ``(b − 1) W …`` of two blocks that a query of block ``b`` sees, bool ``[blocks, 1, W, 2 W]``."""
        window = self.topology.attention.window
        row, key = torch.arange(window, device=self.device)[:, None], torch.arange(2 * window, device=self.device)
        start = torch.arange(blocks, device=self.device)[:, None, None] * window
        position = start - window + key
        seen = (key > row) & (key <= row + window) & (position >= 0)
        return (seen & ((position >= floor) | (start + row < floor)))[:, None]

    def _attend(
        self, plan: LayerPlan, q: torch.Tensor, rows: torch.Tensor, shared: Shared, floor: int, scores: torch.Tensor | None, measure: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None, tuple[torch.Tensor, ...] | None]:
        """Heads ``[B, S, H, D]``; the indexer's loss and its measures at an index source."""
        sizes, length = self.topology.attention, q.shape[1]
        pad, window, scale = -length % sizes.window, sizes.window, sizes.head_dim**-0.5
        sink = self.parameters[f"layers.{plan.index}.attn.attn_sink"]
        q = F.pad(q, (0, 0, 0, 0, 0, pad)).unflatten(1, (-1, window)).transpose(2, 3)  # [B, blocks, H, W, D]
        blocks = F.pad(rows, (0, 0, window, pad)).unflatten(1, (-1, window))
        keys = torch.cat((blocks[:, :-1], blocks[:, 1:]), 2)  # [B, blocks, 2 W, D]
        near = torch.einsum("bnhwd,bnkd->bnhwk", q, keys)
        near_mask = self._window_mask(near.shape[1], floor)
        loss, measures = None, None
        if plan.kv_source is None:
            weighed = f.probabilities_near(near, near_mask, sink, scale)
            heads = torch.einsum("bnhwk,bnkd->bnhwd", weighed, keys)
        else:
            assert plan.index_source is not None
            entries = shared.entries[plan.kv_source]
            far = torch.einsum("bnhwd,bed->bnhwe", q, entries)

            def by_block(mask: torch.Tensor) -> torch.Tensor:
                return F.pad(mask, (0, 0, 0, pad)).unflatten(1, (-1, window))[:, :, None]

            weighed, over = f.probabilities(near, near_mask, far, by_block(shared.chosen[plan.index_source]), sink, scale)
            heads = torch.einsum("bnhwk,bnkd->bnhwd", weighed, keys) + torch.einsum("bnhwe,bed->bnhwd", over, entries)
            if scores is not None:
                visible = self._visible(length, plan.ratio, entries.shape[1])
                with torch.no_grad():
                    _, full = f.probabilities(near, near_mask, far, by_block(visible[None]), sink, scale)
                    target = full.float().mean(2).flatten(1, 2)[:, :length]
                    target = target / target.sum(-1, keepdim=True).clamp_min(1e-20)
                loss = self._indexer_loss(scores, target, visible)
                if measure:
                    measures = self._measure(shared.chosen[plan.index_source], target, visible)
        return heads.transpose(2, 3).flatten(1, 2)[:, :length], loss, measures

    def _visible(self, length: int, ratio: int, entries: int) -> torch.Tensor:
        """Entries made of tokens up to each one, bool ``[S, E]``."""
        row = torch.arange(length, device=self.device)[:, None]
        return torch.arange(entries, device=self.device) < (row + 1) // ratio

    @staticmethod
    def _indexer_loss(scores: torch.Tensor, target: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
        log_q = scores.masked_fill(~visible, -torch.inf).log_softmax(-1)
        log_q = torch.where(visible, log_q, 0.0)
        log_p = target.clamp_min(1e-20).log()
        return (target * (log_p - log_q)).sum(-1)[:, visible.any(-1)].mean()

    def _measure(self, chosen: torch.Tensor, target: torch.Tensor, visible: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Recall, caught share and best share over the tokens that have to leave entries out."""
        count = self.topology.attention.index_topk
        wanted = f.lowest_ties(target.masked_fill(~visible, -torch.inf), count)
        must = visible.sum(-1) > count
        recall = ((wanted & chosen).sum(-1) / count)[:, must].mean()
        return recall, (target * chosen).sum(-1)[:, must].mean(), (target * wanted).sum(-1)[:, must].mean()

    def forward(
        self, ids: torch.Tensor, *, sparse: bool = True, indexer: bool = False, measure: bool = False, keep: int | None = None
    ) -> Forward:
        """``ids`` int64 ``[B, S]``, at least two tokens.

        ``sparse`` False: every visible entry is attended. ``indexer``: its loss is computed; ``measure``: its recall, too. ``keep``:
        decoder windows of the last ``keep`` tokens do not reach below them (a truncated prefill; rows before them mean nothing).
        """
        t, length = self.topology, ids.shape[1]
        streams, pre = self.start(ids)
        rows, engrams = self.engram_rows(ids), 0
        turns = {stretched: self.turns(torch.arange(length, device=self.device), stretched) for stretched in (False, True)}
        shared, taps = Shared(), []
        zero = torch.zeros((), device=self.device)
        result = Forward(zero, zero, zero, zero, {}, {})
        for plan in t.layers:
            prefix, turn = f"layers.{plan.index}.", turns[plan.stretched_rope]
            if plan.tapped:
                taps.append(streams.float().mean(-2).to(self.dtype))
            if plan.engram is not None:
                streams, engrams = self.add_engram(streams, plan.index, rows[engrams]), engrams + 1
            pre_attn, post, comb = self.site(streams, f"{prefix}hc_attn")
            u = self.sublayer_input(streams, pre, f"{prefix}attn_norm")
            q, low = self.queries(u, prefix, turn)
            window = self.window_rows(u, prefix, turn)
            if plan.kind is LayerKind.FULL:
                self._compress_rows(plan, u, shared)
            scores = None
            if plan.index_source == plan.index:
                assert plan.kv_source is not None
                visible = self._visible(length, plan.ratio, shared.entries[plan.kv_source].shape[1])
                if sparse or indexer:
                    scores = self._scores(plan, u, low, shared, turn)
                shared.chosen[plan.index] = (
                    self._choose(plan, scores, visible, shared) if sparse and scores is not None else visible.expand(ids.shape[0], -1, -1)
                )
            floor = length - keep if keep is not None and plan.decoder else 0
            heads, loss, measures = self._attend(plan, q, window, shared, floor, scores if indexer else None, measure)
            if loss is not None:
                result.indexer = result.indexer + loss
            if measures is not None:
                result.recall[plan.index] = (measures[0], measures[1], measures[2])
            streams = f.expand(self.output(heads, prefix, turn), streams, post, comb)
            pre, post, comb = self.site(streams, f"{prefix}hc_ffn")
            u = self.sublayer_input(streams, pre_attn, f"{prefix}ffn_norm")
            y, chosen, affinity = self.moe(u, prefix, t.moe.chosen)
            streams = f.expand(y, streams, post, comb)
            load = chosen.float().mean(1)
            result.loads[prefix] = load.mean(0).detach()
            share = (affinity / affinity.sum(-1, keepdim=True)).mean(1)
            result.balance = result.balance + (load * share).sum(-1).mean() * t.moe.experts / t.moe.chosen / len(t.layers)
        hidden = self.norm(f.collapse(streams, pre), "norm")
        result.logits = self.head(hidden)
        result.taps = torch.stack(taps, -2)
        return result

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits float32."""
        return F.linear(hidden.float(), self.weight("head").float())

    def by_checkpoint_name(self) -> dict[str, torch.Tensor]:
        """Parameters under checkpoint names, one tensor per expert, float32 on the CPU."""
        values: dict[str, torch.Tensor] = {}
        for weight in weights(self.topology):
            found = _EXPERT.match(weight.name)
            value = self.parameters[weight.name] if found is None else self.parameters[f"{found[1]}.{found[3]}"][int(found[2])]
            values[weight.name] = value.detach().float().cpu()
        return values

    @torch.no_grad()
    def load(self, values: Mapping[str, torch.Tensor]) -> None:
        """Takes parameters from ``by_checkpoint_name``'s form."""
        for name, place in self.parameters.items():
            found = _STACK.match(name)
            rows = [values[f"{found[1]}.{e}.{found[2]}.weight"] for e in range(place.shape[0])] if found else None
            place.copy_(values[name] if rows is None else torch.stack(rows))
