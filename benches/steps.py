"""How long a decode step takes, how many tokens a second come out of a queue, and which kernels the time goes to.

    python benches/steps.py --model DIR --load-format dummy --device cuda [--seqs 1 64 256] [--requests 1024] [--kernels]

Figures of `deepinfer bench latency --no-stream` and `deepinfer bench throughput` from one engine, by their own rules, and what these do
not have: which kernels a decode step consists of. Decode: `--seqs` prompts of `--input-len` tokens at once, `--output-len` tokens each,
three batches. Requests: so many of `--request-len` tokens in and `--request-out` out, all at once; `submit_s`: handing over. Kernels:
torch's profiler over 20 decode steps, which slows the host; times of kernels that overlap (programmatic launch) hold the wait for the one
before.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import defaultdict
from typing import Any

from deepinfer import LLM, SamplingParams
from deepinfer.cli import bench_load, machine
from deepinfer.cli.app import exit_code

_RUNS = 3
_PROFILED = 20


def drain(llm: LLM) -> None:
    """Steps until nothing is left."""
    while llm.has_unfinished_requests():
        llm.step()


def prompts_of(llm: LLM, count: int, length: int, seed: int) -> list[list[int]]:
    """Random ids, no two prompts with a common beginning."""
    return bench_load.random_prompts(count, length, llm.vocab_size, seed)


def submit(llm: LLM, name: str, prompts: list[list[int]], out: int) -> None:
    """Hands over one request of ``out`` tokens for each prompt."""
    params = SamplingParams(temperature=0.0, max_tokens=out, ignore_eos=True, detokenize=False)
    for i, prompt in enumerate(prompts):
        llm.add_request(prompt, params, request_id=f"{name}.{i}")


def decode(llm: LLM, seqs: int, length: int, out: int) -> dict[str, Any]:
    """Milliseconds of a decode step with ``seqs`` sequences, counted as `deepinfer bench latency` does."""
    batches = []
    for run in range(_RUNS):
        prompts = prompts_of(llm, seqs, length, seed=1000 * seqs + run)
        batches.append(bench_load.timed_run(llm, prompts, out, f"d{seqs}.{run}", stream=False).steps)
    step = bench_load.step_times(batches, out)
    whole = statistics.median(1e3 * sum(steps) / out for steps in batches)
    return {"seqs": seqs, "ms": step["mean"], "median_ms": step["median"], "whole_ms_a_token": round(whole, 3)}


def queue(llm: LLM, requests: int, length: int, out: int) -> dict[str, Any]:
    """Tokens a second out of a queue, counted as `deepinfer bench throughput` does."""
    made = bench_load.timed_run(llm, prompts_of(llm, requests, length, seed=7), out, "q", stream=False)
    seconds = max(t.last for t in made.times) - min(t.submitted for t in made.times)
    return {
        "requests": requests,
        "in": length,
        "out": out,
        "submit_s": round(made.submit_seconds, 3),
        "seconds": round(seconds, 2),
        "output_tok_s": round(requests * out / seconds),
    }


def kernels(llm: LLM, seqs: int, length: int) -> list[dict[str, Any]]:
    """Microseconds a decode step by kernel, the longest first."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    submit(llm, f"k{seqs}", prompts_of(llm, seqs, length, seed=99), 4 * _PROFILED + seqs)
    for _ in range(2 * _PROFILED + seqs // 20):
        llm.step()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        for _ in range(_PROFILED):
            llm.step()
        torch.cuda.synchronize()
    spent: dict[str, list[float]] = defaultdict(list)
    for event in seen.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            spent[event.name].append(event.time_range.elapsed_us())
    drain(llm)
    found = [{"kernel": name, "us_a_step": round(sum(t) / _PROFILED, 1), "calls": len(t) / _PROFILED} for name, t in spent.items()]
    return sorted(found, key=lambda k: -float(str(k["us_a_step"])))


def main() -> None:
    """Prints one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--weights", default="auto", choices=("auto", "packed", "expanded"), help="of an FP8 checkpoint")
    parser.add_argument("--seqs", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=256)
    parser.add_argument("--requests", type=int, default=0)
    parser.add_argument("--request-len", type=int, default=512)
    parser.add_argument("--request-out", type=int, default=128)
    parser.add_argument("--kernels", action="store_true", help="on a GPU: what the time of a decode step goes to")
    parser.add_argument("--batch-invariant", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--kv-cache-dtype", choices=("auto", "fp8"), default="auto")
    args = parser.parse_args()
    started = time.perf_counter()
    settings: dict[str, Any] = {"load_format": args.load_format, "device": args.device, "batch_invariant": args.batch_invariant}
    settings["kv_cache_dtype"] = args.kv_cache_dtype
    with LLM(model=args.model, max_num_seqs=max(args.seqs), weights=args.weights, **settings) as llm:
        found: dict[str, Any] = {
            "machine": machine.in_words(str(llm.engine.run.device), None),
            "batch_invariant": args.batch_invariant,
            "kv_cache_dtype": args.kv_cache_dtype,
            "start_s": round(time.perf_counter() - started, 2),
        }
        found["decode"] = [decode(llm, n, args.input_len, args.output_len) for n in args.seqs]
        if args.requests:
            found["queue"] = queue(llm, args.requests, args.request_len, args.request_out)
        seen = llm.metrics()
        found["bubble"], found["host_ms_a_step"] = round(seen.bubble, 4), round(seen.host_time.mean_ms, 3)
        if args.kernels:
            found["kernels"] = {n: kernels(llm, n, args.input_len)[:12] for n in args.seqs}
    print(json.dumps(found))


if __name__ == "__main__":
    sys.exit(exit_code(main))
