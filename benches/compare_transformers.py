"""DeepInfer beside transformers (and, if installed, llama.cpp) on one machine: same model, same load, same threads.

    python benches/compare_transformers.py --json
    python benches/compare_transformers.py --num-seqs 1 8 --rounds 5 --llama-cpp

Both run in this process, in turn, round by round, so that what else the machine does meets them alike; a figure is the median
over rounds, and the ratio is the median of the ratios of neighbouring rounds. Counted are output tokens from the submission to
the last token, the prompt's prefill included; loading and one warm-up round are not. Prompts are random token ids, decoding is
greedy and runs to its full length. DeepInfer runs as it serves: batch invariance, prefix cache and hashing on; every round
has prompts of its own, so the cache never hits.

`--llama-cpp` needs `pip install xllamacpp`; it runs the GGUF file as it is (4-bit for the demo model), so it reads a quarter of
the bytes that a bf16 engine reads.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import time
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from deepinfer import LLM, SamplingParams
from deepinfer.cli import machine
from deepinfer.models import resolve_model
from deepinfer.models.loaders.gguf_source import GgufSource
from deepinfer.models.loaders.safetensors_source import SafetensorsSource
from deepinfer.models.loaders.source import WeightSource

Prompts = list[list[int]]
Round = Callable[[Prompts], float]
"""Runs one batch of prompts to its end; gives seconds."""


def main() -> None:
    args = parse()
    torch.set_num_threads(args.threads)
    os.environ.setdefault("DEEPINFER_QUIET", "1")
    engines: dict[str, Round] = {}
    with LLM(
        args.model,
        dtype=args.dtype,
        device="cpu",
        num_threads=args.threads,
        max_num_seqs=max(args.num_seqs),
        max_model_len=args.input_len + args.output_len,
    ) as llm:
        engines["deepinfer"] = deepinfer_round(llm, args.output_len)
        engines["transformers"] = transformers_round(args)
        if args.llama_cpp:
            engines["llama.cpp"] = llama_cpp_round(args, max(args.num_seqs))
        rows = [measure(engines, n, args, llm.vocab_size) for n in args.num_seqs]
    report = {
        "rows": rows,
        "model": args.model,
        "dtype": args.dtype,
        "input_len": args.input_len,
        "output_len": args.output_len,
        "rounds": args.rounds,
        "machine": machine.in_words("cpu", args.threads),
        "counting": "output tokens per second from submission to last token, prefill included; medians over rounds, engines in turn",
    }
    if args.json:
        print(json.dumps(report))
        return
    print(f"{report['machine']}; {args.model}, {args.dtype}; {args.input_len} tokens in, {args.output_len} out; {args.rounds} rounds")
    for row in rows:
        rates = ", ".join(f"{name} {rate:.1f}" for name, rate in row["tokens_per_second"].items())
        ratios = ", ".join(f"{ratio:.2f} x {name}" for name, ratio in row["deepinfer_over"].items())
        print(f"{row['num_seqs']} sequences: {rates} tok/s; deepinfer is {ratios}")


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--num-seqs", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--input-len", type=int, default=32)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--llama-cpp", action="store_true", help="also run llama.cpp on the GGUF file (pip install xllamacpp)")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def measure(engines: dict[str, Round], num_seqs: int, args: argparse.Namespace, vocab_size: int) -> dict[str, Any]:
    """One row: all engines, in turn, over the same prompts of each round."""
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    for i in range(args.rounds + 1):
        draw = random.Random(1000 * num_seqs + i)
        prompts = [[draw.randrange(vocab_size) for _ in range(args.input_len)] for _ in range(num_seqs)]
        for name, one_round in engines.items():
            took = one_round(prompts)
            if i:  # the first round warms up
                seconds[name].append(took)
    tokens = num_seqs * args.output_len
    ours = seconds["deepinfer"]
    return {
        "num_seqs": num_seqs,
        "tokens_per_second": {name: round(tokens / statistics.median(values), 1) for name, values in seconds.items()},
        "deepinfer_over": {
            name: round(statistics.median(theirs / mine for theirs, mine in zip(values, ours, strict=True)), 3)
            for name, values in seconds.items()
            if name != "deepinfer"
        },
    }


def deepinfer_round(llm: LLM, output_len: int) -> Round:
    """`LLM.generate`, the call a user makes."""
    params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True, detokenize=False)

    def one_round(prompts: Prompts) -> float:
        start = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        took = time.perf_counter() - start
        check([len(o.outputs[0].token_ids) for o in outputs], output_len)
        return took

    return one_round


def transformers_round(args: argparse.Namespace) -> Round:
    """`generate` of the transformers model of the same class, over the very weights DeepInfer has read."""
    model = transformers_model(args)

    def one_round(prompts: Prompts) -> float:
        ids = torch.tensor(prompts)
        start = time.perf_counter()
        with torch.inference_mode():
            made = model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                min_new_tokens=args.output_len,
                max_new_tokens=args.output_len,
                pad_token_id=0,
            )
        took = time.perf_counter() - start
        check([row.numel() - args.input_len for row in made], args.output_len)
        return took

    return one_round


def transformers_model(args: argparse.Namespace) -> Any:
    """A transformers model filled from the same checkpoint, read by the same reader, so that both hold the same values."""
    import transformers

    resolved = resolve_model(args.model)
    model_class: Any = getattr(transformers, resolved.architecture)
    dtype = getattr(torch, args.dtype)
    if resolved.weight_format == "gguf":
        source: WeightSource = GgufSource(resolved.weight_files, resolved.config)
    else:
        source = SafetensorsSource(resolved.weight_files)
    model = model_class(model_class.config_class.from_dict(resolved.config)).to(dtype)
    missing, unexpected = model.load_state_dict({name: source.read(name).to(dtype) for name in source.names()}, strict=False)
    model.tie_weights()
    if unexpected or set(missing) - {"lm_head.weight"}:
        raise SystemExit(f"the checkpoint does not fill transformers' model: missing {missing}, unexpected {unexpected}")
    return model.eval()


def llama_cpp_round(args: argparse.Namespace, parallel: int) -> Round:
    """llama.cpp's own server inside this process, asked over HTTP with as many callers as sequences."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(resolve_model(args.model).weight_files[0])
    params.n_parallel = parallel
    params.n_ctx = parallel * (args.input_len + args.output_len)
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = args.threads
    params.warmup = False
    params.verbosity = 0
    server = xllamacpp.Server(params)
    url = f"{server.listening_address}/completion"

    def ask(prompt: list[int]) -> int:
        body = {"prompt": prompt, "n_predict": args.output_len, "temperature": 0, "ignore_eos": True, "cache_prompt": False}
        request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(request) as response:
            return int(json.load(response)["tokens_predicted"])

    def one_round(prompts: Prompts) -> float:
        with ThreadPoolExecutor(len(prompts)) as callers:
            start = time.perf_counter()
            made = list(callers.map(ask, prompts))
            took = time.perf_counter() - start
        check(made, args.output_len)
        return took

    one_round.server = server  # type: ignore[attr-defined]  # lives as long as the function
    return one_round


def check(lengths: Sequence[int], wanted: int) -> None:
    """A shorter answer would make a rate look better than it is."""
    if set(lengths) != {wanted}:
        raise SystemExit(f"answers of {sorted(set(lengths))} tokens instead of {wanted}")


if __name__ == "__main__":
    main()
