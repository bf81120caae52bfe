"""What the HTTP front costs, on a CPU with a tiny model of random weights, so that the front and not the model is what is measured.

``python benches/serving.py [--streams 256] [--tokens 128] [--requests 200] [--json]``

streams: `deepinfer serve` as a process of its own; so many clients stream one completion each, all at once, from this process. CPU time of
the front is what the kernel counted for it between first request and last byte, by event that a client got; gaps are between events of
one stream as its client saw them. The three processes share the machine's cores.

first token: server, client and direct callers of the same engine in one process and event loop, nothing else running. One request
over HTTP and one directly, in turns; the difference of the medians is what HTTP adds to the time to the first token.

Exit code 1 if a stream lost a token.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from deepinfer import AsyncLLM, SamplingParams

PROMPT = "the quick brown fox jumps over the lazy dog"
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 320, "max_position_embeddings": 512, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True, "torch_dtype": "float32", "eos_token_id": 300, "bos_token_id": 301,
}  # fmt: skip
ENGINE: dict[str, Any] = {"load_format": "dummy", "dtype": "float32", "quiet": True, "num_threads": 1, "block_size": 16}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder))
        streams = measure_streams(folder, args.streams, args.tokens)
        first = asyncio.run(measure_first_token(folder, args.requests))
    load = os.getloadavg()[0]
    if args.json:
        print(json.dumps({"streams": streams, "first_token": first, "cores": os.cpu_count(), "load": load}))
    else:
        show(args.tokens, streams, first, load)
    return 0 if streams["lost"] == 0 else 1


def show(tokens: int, streams: dict[str, Any], first: dict[str, float], load: float) -> None:
    """Two lines for a person."""
    s, f = streams, first
    print(
        f"{s['streams']} streams of {tokens} tokens: {s['tokens_per_s']:.0f} tokens/s; front {s['cpu_us_per_event']:.1f} us an event "
        f"({s['events']} events, {s['front_cores']:.2f} cores); first token p50 {s['first_ms_p50']:.0f} ms; "
        f"gap p50 {s['gap_ms_p50']:.1f}, p99 {s['gap_ms_p99']:.1f} ms"
    )
    print(
        f"first token, idle engine: {f['http_ms']:.2f} ms over HTTP, {f['direct_ms']:.2f} ms directly: {f['added_ms']:.2f} ms more "
        f"(p95 {f['http_ms_p95']:.2f} and {f['direct_ms_p95']:.2f}); {os.cpu_count()} cores, load {load:.1f}"
    )


def write_model(folder: Path) -> None:
    """A configuration and a byte-level tokenizer; weights are made up when it is loaded."""
    (folder / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}), encoding="utf-8")


def cpu_seconds(pid: int) -> float:
    """CPU time that a process has used, all threads."""
    cells = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rsplit(")", 1)[1].split()
    return (int(cells[11]) + int(cells[12])) / os.sysconf("SC_CLK_TCK")


def post(body: dict[str, Any]) -> bytes:
    """A request as its client sends it."""
    data = json.dumps(body).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    return head % len(data) + data


async def read_stream(port: int, request: bytes) -> tuple[float, list[float], list[Any]]:
    """Sends a request; gives the time it was sent, when each event came, and the events."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    began = time.monotonic()
    writer.write(request)
    times: list[float] = []
    events: list[Any] = []
    while line := await reader.readline():
        if line.startswith(b"data: [DONE]"):
            break
        if line.startswith(b"data: "):
            times.append(time.monotonic())
            events.append(json.loads(line[6:]))
    writer.close()
    return began, times, events


def measure_streams(model: str, streams: int, tokens: int) -> dict[str, Any]:
    """Many streams at once of a server of its own."""
    options = [f"--{name.replace('_', '-')}" + ("" if value is True else f"={value}") for name, value in ENGINE.items()]
    server = subprocess.Popen(
        [sys.executable, "-m", "deepinfer.cli", "serve", model, "--port", "0", "--max-num-seqs", str(streams), "--served-model-name", "m",
         "--num-kv-blocks", str(streams * (tokens + 100) // 16), "--no-access-log", *options],
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
        port = int(found[1])
        body = {"prompt": PROMPT, "max_tokens": tokens, "ignore_eos": True, "stream": True, "return_token_ids": True}

        async def run() -> list[tuple[float, list[float], list[Any]]]:
            await read_stream(port, post(body))  # what is made on first use
            before = cpu_seconds(server.pid)
            made = await asyncio.gather(*(read_stream(port, post({**body, "seed": i})) for i in range(streams)))
            cpu.append(cpu_seconds(server.pid) - before)
            return made

        cpu: list[float] = []
        made = asyncio.run(run())
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(30)
    began, ended = min(b for b, _, _ in made), max(times[-1] for _, times, _ in made)
    gaps = sorted(b - a for _, times, _ in made for a, b in pairwise(times))
    events = sum(len(times) for _, times, _ in made)
    got = sum(len(e["choices"][0].get("token_ids", ())) for _, _, events in made for e in events)
    return {
        "streams": streams,
        "events": events,
        "lost": streams * tokens - got,
        "tokens_per_s": got / (ended - began),
        "cpu_us_per_event": cpu[0] / events * 1e6,
        "front_cores": cpu[0] / (ended - began),
        "first_ms_p50": statistics.median(times[0] - b for b, times, _ in made) * 1e3,
        "gap_ms_p50": gaps[len(gaps) // 2] * 1e3,
        "gap_ms_p99": gaps[len(gaps) * 99 // 100] * 1e3,
    }


async def measure_first_token(model: str, requests: int) -> dict[str, float]:
    """The first token over HTTP and directly, in turns."""
    from deepinfer.server.app import build_app
    from deepinfer.server.http.listen import Bound
    from deepinfer.server.run import http_server
    from deepinfer.server.settings import ServerSettings

    settings = ServerSettings(port=0)
    bound = Bound(settings)
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    http: list[float] = []
    direct: list[float] = []
    async with AsyncLLM(model, max_num_seqs=8, num_kv_blocks=64, enable_prefix_caching=False, **ENGINE) as llm:
        server = http_server(build_app(llm, settings), settings)
        serving = asyncio.create_task(server.serve([bound.socket]))
        while not server.started:
            await asyncio.sleep(0.005)
        port = bound.socket.getsockname()[1]
        request = post({"prompt": PROMPT, "max_tokens": 2, "ignore_eos": True, "temperature": 0, "stream": True, "return_token_ids": True})
        for turn in range(requests + 10):
            began, times, _ = await read_stream(port, request)
            start, first = time.monotonic(), 0.0
            async for _ in llm.generate(PROMPT, params, mode="delta"):
                first = first or time.monotonic() - start
            if turn >= 10:
                http.append(times[0] - began)
                direct.append(first)
        server.should_exit = True
        await serving
    middle, own = statistics.median(http) * 1e3, statistics.median(direct) * 1e3
    return {
        "http_ms": middle,
        "direct_ms": own,
        "added_ms": middle - own,
        "http_ms_p95": sorted(http)[len(http) * 95 // 100] * 1e3,
        "direct_ms_p95": sorted(direct)[len(direct) * 95 // 100] * 1e3,
    }


if __name__ == "__main__":
    sys.exit(main())
