"""Prompt lookup on repetitive prompts: tokens a step and speed-up, with the answers compared token by token.

    python benches/drafts.py [--model smollm2] [--drafts 4] [--tokens 96] [--seqs 1 4]

Each load runs without drafts and with them in turn, `--rounds` times, on engines of one process; the best round counts. A step is one of
the engine's steps after the prompts; tokens a step are per sequence.
"""

from __future__ import annotations

import argparse
import json
import time

from deepinfer import LLM, SamplingParams

_SENTENCES = (
    "The red fox met the grey owl near the old mill. ",
    "The grey owl asked the red fox for a piece of bread. ",
    "The red fox gave the grey owl a piece of bread. ",
)
_CODE = "def area(width, height):\n    return width * height\n\ndef volume(width, height, depth):\n    return width * height * depth\n\n"


def prompts(kind: str, count: int) -> list[str]:
    """Prompts whose answers copy from them."""
    if kind == "copy":
        story = "".join(_SENTENCES)
        return [f"Story {i}:\n{story}\nThe same story, word by word:\n{_SENTENCES[0]}" for i in range(count)]
    return [f"# module {i}\n{_CODE}{_CODE}def area(" for i in range(count)]


def run(llm: LLM, texts: list[str], tokens: int) -> tuple[float, int, list[list[int]]]:
    """Seconds, steps and answers of one round."""
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    before, begin = llm.engine.counters.steps, time.perf_counter()
    outputs = llm.generate(texts, params)
    return time.perf_counter() - begin, llm.engine.counters.steps - before, [list(o.outputs[0].token_ids) for o in outputs]


def main() -> None:
    """Prints one JSON line per load."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--drafts", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--seqs", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=None)
    args = parser.parse_args()
    common = {
        "max_model_len": 512,
        "max_num_seqs": max(args.seqs),
        "num_threads": args.threads,
        "enable_prefix_caching": False,
        "quiet": True,
    }
    with LLM(args.model, **common) as plain, LLM(args.model, speculative="ngram", num_draft_tokens=args.drafts, **common) as drafted:
        for kind in ("copy", "code"):
            for count in args.seqs:
                texts = prompts(kind, count)
                rounds = [(run(plain, texts, args.tokens), run(drafted, texts, args.tokens)) for _ in range(args.rounds)]
                before = drafted.engine.core_stats()
                run(drafted, texts, args.tokens)
                after = drafted.engine.core_stats()
                slow, fast = min(r[0][0] for r in rounds), min(r[1][0] for r in rounds)
                same = all(r[0][2] == rounds[0][0][2] and r[1][2] == rounds[0][0][2] for r in rounds)
                steps = min(r[1][1] for r in rounds)
                row = {
                    "load": kind,
                    "seqs": count,
                    "same_answers": same,
                    "steps": [rounds[0][0][1], steps],
                    "tokens_a_step": round(args.tokens / steps, 2),
                    "accepted": round((after["accepted"] - before["accepted"]) / max(1, after["drafted"] - before["drafted"]), 2),
                    "seconds": [round(slow, 2), round(fast, 2)],
                    "speed_up": round(slow / fast, 2),
                }
                print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
