"""What a decode step costs the host: microseconds from its plan to its last launch, with and without graphs.

    python benches/decode_launch.py [--device cpu] [--seqs 1 256] [--steps 300]

A small dense model with random weights decodes greedily. `forward` and `sample` are the two halves of a step as the runner launches
them, `turn` is one whole turn of the loop (complete, plan, launch), all medians. On a CPU the device is left out: the model and replays do
nothing, copies are of host memory and events are nothing, so that what is left is this package's own Python, and without graphs the few
operations around the model, computed. Launching a model's operations one by one, most of such a step on a GPU, is not in it. On a GPU
`device` is its own time of a step by events, first copy to last, and `idle` its time between two steps, means.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from deepinfer import SamplingParams
from deepinfer.cli import machine
from deepinfer.cli.app import exit_code
from deepinfer.engine.config import EngineConfig
from deepinfer.engine.engine import Engine
from deepinfer.engine.request import EngineRequest
from deepinfer.models.base import row_buckets
from deepinfer.models.llama.forward import LlamaModel
from deepinfer.worker.device_queue import StreamQueue

HIDDEN, VOCAB = 64, 512
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "max_position_embeddings": 2048,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}


class _NoEvent:
    """A moment that costs nothing."""

    def __init__(self, **_: Any) -> None:
        pass

    def record(self) -> None:
        """Nothing."""

    def synchronize(self) -> None:
        """Nothing."""

    def query(self) -> bool:
        """It has passed."""
        return True

    def elapsed_time(self, _: _NoEvent) -> float:
        """Milliseconds."""
        return 1.0


class _NoGraphs:
    """Records nothing, replays nothing."""

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Nothing to prepare."""
        yield

    def record(self, work: Any) -> Any:
        """Runs the work once, so that what it makes is there."""
        work()
        return lambda: None


@contextmanager
def no_device() -> Iterator[None]:
    """Engines on a CPU launch as on a GPU, and nothing is computed."""
    hidden, logits = torch.zeros(8192, HIDDEN), torch.zeros(512, VOCAB)
    with (
        patch("deepinfer.engine.assembly.make_queue", lambda *_: StreamQueue()),
        patch("torch.cuda.Event", _NoEvent),
        patch("deepinfer.worker.graphs.can_record", lambda _: True),
        patch("deepinfer.worker.graphs.recorder_for", lambda _: _NoGraphs()),
        patch.object(LlamaModel, "graph_rows", lambda _, most: row_buckets(most), create=True),
        patch.object(LlamaModel, "decode", lambda _, rows, __: hidden[: len(rows.ids)], create=True),
        patch.object(LlamaModel, "forward", lambda _, batch, __: hidden[: len(batch.ids)]),
        patch.object(LlamaModel, "logits", lambda _, rows: logits[: len(rows)]),
    ):
        yield


def measure(model: str, device: str, seqs: int, steps: int, graphs: str) -> dict[str, float]:
    """Medians of one engine's decode steps, in microseconds."""
    most = max(seqs, 8)
    settings = {"max_num_seqs": most, "max_num_batched_tokens": 8192, "max_model_len": 2048, "num_kv_blocks": most * 16}
    config = EngineConfig(model=model, device=device, load_format="dummy", quiet=True, cuda_graphs=graphs, **settings)  # type: ignore[arg-type]
    params = SamplingParams(temperature=0, max_tokens=steps + 100, ignore_eos=True)
    rng, halves, turns = np.random.default_rng(0), [], []
    with Engine(config) as engine:
        for i in range(seqs):
            ids = rng.integers(3, VOCAB, 20).tolist()
            engine.add_request(EngineRequest(request_id=str(i), prompt_ids=ids, params=params, max_new=steps + 100, seeds=[i]))
        while engine.core_stats()["decoding"] < seqs:
            engine.step()
        for _ in range(20):
            engine.step()
        runner = engine._runner
        forward, sample = runner.launch_forward, runner.launch_sample
        first = [0.0]

        def timed_forward(*args: Any) -> Any:
            begin = time.perf_counter()
            step = forward(*args)
            first[0] = time.perf_counter() - begin
            return step

        def timed_sample(step: Any) -> None:
            begin = time.perf_counter()
            sample(step)
            halves.append((first[0], time.perf_counter() - begin))

        runner.launch_forward, runner.launch_sample = timed_forward, timed_sample  # type: ignore[method-assign]
        counters = engine.counters
        before = (counters.device_s, counters.idle_s, counters.steps)
        for _ in range(steps):
            begin = time.perf_counter()
            engine.step()
            turns.append(time.perf_counter() - begin)
        del runner.launch_forward, runner.launch_sample  # type: ignore[attr-defined]
        device_s, idle_s, count = (a - b for a, b in zip((counters.device_s, counters.idle_s, counters.steps), before, strict=True))
        replays = engine.metrics().graphs.get("replays", 0)
    assert (replays >= steps) == (graphs != "off"), "the wrong way was measured"
    parts = {"forward": [f for f, _ in halves], "sample": [s for _, s in halves], "both": [f + s for f, s in halves], "turn": turns}
    found = {name: round(statistics.median(values) * 1e6, 1) for name, values in parts.items()}
    if device != "cpu":
        found |= {"device": round(device_s / count * 1e6, 1), "idle": round(idle_s / count * 1e6, 1)}
    return found


def main() -> None:
    """Prints one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--model", default=None, help="a model's directory or id instead of the small one, with random weights")
    parser.add_argument("--seqs", type=int, nargs="+", default=[1, 256])
    parser.add_argument("--steps", type=int, default=300)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(CONFIG))
        found: dict[str, Any] = {"cpu": machine.cpu()["model"], "device": args.device, "microseconds": {}}
        for seqs in args.seqs:
            for graphs in ("off", "auto"):
                where = (args.model or folder, args.device, seqs, args.steps, graphs)
                if args.device == "cpu":
                    with no_device():
                        found["microseconds"][f"{seqs}, graphs {graphs}"] = measure(*where)
                else:
                    found["microseconds"][f"{seqs}, graphs {graphs}"] = measure(*where)
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    sys.exit(exit_code(main))
