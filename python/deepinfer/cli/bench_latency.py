"""``deepinfer bench latency``: one batch of fixed size, over and over."""

from __future__ import annotations

import argparse

from deepinfer.cli import bench_load, console

USAGE = "--model MODEL [options]"
EXAMPLES = (
    "deepinfer bench latency --model smollm2 --num-seqs 1 --json",
    "deepinfer bench latency --model ./config-only --load-format dummy --num-seqs 8 --input-len 1024 --output-len 32",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    bench_load.add_load_options(parser, input_len=32, output_len=64, num_seqs=1)
    parser.add_argument("--num-iters", type=bench_load.positive, default=5, metavar="N", help="batches measured (default: 5)")


def run(args: argparse.Namespace) -> int:
    """Runs the batches one after another and prints the spread of their times."""
    engine = bench_load.engine_arguments(args)
    from deepinfer import LLM

    with LLM(**engine) as llm:
        seed = args.seed or 0
        times: list[bench_load.Timeline] = []
        with console.progress(args.num_iters, "bench", "batch") as bar:
            for i in range(args.num_iters + 1):  # the first warms up
                # Prompts differ from batch to batch, so that none hits the prefix cache of the one before.
                prompts = bench_load.random_prompts(args.num_seqs, args.input_len, llm.vocab_size, seed + i)
                batch = bench_load.timed_run(llm, prompts, args.output_len, f"batch{i}", stream=True)
                if not i:
                    bench_load.start_trace(args, llm)
                else:
                    times += batch
                    bar.update(1)
        result = {"bench": "latency", **bench_load.circumstances(args, llm), "num_iters": args.num_iters}
    gaps = [gap for t in times for gap in t.gaps]
    per_second = args.num_seqs * len(gaps) / sum(gaps) if gaps else None
    figures = {
        "ttft_ms": bench_load.spread([t.first_token for t in times]),
        "itl_ms": bench_load.spread(gaps),
        "latency_ms": bench_load.spread([t.total for t in times]),
    }
    if args.json:
        decode = None if per_second is None else round(per_second, 2)
        console.print_json({**result, "decode_tokens_per_second": decode, **figures})
        return console.EXIT_OK
    rate = "" if per_second is None else f", {per_second:.1f} tok/s while decoding"
    console.write_out(
        f"{args.num_seqs} at once, {args.input_len} tokens in, {args.output_len} out, {args.num_iters} batches{rate}\n"
        f"{bench_load.milliseconds('time to first token', figures['ttft_ms'])}\n"
        f"{bench_load.milliseconds('time between tokens', figures['itl_ms'])}\n"
        f"{bench_load.milliseconds('whole answer', figures['latency_ms'])}\n"
        f"{bench_load.setting(result)}\n{bench_load.COUNTING}\n"
    )
    return console.EXIT_OK
