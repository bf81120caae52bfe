"""One call of the draft stages (DSpark) for one sequence: a block of drafts from the taps of what has been verified.

V4's stages differ from V4.1's as their layers do (see ``v4``) and collapse the streams for the head with weights of their own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from deepseek_v41 import arithmetic
from deepseek_v41.sequential import Sequential
from deepseek_v41.v4 import SequentialV4


@dataclass
class DraftCall:
    """Results for a block of ``n`` drafts."""

    tokens: torch.Tensor
    """int64 ``[n]``: the drafts, greedy unless they were forced."""
    logits: torch.Tensor
    """float32 ``[n, vocab]`` with the Markov head's part for the token before each draft."""
    base: torch.Tensor
    """The same without that part."""
    confidence: torch.Tensor
    """Logits float32 ``[n]``: that a draft is accepted if the earlier ones are."""
    hidden: torch.Tensor
    """What the heads read ``[n, d]``, before the norm."""
    context: list[torch.Tensor]
    """Window rows of each stage made from the taps ``[R, head_dim]``."""

    def accepted(self, temperatures: torch.Tensor | None = None) -> torch.Tensor:
        """Probabilities ``[n]`` that each draft is accepted if the earlier ones are; one temperature per draft divides the logits."""
        return torch.sigmoid(self.confidence if temperatures is None else self.confidence / temperatures)


def context_rows(model: Sequential | SequentialV4, taps: torch.Tensor, first: int = 0) -> list[torch.Tensor]:
    """Window rows ``[R, head_dim]`` of each stage for verified positions from ``first`` on, from their taps ``[R, taps, d]``."""
    t = model.topology
    main = model.norm(model.linear(taps.flatten(1), "mtp.0.main_proj"), "mtp.0.main_norm")
    positions = first + torch.arange(taps.shape[0])
    return [model.window(main, f"mtp.{stage}.", positions, t.rope_main) for stage in range(t.drafts.stages)]


def draft(
    model: Sequential | SequentialV4, taps: torch.Tensor, anchor: int, *, first: int = 0, forced: torch.Tensor | None = None
) -> DraftCall:
    """Drafts for the tokens behind ``anchor``, the token drawn after the last verified position.

    ``taps`` ``[R, taps, d]`` of positions ``first … first + R - 1`` (those before are not seen); ``forced`` int64 ``[n]`` gives the
    drafts that follow the anchor instead of drawing them, so that each place can be compared given the same past.
    """
    t, drafts, dtype = model.topology, model.topology.drafts, model.run.dtype
    context, window, last = context_rows(model, taps, first), t.attention.window, f"mtp.{drafts.stages - 1}."
    ids = torch.tensor([anchor] + [drafts.noise_token] * (drafts.block - 1))
    positions = first + taps.shape[0] + torch.arange(drafts.block)
    streams, pre = model.start(model.embed(ids))
    for stage in range(drafts.stages):
        prefix = f"mtp.{stage}."
        u, pre, post, comb = model.enter(streams, pre, prefix, "attn")
        q, _ = model.queries(u, prefix, positions, t.rope_main)
        # the same rows for the whole block: the window of the last verified position, then all of the block
        rows = torch.cat((context[stage][-window:], model.window(u, prefix, positions, t.rope_main)))
        rows = rows.expand(drafts.block, *rows.shape)
        sink = model.weights[f"{prefix}attn.attn_sink"]
        heads = arithmetic.attend(q, rows, torch.ones(rows.shape[:2], dtype=torch.bool), sink, t.attention.head_dim**-0.5)
        streams = arithmetic.expand(model.output(heads, prefix, positions, t.rope_main), streams, post, comb)
        u, pre, post, comb = model.enter(streams, pre, prefix, "ffn")
        y, _ = model.moe(u, prefix, drafts.chosen, None)
        streams = arithmetic.expand(y, streams, post, comb)
    hidden = model.last_row(streams, pre, last)
    base = model.vocabulary(model.norm(hidden, f"{last}norm"))
    markov, spread = model.weights[f"{last}markov_head.embed.weight"], model.weights[f"{last}markov_head.head.weight"]
    logits, confidence, tokens, before = [], [], [], anchor
    for place in range(drafts.block):
        seen = markov[before].to(dtype).float()
        logits.append(base[place] + spread.to(dtype).float() @ seen)
        row = torch.cat((hidden[place].float(), seen))
        confidence.append(model.weights[f"{last}confidence_head.proj.weight"][0].float() @ row)
        before = int(logits[-1].argmax()) if forced is None else int(forced[place])
        tokens.append(before)
    return DraftCall(torch.tensor(tokens), torch.stack(logits), base, torch.stack(confidence), hidden, context)
