"""Steps one after another against steps two in flight, where the machine's speed drifts: both loops alternate, block by block.

    python benches/overlap.py [--model smollm2] [--seqs 1 64] [--input-len 32] [--blocks 40]

Two engines of one process decode the same prompts, `--block-steps` steps of one, then as many of the other, and so on; the first two
steps of a block are not counted. `ratio` is the median over pairs of neighbouring blocks of (median step overlapped / median step serial),
beside its quartiles; `ms` are medians of all steps counted, each as [serial, overlapped]: whole steps as the caller sees them, and the
part of them that the host waited for the device. No wait: the host's launches are the longer part, and there is nothing to hide.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import dataclass, field

from deepinfer import LLM, SamplingParams
from deepinfer.cli import bench_load, machine
from deepinfer.cli.app import exit_code

_UNCOUNTED = 2


@dataclass
class Side:
    """One engine and what was seen of it."""

    llm: LLM
    steps: list[float] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)
    answers: dict[str, list[int]] = field(default_factory=dict)

    def submit(self, prompts: list[list[int]], tokens: int) -> None:
        """Hands over all prompts."""
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        for i, prompt in enumerate(prompts):
            self.llm.add_request(prompt, params, request_id=f"{len(prompts)}.{i}", stream=True)

    def step(self) -> tuple[float, float]:
        """One step: seconds, and of these seconds of waiting."""
        counters = self.llm.engine.counters
        waited, begin = counters.wait_s, time.perf_counter()
        outputs = self.llm.step()
        spent = time.perf_counter() - begin
        for output in outputs:
            self.answers[output.request_id] = list(output.outputs[0].token_ids)
        return spent, counters.wait_s - waited

    def block(self, steps: int) -> float:
        """Median step of a block."""
        seen = [self.step() for _ in range(steps)][_UNCOUNTED:]
        self.steps += [s for s, _ in seen]
        self.waits += [w for _, w in seen]
        return statistics.median(s for s, _ in seen)

    def stop(self) -> None:
        """Ends what is running."""
        for name in self.answers:
            self.llm.abort(name)
        while self.llm.has_unfinished_requests():
            self.llm.step()


def compare(serial: Side, overlapped: Side, count: int, args: argparse.Namespace) -> dict[str, object]:
    """One row: ``count`` sequences."""
    for side in (serial, overlapped):
        side.steps, side.waits, side.answers = [], [], {}
        prompts = bench_load.random_prompts(count, args.input_len, side.llm.vocab_size, count)
        side.submit(prompts, answer_length(args))
        while side.llm.engine.core_stats()["decoding"] < count:
            side.step()
    ratios = []
    for nth in range(args.blocks):
        pair = {}
        for side in (serial, overlapped) if nth % 2 else (overlapped, serial):
            pair[id(side)] = side.block(args.block_steps)
        ratios.append(pair[id(overlapped)] / pair[id(serial)])
    for side in (serial, overlapped):
        side.stop()
    low, middle, high = statistics.quantiles(ratios, n=4)
    medians = {
        "steps": [round(statistics.median(s.steps) * 1e3, 2) for s in (serial, overlapped)],
        "waits": [round(statistics.median(s.waits) * 1e3, 2) for s in (serial, overlapped)],
    }
    return {
        "seqs": count,
        "input_len": args.input_len,
        "ratio": round(middle, 4),
        "quartiles": [round(low, 4), round(high, 4)],
        "slower_pairs": sum(r > 1 for r in ratios),
        "pairs": len(ratios),
        "ms": medians,
        "same_answers": all(same_start(tokens, overlapped.answers[name]) for name, tokens in serial.answers.items()),
    }


def same_start(a: list[int], b: list[int]) -> bool:
    """Whether two answers that were stopped are equal as far as both go."""
    shorter = min(len(a), len(b))
    return shorter > 0 and a[:shorter] == b[:shorter]


def answer_length(args: argparse.Namespace) -> int:
    """Tokens that no answer reaches: of all blocks, and while later prompts are computed."""
    return int(args.blocks * args.block_steps + max(args.seqs) * (1 + args.input_len // 64)) + 8


def main() -> None:
    """Prints the machine, then one JSON line per number of sequences."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seqs", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--input-len", type=int, default=32)
    parser.add_argument("--blocks", type=int, default=40)
    parser.add_argument("--block-steps", type=int, default=8)
    parser.add_argument("--threads", type=int, default=None)
    args = parser.parse_args()
    if args.block_steps <= _UNCOUNTED or args.blocks < 2:
        parser.error(f"--block-steps must be above {_UNCOUNTED}, --blocks at least 2")
    length, most = args.input_len + answer_length(args) + 1, max(args.seqs)
    common = {
        "load_format": args.load_format,
        "device": args.device,
        "max_model_len": length,
        "max_num_seqs": most,
        "block_size": 64,
        "num_kv_blocks": most * (-(-length // 64) + 1),
        "num_threads": args.threads,
        "quiet": True,
    }
    with LLM(args.model, zero_overhead=False, **common) as serial, LLM(args.model, zero_overhead=True, **common) as overlapped:
        print(json.dumps({"machine": machine.in_words(str(serial.engine.run.device), None)}), flush=True)
        sides = Side(serial), Side(overlapped)
        for count in args.seqs:
            print(json.dumps(compare(*sides, count, args)), flush=True)


if __name__ == "__main__":
    sys.exit(exit_code(main))
