"""Drafts accepted by the engine on held-out text, beside what the training form accepts along the same answers.

    python engine_drafts.py --checkpoint checkpoint [--prompts 64] [--answer 128] [--seed 0] [--json figures.json]

Owns: figures. Never touches: weights. Text is cut from the files that ``corpus.py`` holds out, and answered greedily by ``deepinfer.LLM``
with ``speculative="dspark"`` and without; acceptance per draft is what ``LLM.metrics()`` counted. Every draft is verified, so that figures
do not depend on the times of steps. Ends with 1 if an answer with drafts is not the one without.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from corpus import PACKAGES, split, texts
from drafts import greedy_drafts
from export import read_released
from model import Rounding, TrainingModel

from deepinfer import LLM, SamplingParams
from deepinfer.models.deepseek_v41.sources import read_token_map
from deepinfer.models.deepseek_v41.topology import read_topology

ALL = 1 << 20
"""A budget of draft rows that is never short."""


def cut(documents: Sequence[str], count: int, length: int, seed: int) -> list[str]:
    """``count`` pieces of ``length`` characters, from anywhere in the documents; longer ones give more."""
    room = np.array([max(0, len(text) - length) for text in documents], np.float64)
    if not room.any():
        raise SystemExit(f"no held-out file has {length} characters; name more --packages")
    draw = np.random.RandomState(seed)
    pieces: list[str] = []
    for number in draw.choice(len(documents), count, p=room / room.sum()).tolist():
        at = draw.randint(0, len(documents[number]) - length + 1)
        pieces.append(documents[number][at : at + length])
    return pieces


def answer(checkpoint: Path, prompts: list[str], length: int, **settings: Any) -> tuple[list[tuple[list[int], list[int]]], Any]:
    """(ids of the prompt, ids of the greedy answer) of each, and the engine's metrics."""
    values: dict[str, Any] = {"dtype": "float32", "max_num_seqs": 16, "max_model_len": 2048, "quiet": True, **settings}
    with LLM(model=str(checkpoint), **values) as llm:
        made = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=length, ignore_eos=True), use_tqdm=False)
        return [(list(out.prompt_token_ids or []), list(out.outputs[0].token_ids)) for out in made], llm.metrics()


@dataclass
class Counts:
    """Of each answer, by position: drafts asked for and held, int64 ``[answers, n]``."""

    asked: np.ndarray
    held: np.ndarray

    def shares(self) -> list[float]:
        """Share of drafts that held, of all answers."""
        return shares(self.asked.sum(0), self.held.sum(0))

    def errors(self) -> list[float]:
        """Standard errors of the shares: answers differ from each other, drafts of one answer depend on each other."""
        asked, held = self.asked.sum(0), self.held.sum(0)
        off = self.held - self.asked * (held / np.maximum(1, asked))
        return [round(float(e), 4) for e in np.sqrt((off**2).sum(0)) / np.maximum(1, asked)]


@torch.no_grad()
def training_form(checkpoint: Path, answers: Sequence[tuple[list[int], list[int]]]) -> Counts:
    """What the training form's drafts along these answers come to.

    The blocks are the engine's: the next one starts behind what the last one gave, and the step that ends an answer has room for fewer.
    """
    topology = read_topology(json.loads((checkpoint / "config.json").read_text(encoding="utf-8")))
    mapping = read_token_map(topology, checkpoint)
    assert mapping is not None
    model = TrainingModel(topology, mapping)
    model.load(read_released(checkpoint))
    model.rounding = Rounding(True, True, True)
    block = topology.drafts.block
    counts = Counts(np.zeros((len(answers), block), np.int64), np.zeros((len(answers), block), np.int64))
    for number, (prompt, tokens) in enumerate(answers):
        ids = torch.tensor([prompt + tokens])
        anchors = torch.arange(len(prompt), ids.shape[1] - 1)[None]
        drawn, _ = greedy_drafts(model, ids, model.forward(ids).taps, anchors)
        at = 0
        while (room := min(block, len(tokens) - 2 - at)) >= 0:
            right = (drawn[0, at, :room] == ids[0, len(prompt) + at + 1 :][:room]).long()
            count = int(right.cumprod(0).sum())
            counts.asked[number, :room] += 1
            counts.held[number, :count] += 1
            at += count + 1
    return counts


def shares(asked: Iterable[int], held: Iterable[int]) -> list[float]:
    """Share of drafts at each position that were accepted, as all before them were."""
    return [round(h / max(1, a), 4) for a, h in zip(asked, held, strict=True)]


def measure(checkpoint: Path, prompts: list[str], length: int, **settings: Any) -> dict[str, Any]:
    """All figures of answers of ``length`` tokens; ``settings`` are those of ``LLM``."""
    plain, _ = answer(checkpoint, prompts, length, **settings)
    drafted, metrics = answer(checkpoint, prompts, length, speculative="dspark", draft_budget=ALL, **settings)
    block = sum(1 for count in metrics.drafts_asked if count)
    asked, held = metrics.drafts_asked[:block], metrics.drafts_taken[:block]
    trained = training_form(checkpoint, plain)
    return {
        "prompts": len(prompts),
        "prompt_tokens": sum(len(prompt) for prompt, _ in plain) / len(plain),
        "answer_tokens": length,
        "blocks": asked[0],
        "same_tokens": drafted == plain,
        "accepted_by_position": shares(asked, held),
        "accepted_given_the_ones_before": shares((asked[0], *held[:-1]), held),
        "tokens_a_step": round(1 + sum(held) / asked[0], 3),
        "training_form": trained.shares(),
        "standard_error": trained.errors(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="drafts the engine accepts on held-out text", allow_abbrev=False)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--characters", type=int, default=870, help="of a prompt; 870 are about 256 tokens")
    parser.add_argument("--seed", type=int, default=0, help="of the places that prompts are cut from")
    parser.add_argument("--answer", type=int, default=128, help="tokens of an answer")
    parser.add_argument("--packages", default=",".join(PACKAGES), help="whose held-out files are read, by commas")
    parser.add_argument("--threads", type=int, help="as LLM(num_threads=...)")
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    args = parser.parse_args()
    held_out = split(list(texts(tuple(args.packages.split(",")), 1000)))["held_out"]
    figures = measure(args.checkpoint, cut(held_out, args.prompts, args.characters, args.seed), args.answer, num_threads=args.threads)
    text = json.dumps(figures, indent=1)
    print(text)
    if args.json:
        args.json.write_text(text + "\n", encoding="utf-8")
    sys.exit(0 if figures["same_tokens"] else 1)


if __name__ == "__main__":
    main()
