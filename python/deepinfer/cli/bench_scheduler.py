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
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepinfer import _core
from deepinfer.cli import console, machine

HELP = "time scheduling alone, through Python and inside Rust, without a model"
EXAMPLES = ("deepinfer bench scheduler --json", "deepinfer bench scheduler --runs 3 --steps 500")

PROMPT_TOKENS = 512
SHARED_TOKENS = PROMPT_TOKENS // 2
VOCAB = 32_000
EOS = 2  # never sampled: every row runs to its length
WARMUP_STEPS = 200
RIVAL_STEPS = 300  # a busy thread may cost a switch interval (5 ms) a call
SAMPLED = np.int32(1234)
DRAFTS = 5  # proposed a sequence in the row with drafts: six rows each
LONG_PROMPT = 65_536
WAITING = 4096
COUNTING = (
    "microseconds of one schedule and one complete a step, steps run serially, prefix caching on; python: the two calls from Python with "
    "the step buffers filled; rust: the same calls without Python around them; not counted: the worker, building prompts"
)
CASES = (
    "decode",
    "rival_thread",
    "admission",
    "tight_pool",
    "preemption_storm",
    "abort_storm",
    "waiting_4096",
    "decode_overlap",
    "drafts_6",
    "prompts_64k",
    "chain_hash",
    "prefix_match",
)
_MOST_SEQS = 65_536

Row = dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the benchmark."""
    parser.add_argument("--json", action="store_true", help='print {"rows": [...]} instead of a table')
    parser.add_argument("--runs", type=_positive, default=5, metavar="N", help="runs of each row; the best median counts (5)")
    parser.add_argument("--steps", type=_positive, default=2000, metavar="N", help="timed steps of a run (2000)")
    parser.add_argument("--num-seqs", type=_sequences, nargs="+", default=[16, 64, 256, 1024], metavar="N", help="sequences that decode")
    parser.add_argument("--block", type=int, nargs="+", choices=(16, 32, 64, 128), default=[16, 64], metavar="B", help="block sizes")
    parser.add_argument("--case", nargs="+", choices=CASES, default=list(CASES), metavar="NAME", help=f"rows to run: {', '.join(CASES)}")


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
    steps, runs = args.steps, args.runs
    jobs: list[tuple[str, Callable[[], Row]]] = [
        ("decode", lambda n=n, b=b: decode_row(n, b, steps, runs))  # type: ignore[misc]
        for b in args.block
        for n in args.num_seqs
    ]
    jobs += [
        ("rival_thread", lambda: decode_row(256, 64, RIVAL_STEPS, 1, rival=True)),
        ("admission", lambda: admission_row(256, 64, steps, runs)),
        ("tight_pool", lambda: tight_row(256, 16, steps, runs)),
        ("preemption_storm", lambda: storm_row(256, 64, runs)),
        ("abort_storm", lambda: abort_row(256, 64, runs)),
        ("waiting_4096", lambda: decode_row(256, 64, steps, runs, waiting=WAITING)),
        ("decode_overlap", lambda: decode_row(256, 64, steps, runs, depth=2)),
        ("drafts_6", lambda: drafts_row(256, 64, min(steps, 1000), runs)),
        ("prompts_64k", lambda: long_prompts_row(256, 64, runs)),
    ]
    jobs += [("chain_hash", lambda b=b: chain_hash_row(b, runs)) for b in args.block]  # type: ignore[misc]
    jobs += [("prefix_match", lambda t=t: prefix_match_row(t, 64, runs)) for t in (1 << 10, 8 << 10, 64 << 10)]  # type: ignore[misc]
    jobs = [job for job in jobs if job[0] in args.case]
    with console.progress(len(jobs), "scheduler", "row") as bar:
        for _, job in jobs:
            rows.append(job())
            bar.update()
    if args.json:
        where = {"machine": machine.in_words("cpu", None), "load": machine.load(), "counted": COUNTING}
        console.print_json({"debug_build": _core.DEBUG, **where, "rows": rows})
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
    max_draft: int = 0
    depth: int = 1
    max_len: int = 0  # 0: a prompt and its answer
    core: _core.Core = field(init=False)
    ring: list[dict[str, NDArray[np.int32]]] = field(init=False)
    now: int = 1

    def __post_init__(self) -> None:
        config = _core.CoreConfig(
            groups=[_core.PagedGroup(page_tokens=self.block, num_pages=self.num_blocks + 1, sources=[(self.block, 2048)])],
            max_num_seqs=self.num_seqs,
            max_num_batched_tokens=max(8192, self.num_seqs),
            max_model_len=self.max_len or PROMPT_TOKENS + self.max_new + 1,
            vocab_size=VOCAB,
            max_draft=self.max_draft,
            max_in_flight=self.depth,
            device_ordered=True,
            headroom_tokens=self.headroom_tokens,
            model="bench",
        )
        self.core = _core.Core(config)
        self.ring = [{name: np.zeros(words, np.int32) for name, words in self.core.layout()} for _ in range(config.ring_slots)]
        self.core.register_ring(self.ring)
        self._random = np.random.default_rng(0)
        self._shared = self._random.integers(10, VOCAB, SHARED_TOKENS, np.uint32)

        self._flight: deque[int] = deque()
        self.handles: list[int] = []

    def prompt(self, tokens: int = PROMPT_TOKENS) -> NDArray[np.uint32]:
        """A prompt whose first tokens all others share."""
        return np.concatenate([self._shared, self._random.integers(10, VOCAB, tokens - SHARED_TOKENS, np.uint32)])

    def add(self, prompt: NDArray[np.uint32], max_new: int) -> None:
        """Queues one request."""
        self.handles += self.core.add(prompt, max_new_tokens=max_new, eos_ids=(EOS,))

    def fill(self, slot: int) -> None:
        """Plays the worker: one token for each sequence that samples; of drafts 3.5 rows of 6 on average."""
        fields = self.ring[slot]
        header = fields["header"]
        seqs, samples = int(header[4]), int(header[6])
        fields["tokens"][:samples] = SAMPLED
        accepted = fields["accepted"]
        if samples > seqs:
            rows = np.diff(fields["sample_off"][: seqs + 1])
            accepted[:seqs] = np.minimum(rows, 1 + (self.now + np.arange(seqs)) * 7 % (DRAFTS + 1))
        else:
            accepted[:seqs] = fields["seq_flags"][:seqs] & 1

    def step(self) -> int:
        """One untimed step; the number of sequences that decoded in it, −1 when there was nothing to do."""
        return self.timed_step()[1]

    def timed_step(self) -> tuple[int, int]:
        """Nanoseconds of ``schedule`` and ``complete``, and what :meth:`step` gives. With two steps in flight the oldest is completed
        and the next one planned, in the engine's order."""
        self.now += 1
        clock, spent = time.perf_counter_ns, 0
        if len(self._flight) == self.depth:
            spent += self._finish()
        begin = clock()
        slot = self.core.schedule(self.now)
        spent += clock() - begin
        if slot < 0 and not self._flight:
            return spent, -1
        decoding = int(self.ring[slot]["header"][5]) if slot >= 0 else 0
        if slot >= 0:
            self._flight.append(slot)
        if self.depth == 1 or slot < 0:
            spent += self._finish()
        return spent, decoding

    def _finish(self) -> int:
        slot = self._flight.popleft()
        self.fill(slot)
        begin = time.perf_counter_ns()
        self.core.complete(slot, self.now)
        return time.perf_counter_ns() - begin

    def time_steps(self, steps: int, after: Callable[[], object] | None = None) -> list[int]:
        """Nanoseconds of ``schedule`` plus ``complete`` of each step; ``after`` runs between steps, untimed."""
        samples = []
        gc.collect()
        gc.disable()
        try:
            for _ in range(steps):
                samples.append(self.timed_step()[0])
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


def decode_row(num_seqs: int, block: int, steps: int, runs: int, rival: bool = False, waiting: int = 0, depth: int = 1) -> Row:
    """Steady decode: every sequence one token a step, blocks filling and being published as they come.

    ``rival``: beside a busy Python thread; ``waiting``: with so many more in the queue; ``depth`` 2: one step behind the device.
    """
    results = []
    for _ in range(runs):
        max_new = 2 * steps + WARMUP_STEPS + 2 * num_seqs
        blocks = num_seqs * (-(-(PROMPT_TOKENS + max_new) // block))
        load = Load(num_seqs, block, blocks, max_new, depth=depth)
        for _ in range(num_seqs):
            load.add(load.prompt(), max_new)
        load.warm_up()
        for _ in range(waiting):
            load.add(load.prompt(), 16)
        load.step()
        stop = threading.Event()
        thread = threading.Thread(target=_spin, args=(stop,), daemon=True)
        if rival:
            thread.start()
        python = load.time_steps(steps)
        stop.set()
        if rival:
            thread.join()
        rust = _micros("rust", load.time_rust(steps)) if depth == 1 else {}
        results.append(_micros("python", python) | rust)
        load.core.close()
    case = "rival_thread" if rival else "waiting_4096" if waiting else "decode_overlap" if depth > 1 else "decode"
    return {"case": case, "num_seqs": num_seqs, "block": block} | _best(results)


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


def drafts_row(num_seqs: int, block: int, steps: int, runs: int) -> Row:
    """Five drafts a sequence, proposed between the steps (that is the drafter's time), 3.5 tokens of six rows kept on average."""
    results = []
    for _ in range(runs):
        max_new = (DRAFTS + 1) * (steps + WARMUP_STEPS) + 2 * num_seqs
        blocks = num_seqs * (-(-(PROMPT_TOKENS + max_new) // block))
        load = Load(num_seqs, block, blocks, max_new, max_draft=DRAFTS)
        for _ in range(num_seqs):
            load.add(load.prompt(), max_new)
        load.warm_up()
        tokens = np.full(DRAFTS, SAMPLED, np.uint32)

        def propose(load: Load = load, tokens: NDArray[np.uint32] = tokens) -> None:
            for handle in load.handles:
                load.core.propose(handle, tokens)

        propose()
        before = load.core.stats()
        python = load.time_steps(steps, propose)
        after = load.core.stats()
        rows = (after["decode_rows"] - before["decode_rows"]) / steps
        results.append(_micros("python", python) | {"rows_per_step": round(rows, 1)})
        load.core.close()
    return {"case": "drafts_6", "num_seqs": num_seqs, "block": block} | _best(results)


def storm_row(num_seqs: int, block: int, runs: int) -> Row:
    """The one step in which every sequence needs a block and the pool has next to none."""
    results = []
    for _ in range(runs):
        samples, victims = [], 0
        for _ in range(10):
            blocks = SHARED_TOKENS // block + num_seqs * ((PROMPT_TOKENS - SHARED_TOKENS) // block) + 4
            load = Load(num_seqs, block, blocks, block, headroom_tokens=0)
            for _ in range(num_seqs):
                load.add(load.prompt(), block)
            spent, decoding = load.timed_step()
            while decoding >= 0 and not load.core.stats()["preemptions"]:
                spent, decoding = load.timed_step()
            samples.append(spent)
            victims = load.core.stats()["preemptions"]
            load.core.close()
        results.append(_micros("python", samples) | {"preempted": victims})
    return {"case": "preemption_storm", "num_seqs": num_seqs, "block": block} | _best(results)


def abort_row(num_seqs: int, block: int, runs: int) -> Row:
    """The step that meets aborts of everything, running and waiting."""
    results = []
    for _ in range(runs):
        samples = []
        for _ in range(5):
            load = Load(num_seqs, block, num_seqs * (-(-(PROMPT_TOKENS + 512) // block)), 512)
            for _ in range(num_seqs):
                load.add(load.prompt(), 512)
            while load.step() != num_seqs:
                pass
            prompt = load.prompt()
            for _ in range(WAITING):
                load.add(prompt, 16)
            load.step()
            for handle in load.handles:
                load.core.abort(handle)
            load.add(prompt, 16)  # one that stays, so that there is a step
            samples.append(load.timed_step()[0])
            aborted = load.core.stats()["finished_abort"]
            load.core.close()
        results.append(_micros("python", samples) | {"aborted": aborted})
    return {"case": "abort_storm", "num_seqs": num_seqs, "block": block} | _best(results)


def long_prompts_row(num_seqs: int, block: int, runs: int) -> Row:
    """Prompts of 64k tokens, in chunks, beside decoding sequences: 8,192 rows a step."""
    results = []
    for _ in range(runs):
        long, steps = 8, 40
        blocks = num_seqs * (-(-(PROMPT_TOKENS + 1024) // block)) + long * (-(-(LONG_PROMPT + 64) // block))
        load = Load(num_seqs, block, blocks, 1024, max_len=LONG_PROMPT + 64)
        for _ in range(num_seqs - long):
            load.add(load.prompt(), 1024)
        while load.step() != num_seqs - long:
            pass
        for _ in range(long):
            load.add(load.prompt(LONG_PROMPT), 16)
        before = load.core.stats()["prefill_tokens"]
        python = load.time_steps(steps)
        rows = (load.core.stats()["prefill_tokens"] - before) / steps
        results.append(_micros("python", python) | {"prompt_rows_per_step": round(rows, 1)})
        load.core.close()
    return {"case": "prompts_64k", "num_seqs": num_seqs, "block": block} | _best(results)


def tight_row(num_seqs: int, block: int, steps: int, runs: int) -> Row:
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
    return {"case": "tight_pool", "num_seqs": num_seqs, "block": block} | _best(results)


def chain_hash_row(block: int, runs: int) -> Row:
    """Chain hash of 64k tokens, as microseconds per 1,000 tokens."""
    tokens = 64_000
    best = min(statistics.median(_core.bench_chain_hash(tokens, block, 50)) for _ in range(runs))
    return {"case": "chain_hash", "block": block, "tokens": 1000, "rust_us_median": round(best / tokens, 3)}


def prefix_match_row(tokens: int, block: int, runs: int) -> Row:
    """Longest cached prefix of given hashes, references taken: pool of 50k blocks, each time another chain."""
    results = [_micros("rust", _core.bench_prefix_match(tokens, block, 50_000, 500)) for _ in range(runs)]
    return {"case": "prefix_match", "block": block, "tokens": tokens} | _best(results)
