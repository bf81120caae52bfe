"""``deepinfer bench latency``: batches of fixed size, over and over."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from deepinfer.cli import bench_load, console

if TYPE_CHECKING:
    from deepinfer.llm import LLM

USAGE = "--model MODEL [options]"
EXAMPLES = (
    "deepinfer bench latency --model smollm2 --num-seqs 1 --json",
    "deepinfer bench latency --model ./config-only --load-format dummy --num-seqs 8 --input-len 1024 --output-len 32",
    "deepinfer bench latency --model ./config-only --load-format dummy --device cuda --num-seqs 1 64 256 --no-stream --json",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    bench_load.add_load_options(parser, input_len=32, output_len=64, num_seqs=1, sizes=True)
    parser.add_argument("--num-iters", type=bench_load.positive, default=5, metavar="N", help="batches measured (default: 5)")
    parser.add_argument(
        "--stream",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="read answers token by token, and tell of the times between them (default: on); off, the host has the least to do",
    )


def run(args: argparse.Namespace) -> int:
    """Measures one size after the other on one engine; prints the spread of times of each."""
    batches = args.num_iters * len(args.num_seqs)
    with bench_load.start_engine(args, max(args.num_seqs)) as llm, console.progress(batches, "bench", "batch") as bar:
        for i, size in enumerate(args.num_seqs):
            result = _measure(args, llm, size, bar, trace=not i)
            if args.json:
                console.print_json(result)
            else:
                console.write_out(_report(result, args))
    return console.EXIT_OK


def _measure(args: argparse.Namespace, llm: LLM, size: int, bar: console.Progress, trace: bool) -> dict[str, Any]:
    """Figures of batches of ``size``, the first of which warms up; ``trace``: begin the one that was asked for behind it."""
    batches: list[bench_load.Run] = []
    before = llm.metrics()
    for i in range(args.num_iters + 1):
        # Prompts differ from batch to batch, so that none hits the prefix cache of the one before.
        prompts = bench_load.random_prompts(size, args.input_len, llm.vocab_size, (args.seed or 0) + 1000 * size + i)
        batch = bench_load.timed_run(llm, prompts, args.output_len, f"batch{size}.{i}", stream=args.stream)
        if i:
            batches.append(batch)
            bar.update(1)
            continue
        if trace:
            bench_load.start_trace(args, llm)
        before = llm.metrics()
    device = bench_load.device_figures(before, llm.metrics())
    times = [t for batch in batches for t in batch.times]
    gaps = [gap for t in times for gap in (t.gaps if args.stream else [t.mean_gap] * (t.tokens - 1)) if gap is not None]
    circumstances = bench_load.circumstances(args, llm, size)
    alone = circumstances["data_parallel"] == 1
    result = {
        "bench": "latency",
        **circumstances,
        "num_iters": args.num_iters,
        "stream": args.stream,
        "step_counting": bench_load.STEP_COUNTING if alone else bench_load.NO_STEPS,
        "decode_tokens_per_second": round(size * len(gaps) / sum(gaps), 2) if gaps else None,
        "step_ms": bench_load.step_times([batch.steps for batch in batches] if alone else [], args.output_len),
        **device,
        "ttft_ms": bench_load.spread([t.first_token for t in times]),
        "latency_ms": bench_load.spread([t.total for t in times]),
    }
    if args.stream:
        result["itl_ms"] = bench_load.spread(gaps)
    return result


def _report(result: dict[str, Any], args: argparse.Namespace) -> str:
    """The same for a person."""
    per_second, step = result["decode_tokens_per_second"], result["step_ms"]["mean"]
    rate = "" if per_second is None else f", {per_second:.1f} tok/s while decoding"
    decoding = "" if step is None else f"decode step: mean {step:.2f} ms, median {result['step_ms']['median']:.2f} ms\n"
    if result["data_parallel"] > 1:
        decoding = f"decode step: {bench_load.NO_STEPS}\n"
    between = f"{bench_load.milliseconds('time between tokens', result['itl_ms'])}\n" if args.stream else ""
    return (
        f"{result['num_seqs']} at once, {args.input_len} tokens in, {args.output_len} out, {args.num_iters} batches{rate}\n"
        f"{bench_load.milliseconds('time to first token', result['ttft_ms'])}\n{between}"
        f"{bench_load.milliseconds('whole answer', result['latency_ms'])}\n{decoding}{bench_load.device_line(result)}"
        f"{bench_load.setting(result)}\n{bench_load.COUNTING}\n"
    )
