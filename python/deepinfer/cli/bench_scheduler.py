"""``deepinfer bench scheduler``: what one ``schedule`` and one ``complete`` cost, through Python and inside Rust.

No model and no device: the core plans real steps into a ring of plain host memory, and this file plays the worker by writing
tokens between the two timed calls. Everything that serving uses is on: prefix caching, hashing and publishing of filled blocks,
stop ids, deferred release, outputs. The Rust figure times the same calls on the same core without Python around them.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepinfer import _core
from deepinfer.cli import console

HELP = "time scheduling alone, through Python and inside Rust, without a model"
EXAMPLES = ("deepinfer bench scheduler --json", "deepinfer bench scheduler --runs 3 --steps 500")

PROMPT_TOKENS = 512
SHARED_TOKENS = PROMPT_TOKENS // 2
VOCAB = 32_000
EOS = 2  # never sampled: every row runs to its length
WARMUP_STEPS = 200
RIVAL_STEPS = 300  # a busy thread may cost a switch interval (5 ms) a call
SAMPLED = np.int32(1234)
_MOST_SEQS = 65_536

Row = dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the benchmark."""
    parser.add_argument("--json", action="store_true", help='print {"rows": [...]} instead of a table')
    parser.add_argument("--runs", type=_positive, default=5, metavar="N", help="runs of each row; the best median counts (5)")
    parser.add_argument("--steps", type=_positive, default=2000, metavar="N", help="timed steps of a run (2000)")
    parser.add_argument("--num-seqs", type=_sequences, nargs="+", default=[16, 64, 256, 1024], metavar="N", help="sequences that decode")
    parser.add_argument("--block", type=int, nargs="+", choices=(16, 32, 64, 128), default=[16, 64], metavar="B", help="block sizes")


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not positive")
    return value


def _sequences(text: str) -> int:
    value = _positive(text)
    if value > _MOST_SEQS:
        raise argparse.ArgumentTypeError(f"{value} is above {_MOST_SEQS}, the most this benchmark drives")
    return value


def run(args: argparse.Namespace) -> int:
    """Runs every row and prints them."""
    if _core.DEBUG:
        console.note("the core is a debug build: `make bench` builds the release core for figures that mean something")
    rows: list[Row] = []
    jobs: list[Callable[[], Row]] = [
        lambda n=n, b=b: decode_row(n, b, args.steps, args.runs)  # type: ignore[misc]
        for b in args.block
        for n in args.num_seqs
    ]
    jobs += [
        lambda: decode_row(256, 64, RIVAL_STEPS, 1, rival=True),
        lambda: admission_row(256, 64, args.steps, args.runs),
        lambda: preemption_row(256, 16, args.steps, args.runs),
    ]
    jobs += [lambda b=b: chain_hash_row(b, args.runs) for b in args.block]  # type: ignore[misc]
    jobs += [lambda t=t: prefix_match_row(t, 64, args.runs) for t in (1 << 10, 8 << 10, 64 << 10)]  # type: ignore[misc]
    with console.progress(len(jobs), "scheduler", "row") as bar:
        for job in jobs:
            rows.append(job())
            bar.update()
    if args.json:
        console.print_json({"debug_build": _core.DEBUG, "rows": rows})
    else:
        for row in rows:
            console.write_out("  ".join(f"{key}={value}" for key, value in row.items()) + "\n")
    return console.EXIT_OK


@dataclass
class Load:
    """A core with its ring, and the prompts that go into it."""

    num_seqs: int
    block: int
    num_blocks: int  # beside the null block
    max_new: int
    headroom_tokens: int = 16
    core: _core.Core = field(init=False)
    ring: list[dict[str, NDArray[np.int32]]] = field(init=False)
    now: int = 1

    def __post_init__(self) -> None:
        config = _core.CoreConfig(
            groups=[_core.PagedGroup(page_tokens=self.block, num_pages=self.num_blocks + 1, sources=[(self.block, 2048)])],
            max_num_seqs=self.num_seqs,
            max_num_batched_tokens=max(8192, self.num_seqs),
            max_model_len=PROMPT_TOKENS + self.max_new + 1,
            vocab_size=VOCAB,
            device_ordered=True,
            headroom_tokens=self.headroom_tokens,
            model="bench",
        )
        self.core = _core.Core(config)
        self.ring = [{name: np.zeros(words, np.int32) for name, words in self.core.layout()} for _ in range(config.ring_slots)]
        self.core.register_ring(self.ring)
        self._random = np.random.default_rng(0)
        self._shared = self._random.integers(10, VOCAB, SHARED_TOKENS, np.uint32)

    def prompt(self) -> NDArray[np.uint32]:
        """A prompt whose first half all others share."""
        return np.concatenate([self._shared, self._random.integers(10, VOCAB, PROMPT_TOKENS - SHARED_TOKENS, np.uint32)])

    def add(self, prompt: NDArray[np.uint32], max_new: int) -> None:
        """Queues one request."""
        self.core.add(prompt, max_new_tokens=max_new, eos_ids=(EOS,))

    def fill(self, slot: int) -> None:
        """Plays the worker: one token for each sequence that samples."""
        fields = self.ring[slot]
        header = fields["header"]
        seqs, samples = int(header[4]), int(header[6])
        fields["tokens"][:samples] = SAMPLED
        fields["accepted"][:seqs] = fields["seq_flags"][:seqs] & 1

    def step(self) -> int:
        """One untimed step; the number of sequences that decoded in it, −1 when there was nothing to do."""
        self.now += 1
        slot = self.core.schedule(self.now)
        if slot < 0:
            return -1
        self.fill(slot)
        decoding = int(self.ring[slot]["header"][5])
        self.core.complete(slot, self.now)
        return decoding

    def time_steps(self, steps: int, after: Callable[[], object] | None = None) -> list[int]:
        """Nanoseconds of ``schedule`` plus ``complete`` of each step; ``after`` runs between steps, untimed."""
        core, clock, fill = self.core, time.perf_counter_ns, self.fill
        samples = []
        gc.collect()
        gc.disable()
        try:
            for _ in range(steps):
                self.now += 1
                begin = clock()
                slot = core.schedule(self.now)
                planned = clock()
                fill(slot)
                filled = clock()
                core.complete(slot, self.now)
                done = clock()
                samples.append(planned - begin + done - filled)
                if after is not None:
                    after()
        finally:
            gc.enable()
        return samples

    def time_rust(self, steps: int, refill: int = 0) -> Sequence[int]:
        """The same in a loop inside Rust; with ``refill`` every ended sequence is replaced by one of that many new tokens."""
        samples = _core.bench_steps(self.core, steps, self.now, int(SAMPLED), self._shared if refill else (), PROMPT_TOKENS, refill)
        self.now += steps
        return samples

    def warm_up(self) -> None:
        """Runs until every sequence decodes, and somewhat on."""
        while self.step() not in (self.num_seqs, -1):
            pass
        for _ in range(WARMUP_STEPS):
            self.step()

    def refill(self) -> list[int]:
        """Replaces each sequence that ended in the last step; gives the nanoseconds of each ``add``."""
        outputs, spent = self.core.outputs(), []
        for row in self.core.notify():
            if outputs[row * _core.OUTPUT_WORDS + 5]:
                prompt = self.prompt()
                begin = time.perf_counter_ns()
                self.add(prompt, self.max_new)
                spent.append(time.perf_counter_ns() - begin)
        return spent


def _micros(name: str, samples: Sequence[int]) -> Row:
    ordered = sorted(samples)
    p99 = ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)]
    return {
        f"{name}_us_median": round(statistics.median(ordered) / 1000, 3),
        f"{name}_us_p99": round(p99 / 1000, 3),
        f"{name}_us_max": round(ordered[-1] / 1000, 3),
    }


def _best(rows: Sequence[Row]) -> Row:
    """Column by column family, the run with the lowest median."""
    best: Row = {}
    for name in ("python", "rust", "add"):
        key = f"{name}_us_median"
        if key in rows[0]:
            chosen = min(rows, key=lambda row: float(row[key]))
            best |= {k: v for k, v in chosen.items() if k.startswith(f"{name}_us_")}
    return best | {k: v for k, v in rows[0].items() if "_us_" not in k}


def decode_row(num_seqs: int, block: int, steps: int, runs: int, rival: bool = False) -> Row:
    """Steady decode: every sequence one token a step, blocks filling and being published as they come."""
    results = []
    for _ in range(runs):
        max_new = 2 * steps + WARMUP_STEPS + 2 * num_seqs
        blocks = num_seqs * (-(-(PROMPT_TOKENS + max_new) // block))
        load = Load(num_seqs, block, blocks, max_new)
        for _ in range(num_seqs):
            load.add(load.prompt(), max_new)
        load.warm_up()
        stop = threading.Event()
        thread = threading.Thread(target=_spin, args=(stop,), daemon=True)
        if rival:
            thread.start()
        python = load.time_steps(steps)
        stop.set()
        if rival:
            thread.join()
        results.append(_micros("python", python) | _micros("rust", load.time_rust(steps)))
        load.core.close()
    row = {"case": "decode", "num_seqs": num_seqs, "block": block} | _best(results)
    return row | {"rival_thread": True} if rival else row


def _spin(stop: threading.Event) -> None:
    """A thread that never lets go of the interpreter by itself."""
    count = 0
    while not stop.is_set():
        count += 1


def admission_row(num_seqs: int, block: int, steps: int, runs: int) -> Row:
    """One sequence ends and one is admitted in every step, in a full pool that evicts."""
    results = []
    for _ in range(runs):
        max_new = num_seqs  # lengths are staggered, so one ends each step
        blocks = num_seqs * (-(-(PROMPT_TOKENS + max_new) // block))
        load = Load(num_seqs, block, blocks, max_new)
        for i in range(num_seqs):
            load.add(load.prompt(), i + 1)
        added: list[int] = []

        def after(load: Load = load, added: list[int] = added) -> None:
            added.extend(load.refill())

        load.time_steps(2 * num_seqs, after)  # until the pool is full
        added.clear()
        python = load.time_steps(steps, after)
        results.append(_micros("python", python) | _micros("add", added) | _micros("rust", load.time_rust(steps, refill=max_new)))
        load.core.close()
    return {"case": "admission", "num_seqs": num_seqs, "block": block} | _best(results)


def preemption_row(num_seqs: int, block: int, steps: int, runs: int) -> Row:
    """More sequences than the pool can hold to their end: about every third step preempts, and what was preempted comes back."""
    results = []
    for _ in range(runs):
        max_new = PROMPT_TOKENS
        fits = (SHARED_TOKENS + num_seqs * (PROMPT_TOKENS - SHARED_TOKENS)) // block
        load = Load(num_seqs, block, fits + num_seqs // 2, max_new, headroom_tokens=0)
        for _ in range(num_seqs):
            load.add(load.prompt(), max_new)
        load.time_steps(WARMUP_STEPS, load.refill)
        before = load.core.stats()["preemptions"]
        python = load.time_steps(steps, load.refill)
        preempted = load.core.stats()["preemptions"] - before
        result = _micros("python", python) | _micros("rust", load.time_rust(steps, refill=max_new))
        results.append(result | {"preemptions_per_step": round(preempted / steps, 3)})
        load.core.close()
    return {"case": "preemption_storm", "num_seqs": num_seqs, "block": block} | _best(results)


def chain_hash_row(block: int, runs: int) -> Row:
    """Chain hash of 64k tokens, as microseconds per 1,000 tokens."""
    tokens = 64_000
    best = min(statistics.median(_core.bench_chain_hash(tokens, block, 50)) for _ in range(runs))
    return {"case": "chain_hash", "block": block, "tokens": 1000, "rust_us_median": round(best / tokens, 3)}


def prefix_match_row(tokens: int, block: int, runs: int) -> Row:
    """Longest cached prefix of given hashes, references taken: pool of 50k blocks, each time another chain."""
    results = [_micros("rust", _core.bench_prefix_match(tokens, block, 50_000, 500)) for _ in range(runs)]
    return {"case": "prefix_match", "block": block, "tokens": tokens} | _best(results)
