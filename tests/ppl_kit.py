"""Log-likelihood of a book under SmolLM2-135M, exactly: what one machine computed once, kept for all that follows.

A sample is a run of tokens of the text; what is kept of it are the sum of its tokens' log-probabilities, to the last bit, and a digest of
each of them. Keys are the platform, the run dtype and the load: a sequence by itself, or among mates that prefill and decode in its steps.

Record what a machine computes, from the repository's root:

    PYTHONPATH=tests:python python -m ppl_kit --device cuda

Several machines may do so on one folder at once: each adds its own keys under a lock.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import math
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from deepinfer.cli.app import exit_code
from deepinfer.engine.engine import Engine
from deepinfer.engine.tokenizer import load_tokenizer
from deepinfer.models import resolve_model
from deepinfer.platforms import get_platform
from deepinfer.sampling import SamplingParams
from engine_kit import Answer, make_engine, random_prompts, request

DATA = Path(__file__).parent / "data" / "ppl"
GOLDEN = DATA / "golden.json"
TEXT = DATA / "alice.txt"

SAMPLES: dict[str, list[tuple[int, int]]] = {
    "1k": [(first, first + 1024) for first in range(0, 8192, 2048)],
    "4k": [(0, 4096), (4096, 8192)],
    "8k": [(0, 8191)],
}
"""First and end of each sample among the text's tokens: the model's limit is 8,192 positions, one of which its answer wants."""
LOADS = ("alone", "mates")
DTYPES = {"cpu": ("float32", "bfloat16"), "cuda": ("bfloat16", "float16")}

Golden = dict[str, list[dict[str, Any]]]


def platform_of(device: str) -> str:
    """What bits may depend on: torch's version, and the GPU's kind or the processor's maker and instruction sets."""
    return get_platform(device).arithmetic


def key_of(device: str, dtype: str, load: str) -> str:
    """Under which goldens are kept."""
    return f"{platform_of(device)}, {dtype}, {load}"


@cache
def tokens() -> tuple[int, ...]:
    """The text's tokens."""
    tokenizer = resolve_model("smollm2").tokenizer
    assert tokenizer is not None
    return tuple(load_tokenizer(str(tokenizer.path)).encode(TEXT.read_text(encoding="ascii")))


def engine_for(device: str, dtype: str) -> Engine:
    """An engine for all samples and loads; one thread on a CPU, so that how many it has is no part of the key."""
    settings: dict[str, Any] = {"dtype": dtype, "enable_prefix_caching": False, "max_model_len": 8192, "num_kv_blocks": 160}
    return make_engine("smollm2", device, max_num_seqs=8, max_num_batched_tokens=1024, **settings)


def measure(engine: Engine, load: str, lengths: Sequence[str] = tuple(SAMPLES)) -> Golden:
    """Samples of each length: ``first`` token, ``tokens``, ``sum`` of log-probabilities as a hexadecimal float, ``digest``, ``ppl``."""
    found: Golden = {}
    for length in lengths:
        found[length] = []
        for first, end in SAMPLES[length]:
            values = _logprobs(engine, tokens()[first:end], load)
            total = math.fsum(values.tolist())  # exact, and rounded once
            found[length].append(
                {
                    "first": first,
                    "tokens": end - first,
                    "sum": total.hex(),
                    "digest": hashlib.sha256(values.tobytes()).hexdigest()[:16],
                    "ppl": round(math.exp(-total / len(values)), 6),
                }
            )
    return found


def _logprobs(engine: Engine, ids: Sequence[int], load: str) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Log-probability of every token but the first, float32."""
    if load == "mates":
        for i, prompt in enumerate(random_prompts((40, 300, 7), seed=len(ids), vocab=49_000)):
            busy = SamplingParams(temperature=0.8, seed=i, max_tokens=(60, 30, 90)[i], ignore_eos=True)
            engine.add_request(request(f"mate {i}", prompt, busy, stream=True))
        for _ in range(3):
            engine.step()
    ask = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, ignore_eos=True)
    engine.add_request(request("sample", ids, ask, stream=True))
    answer = Answer()
    while engine.has_unfinished():
        for delta in engine.step():
            assert delta.error is None, delta.error
            if delta.request_id == "sample":
                answer.prompt_logprobs = delta.prompt_logprobs or answer.prompt_logprobs
    told = answer.prompt_logprobs
    assert told is not None and len(told) == len(ids) and told[0] is None
    values = np.array([one.values[0] for one in told[1:] if one is not None], np.float32)
    assert len(values) == len(ids) - 1 and np.isfinite(values).all()
    return values


# What is kept


def read(path: Path = GOLDEN) -> dict[str, Golden]:
    """All goldens by key; none if nothing has been recorded."""
    return json.loads(path.read_text()) if path.exists() else {}


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Nobody else, of this machine or another one with the folder, writes ``path`` meanwhile."""
    with open(path.with_suffix(".lock"), "a+") as file:
        fcntl.lockf(file, fcntl.LOCK_EX)  # of POSIX, which network file systems pass on; released with the file
        yield


def record(found: Mapping[str, Golden], path: Path = GOLDEN) -> list[str]:
    """Adds goldens, length by length, to what is there by then; gives keys whose numbers were others before."""
    with locked(path):
        kept = read(path)
        changed = [
            key for key, golden in found.items() if any(kept.get(key, {}).get(n, samples) != samples for n, samples in golden.items())
        ]
        for key, golden in found.items():
            kept.setdefault(key, {}).update(golden)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name)
        with os.fdopen(handle, "w") as file:
            json.dump(kept, file, indent=1, sort_keys=True)
            file.write("\n")
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    return sorted(changed)


def differences(want: Golden, got: Golden) -> list[str]:
    """Samples that are not the same to the last bit."""
    told = []
    for length, samples in got.items():
        for one, other in zip(want.get(length, []), samples, strict=False):
            if one != other:
                told.append(f"{length} from token {other['first']} on: {other['sum']} (ppl {other['ppl']}), recorded {one['sum']}")
        if len(want.get(length, [])) != len(samples):
            told.append(f"{length}: {len(samples)} samples, recorded {len(want.get(length, []))}")
    return told


def command(device: str) -> str:
    """What records the goldens of a device."""
    return f"PYTHONPATH=tests:python python -m ppl_kit --device {device}"


def main(argv: Sequence[str] | None = None) -> None:
    """Records what this machine computes."""
    parser = argparse.ArgumentParser(prog="python -m ppl_kit", description="Record log-likelihoods of a book under SmolLM2-135M.")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N")
    parser.add_argument("--dtype", action="append", help="float32, bfloat16 or float16; may be repeated")
    parser.add_argument("--length", action="append", choices=tuple(SAMPLES), help="may be repeated; all by default")
    parser.add_argument("--golden", type=Path, default=GOLDEN, help="file to record in")
    options = parser.parse_args(argv)
    kind = options.device.split(":")[0]
    for dtype in options.dtype or DTYPES[kind]:
        with engine_for(options.device, dtype) as engine:
            for load in LOADS:
                key = key_of(options.device, dtype, load)
                golden = measure(engine, load, options.length or tuple(SAMPLES))
                changed = record({key: golden}, options.golden)
                told = ", ".join(f"{length} {', '.join(str(s['ppl']) for s in samples)}" for length, samples in golden.items())
                print(f"{key}: {told}{' (changed)' if changed else ''}", flush=True)


if __name__ == "__main__":
    sys.exit(exit_code(main))
