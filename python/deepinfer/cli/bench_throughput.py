"""``deepinfer bench throughput``: many prompts at once, tokens per second."""

from __future__ import annotations

import argparse
import math

from deepinfer.cli import bench_load, console

USAGE = "--model MODEL [options]"
EXAMPLES = (
    "deepinfer bench throughput --model smollm2 --num-prompts 32 --num-seqs 8 --json",
    "deepinfer bench throughput --model ./config-only --load-format dummy --input-len 512 --output-len 128",
    "deepinfer bench throughput --model smollm2 --request-rate 5 --input-len 600 --shared-prefix-len 512 --shared-share 0.5",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    bench_load.add_load_options(parser, input_len=128, output_len=64, num_seqs=8)
    parser.add_argument("--num-prompts", type=bench_load.positive, default=32, metavar="N", help="prompts in all (default: 32)")
    parser.add_argument("--shared-prefix-len", type=int, default=0, metavar="N", help="first tokens that prompts share (default: 0)")
    parser.add_argument("--shared-share", type=float, default=1.0, metavar="X", help="share of prompts that do (default: 1)")
    parser.add_argument(
        "--request-rate", type=float, default=None, metavar="R", help="requests a second, at random times (Poisson); default: all at once"
    )
    parser.add_argument("--stream", action="store_true", help="read every answer token by token, and tell of the times between them")


def run(args: argparse.Namespace) -> int:
    """Runs the load once and prints rates, time to first token and time a token."""
    if not 0 <= args.shared_prefix_len <= args.input_len:
        raise console.UserError(f"--shared-prefix-len must be between 0 and --input-len ({args.input_len})")
    if not 0 <= args.shared_share <= 1:
        raise console.UserError("--shared-share must be between 0 and 1")
    if args.request_rate is not None and not 0 < args.request_rate < math.inf:
        raise console.UserError("--request-rate must be a number above 0; without it all requests arrive at once")
    with bench_load.start_engine(args, args.num_seqs) as llm:
        seed = args.seed or 0
        warm = bench_load.random_prompts(min(args.num_seqs, args.num_prompts), args.input_len, llm.vocab_size, seed + 1)
        bench_load.timed_run(llm, warm, min(args.output_len, 4), "warm", stream=args.stream)
        bench_load.start_trace(args, llm)
        shared = (args.shared_prefix_len, args.shared_share)
        prompts = bench_load.random_prompts(args.num_prompts, args.input_len, llm.vocab_size, seed, *shared)
        arriving = [] if args.request_rate is None else bench_load.arrivals(args.num_prompts, args.request_rate, seed)
        before = llm.metrics()
        with console.progress(args.num_prompts, "bench", "prompt") as bar:
            made = bench_load.timed_run(llm, prompts, args.output_len, "run", bar, stream=args.stream, arriving=arriving)
        device, times = bench_load.device_figures(before, llm.metrics()), made.times
        seconds = max(t.last for t in times) - min(t.submitted for t in times)
        generated = sum(t.tokens for t in times)
        result = {
            "bench": "throughput",
            **bench_load.circumstances(args, llm, args.num_seqs),
            "num_prompts": args.num_prompts,
            "shared_prefix_len": args.shared_prefix_len,
            "shared_share": args.shared_share,
            "request_rate": args.request_rate,
            "stream": args.stream,
            "seconds": round(seconds, 4),
            "output_tokens_per_second": round(generated / seconds, 2),
            "total_tokens_per_second": round((generated + args.num_prompts * args.input_len) / seconds, 2),
            "requests_per_second": round(args.num_prompts / seconds, 3),
            "submit_seconds": round(made.submit_seconds, 4),
            **device,
        }
    figures = {
        "ttft_ms": bench_load.spread([t.first_token for t in times]),
        "tpot_ms": bench_load.spread([t.mean_gap for t in times if t.mean_gap is not None]),
    }
    if args.stream:
        figures["itl_ms"] = bench_load.spread([gap for t in times for gap in t.gaps])
    if args.json:
        console.print_json({**result, **figures})
        return console.EXIT_OK
    rate = "" if args.request_rate is None else f", {args.request_rate:g} a second arriving"
    at_once = f"{args.num_seqs} at once" if result["data_parallel"] == 1 else f"up to {args.num_seqs * result['data_parallel']} at once"
    between = f"{bench_load.milliseconds('time between tokens', figures['itl_ms'])}\n" if args.stream else ""
    console.write_out(
        f"{result['output_tokens_per_second']:.1f} output tok/s, {result['total_tokens_per_second']:.1f} tok/s with prompts, "
        f"{result['requests_per_second']:.2f} requests/s\n"
        f"{args.num_prompts} prompts of {args.input_len} tokens, {args.output_len} out, {at_once}{rate}, {seconds:.2f} s\n"
        f"{bench_load.milliseconds('time to first token (waiting included)', figures['ttft_ms'])}\n"
        f"{bench_load.milliseconds('time a token, mean of an answer', figures['tpot_ms'])}\n{between}{bench_load.device_line(result)}"
        f"{bench_load.setting(result)}\n{bench_load.COUNTING}\n"
    )
    return console.EXIT_OK
