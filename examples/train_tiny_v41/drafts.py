"""Draft stages (DSpark) in their training form: many blocks of every sequence at once, teacher-forced, and their greedy drafts.

Owns: the stages' forward and loss. Never touches: the backbone, whose taps and logits come in without gradients.

A block starts at an ``anchor``: the token after the last verified position. Its rows see the window of rows made from the backbone's
taps up to the position before the anchor, and each other. Shapes: ``B`` sequences, ``A`` anchors of each, ``n`` drafts of a block.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import functions as f
import torch
import torch.nn.functional as F
from model import TrainingModel


@dataclass
class Block:
    """What the stages say of a block, before the token-to-token part."""

    base: torch.Tensor
    """Logits float32 ``[B, A, n, vocab]``."""
    hidden: torch.Tensor
    """``[B, A, n, d]``."""
    loads: dict[str, torch.Tensor]
    """Share of rows per expert of every stage, by prefix."""


@dataclass
class DraftLoss:
    """The loss to train with and its parts; ``overlap`` ``[n]`` is the mean probability that a draft is accepted when sampled."""

    total: torch.Tensor
    cross_entropy: torch.Tensor
    distance: torch.Tensor
    confidence: torch.Tensor
    overlap: torch.Tensor
    loads: dict[str, torch.Tensor]


def stage_blocks(model: TrainingModel, ids: torch.Tensor, taps: torch.Tensor, anchors: torch.Tensor) -> Block:
    """Runs all stages on the blocks at ``anchors`` int64 ``[B, A]`` (each ≥ 1) of ``ids`` ``[B, S]`` with ``taps`` ``[B, S, taps, d]``.

    An anchor may be ``S``' last position: nothing at or behind it is read of the taps.
    """
    t = model.topology
    drafts, sizes, length = t.drafts, t.attention, taps.shape[1]
    device, n = ids.device, drafts.block
    main = model.norm(model.linear(taps.flatten(-2), "mtp.0.main_proj"), "mtp.0.main_norm")
    context_turns = model.turns(torch.arange(length, device=device), False)
    place = torch.arange(n, device=device)
    turns = model.turns(anchors[..., None] + place, False)
    tokens = torch.full((*anchors.shape, n), drafts.noise_token, device=device)
    tokens[..., 0] = ids.gather(1, anchors)
    streams, pre = model.start(tokens)
    before = anchors[..., None] - 1 - torch.arange(length, device=device)  # how far back each row lies, [B, A, S]
    seen = ((before >= 0) & (before < sizes.window))[:, :, None]
    everyone = torch.ones((), dtype=torch.bool, device=device)
    loads: dict[str, torch.Tensor] = {}
    for stage in range(drafts.stages):
        prefix = f"mtp.{stage}."
        rows = model.window_rows(main, prefix, context_turns)
        pre_attn, post, comb = model.site(streams, f"{prefix}hc_attn")
        u = model.sublayer_input(streams, pre, f"{prefix}attn_norm")
        q, _ = model.queries(u, prefix, turns)
        own = model.window_rows(u, prefix, turns)
        q = q.transpose(2, 3)  # [B, A, H, n, D]
        near = torch.einsum("bahkd,bajd->bahkj", q, own)
        far = torch.einsum("bahkd,bsd->bahks", q, rows)
        sink = model.parameters[f"{prefix}attn.attn_sink"]
        here, there = f.probabilities(near, everyone, far, seen[:, :, :, None], sink, sizes.head_dim**-0.5)
        heads = torch.einsum("bahkj,bajd->bahkd", here, own) + torch.einsum("bahks,bsd->bahkd", there, rows)
        streams = f.expand(model.output(heads.transpose(2, 3), prefix, turns), streams, post, comb)
        pre, post, comb = model.site(streams, f"{prefix}hc_ffn")
        u = model.sublayer_input(streams, pre_attn, f"{prefix}ffn_norm")
        y, chosen, _ = model.moe(u, prefix, drafts.chosen)
        loads[prefix] = chosen.float().mean((0, 1, 2))
        streams = f.expand(y, streams, post, comb)
    hidden = f.collapse(streams, pre)
    return Block(model.head(model.norm(hidden, f"mtp.{drafts.stages - 1}.norm")), hidden, loads)


def token_parts(model: TrainingModel, block: Block, before: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits with the Markov part of the tokens ``before`` each draft ``[B, A, n]``, and logits of confidence ``[B, A, n]``."""
    last = f"mtp.{model.topology.drafts.stages - 1}"
    seen = F.embedding(before, model.weight(f"{last}.markov_head.embed").float())
    logits = block.base + F.linear(seen, model.weight(f"{last}.markov_head.head").float())
    row = torch.cat((block.hidden.float(), seen), -1)
    return logits, F.linear(row, model.weight(f"{last}.confidence_head.proj").float())[..., 0]


def draft_loss(model: TrainingModel, ids: torch.Tensor, taps: torch.Tensor, logits: torch.Tensor, anchors: torch.Tensor) -> DraftLoss:
    """``ids`` ``[B, S + 1]``, ``logits`` ``[B, S, vocab]`` of the frozen backbone for the first ``S``, ``anchors`` at most ``S − n``.

    Per draft ``0.1 CE + 0.9 ‖p − q‖₁ + BCE(confidence, 1 − ½ ‖p − q‖₁)``, weighed by ``exp(−k / 4)``, ``k`` from 0.
    """
    n = model.topology.drafts.block
    place = torch.arange(n, device=ids.device)
    around = (anchors[..., None] + place).flatten(1)
    before = ids.gather(1, around).view(*anchors.shape, n)
    target = ids.gather(1, around + 1).view(*anchors.shape, n)
    with torch.no_grad():
        rows = logits.gather(1, around[..., None].expand(-1, -1, logits.shape[-1]))
        wanted = rows.softmax(-1).view(*anchors.shape, n, -1)
    block = stage_blocks(model, ids[:, :-1], taps, anchors)
    made, confidence = token_parts(model, block, before)
    log_made = made.log_softmax(-1)
    entropy = -log_made.gather(-1, target[..., None])[..., 0].mean((0, 1))
    apart = (log_made.exp() - wanted).abs().sum(-1)
    accept = (1 - 0.5 * apart).detach()
    judged = F.binary_cross_entropy_with_logits(confidence, accept, reduction="none").mean((0, 1))
    share = torch.exp(-place / 4.0)
    share = share / share.sum()
    distance = apart.mean((0, 1))
    total = (share * (0.1 * entropy + 0.9 * distance + judged)).sum()
    return DraftLoss(total, (share * entropy).sum(), (share * distance).sum(), (share * judged).sum(), accept.mean((0, 1)), block.loads)


@torch.no_grad()
def greedy_drafts(model: TrainingModel, ids: torch.Tensor, taps: torch.Tensor, anchors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Drafts int64 ``[B, A, n]`` each drawn given the ones before it, and the probability of acceptance they are given."""
    block = stage_blocks(model, ids, taps, anchors)
    before = ids.gather(1, anchors)[..., None].repeat(1, 1, model.topology.drafts.block)
    sure = torch.zeros(before.shape, device=ids.device)
    drawn = before
    for place in range(before.shape[-1]):
        logits, confidence = token_parts(model, block, before)
        drawn, sure = logits.argmax(-1), torch.sigmoid(confidence)
        if place + 1 < before.shape[-1]:
            before = torch.cat((before[..., : place + 1], drawn[..., place : place + 1], before[..., place + 2 :]), -1)
    return drawn, sure


def walk(accepted: list[int], start: int, end: int) -> list[int]:
    """Accepted lengths along a greedy text: a block at ``start``, the next behind what it gave; ``accepted`` by position."""
    lengths: list[int] = []
    at = start
    while at < end:
        lengths.append(accepted[at - start])
        at += accepted[at - start] + 1
    return lengths


def mean_length(lengths: list[int]) -> float:
    """Tokens a step: accepted drafts and the token that follows them."""
    return math.nan if not lengths else 1 + sum(lengths) / len(lengths)
