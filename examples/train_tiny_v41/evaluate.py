"""Judges a trained run on held-out text: loss, drafts accepted per position, error of truncated prefills, recall of selections.

    python evaluate.py --work work --json figures.json
    python evaluate.py --work work --checkpoint checkpoint --batch 8    # of what was written, with the tokenizer it was trained with

Owns: figures. Never touches: weights. Everything is rounded to the released formats, as the engine does it. Acceptance is of greedy
drafting behind prompts of held-out text: a draft is accepted if it and all before it are the tokens that the backbone gives itself.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from corpus import NOISE
from drafts import greedy_drafts, mean_length, walk
from export import read_released
from model import Rounding
from train import Run
from train import arguments as train_arguments

KEEPS = (134, 160, 192, 256, 320, 384, 448, 512, 576, 635, 636, 768)
"""Tokens kept of 1,024; 636 is the exact bound of five decoder layers with windows of 128."""


@torch.no_grad()
def acceptance(run: Run, prompts: int, prompt: int, answer: int) -> dict[str, Any]:
    """Greedy drafts along ``answer`` greedy tokens behind ``prompts`` prompts of ``prompt`` tokens."""
    model, drafts = run.model, run.model.topology.drafts
    ids = torch.cat([run.held_out(100 + number)[0][:, :prompt] for number in range(-(-prompts // run.args.batch))])[:prompts]
    for _ in range(answer):
        logits = model.forward(ids).logits[:, -1]
        logits[:, NOISE] = -torch.inf  # never a token of a text
        ids = torch.cat((ids, logits.argmax(-1, keepdim=True)), 1)
    out = model.forward(ids)
    anchors = torch.arange(prompt, prompt + answer - drafts.block, device=ids.device).expand(ids.shape[0], -1)
    drawn, sure = greedy_drafts(model, ids, out.taps, anchors)
    wanted = torch.stack([ids[:, prompt + k + 1 : prompt + k + 1 + anchors.shape[1]] for k in range(drafts.block)], -1)
    right = drawn == wanted
    kept = right.long().cumprod(-1).sum(-1)
    lengths = [length for row in kept.tolist() for length in walk(row, 0, len(row))]
    blocks = len(lengths)
    reached = [sum(length >= k for length in lengths) for k in range(drafts.block + 1)]
    confident = sure[..., 0]
    return {
        "prompts": prompts,
        "prompt_tokens": prompt,
        "answer_tokens": answer,
        "blocks": blocks,
        "accepted_by_position": [round(reached[k + 1] / blocks, 4) for k in range(drafts.block)],
        "accepted_given_the_ones_before": [round(reached[k + 1] / max(1, reached[k]), 4) for k in range(drafts.block)],
        "tokens_a_step": round(mean_length(lengths), 3),
        "first_draft_at_every_position": round(float(right[..., 0].float().mean()), 4),
        "confidence_where_right": round(float(confident[right[..., 0]].mean()), 4),
        "confidence_where_wrong": round(float(confident[~right[..., 0]].mean()), 4),
        "distinct_tokens_of_answers": int(ids[:, prompt:].unique().numel()),
    }


@torch.no_grad()
def replay_error(run: Run, batches: int, rows: int) -> list[dict[str, float]]:
    """Per keep: logits of the last token of a truncated prefill against those of a whole one."""
    figures = []
    for keep in KEEPS:
        if keep > run.args.length:
            continue
        most, far, same = 0.0, 0.0, 0.0
        for number in range(batches):
            ids = run.held_out(200 + number)[0][:rows]
            whole, cut = (run.model.forward(ids, keep=kept).logits[:, -1] for kept in (None, keep))
            most = max(most, float((whole - cut).abs().max()))
            far += float(F.kl_div(cut.log_softmax(-1), whole.log_softmax(-1), log_target=True, reduction="batchmean")) / batches
            same += float((whole.argmax(-1) == cut.argmax(-1)).float().mean()) / batches
        figures.append({"keep": keep, "largest_logit_error": round(most, 6), "kl": round(far, 8), "same_token": round(same, 4)})
    return figures


@torch.no_grad()
def selection_recall(run: Run, batches: int, rows: int) -> dict[str, dict[str, float]]:
    """Per index source: recall of the ``topk`` entries that attention over all would weigh most, and attention caught of the possible."""
    sums: dict[int, torch.Tensor] = {}
    for number in range(batches):
        ids = run.held_out(300 + number)[0][:rows]
        for layer, parts in run.model.forward(ids, indexer=True, measure=True).recall.items():
            sums[layer] = sums.get(layer, torch.zeros(3)) + torch.stack(parts).cpu() / batches
    names = ("recall", "attention_caught", "attention_of_the_best")
    return {str(layer): {name: round(float(value), 4) for name, value in zip(names, parts, strict=True)} for layer, parts in sums.items()}


def evaluate(run: Run, prompts: int, answer: int, rows: int, prompt: int = 256) -> dict[str, Any]:
    """All figures; ``prompts`` and ``rows`` bound the work."""
    run.model.rounding = Rounding(True, True, True)
    found: dict[str, Any] = {"steps": run.progress.step, "seconds": round(run.progress.spent, 1)}
    found["held_out_loss"] = round(run.held_out_loss(4), 4)
    found["acceptance"] = acceptance(run, prompts, prompt, answer)
    found["recall"] = selection_recall(run, 2, rows)
    before, run.model.dtype = run.model.dtype, torch.float32
    run.model.rounding = Rounding(caches=True, weights=True)
    found["replay"] = replay_error(run, 2, rows)
    run.model.dtype = before
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="judges a trained run", allow_abbrev=False)
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--answer", type=int, default=128)
    parser.add_argument("--rows", type=int, default=32, help="sequences of a batch for recall and replay")
    parser.add_argument("--checkpoint", type=Path, help="judge these released weights instead of the state in --work")
    args, rest = parser.parse_known_args()
    run = Run(train_arguments(rest if args.checkpoint else [*rest, "--resume"]))
    if args.checkpoint:
        run.model.load(read_released(args.checkpoint))
    figures = evaluate(run, args.prompts, args.answer, args.rows)
    text = json.dumps(figures, indent=1)
    print(text)
    if args.json:
        args.json.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
