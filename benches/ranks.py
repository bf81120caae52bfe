"""Several engines against one: tokens per second, and what being in step costs.

    python benches/ranks.py --model MODEL --load-format dummy --ranks 2 [--expert-parallel] [--step-policy mixed decode_first] [--json]

Each line is one run: one engine with a share of the load, or all ranks with the whole of it, with and without overlap; medians over
``--repeats``. ``policy`` is how steps were put together, of ranks by each ``--step-policy``; one engine's are mixed. ``against`` is the
throughput against so many times that of one engine. The vote's cost, of ranks that step together, is what the host waited for rounds,
the exchange's (``--expert-parallel``) is timed by itself as well, at the sizes of a decode step: rows there, answers back.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from deepinfer import LLM, SamplingParams
from deepinfer.cli import machine
from deepinfer.cli.app import exit_code
from deepinfer.cli.bench_load import random_prompts


def main() -> None:
    args = arguments()
    table = []
    for overlap in (True, False):
        one = measure(args, 1, overlap, "mixed")
        table.append(one)
        for policy in args.step_policy:
            many = measure(args, args.ranks, overlap, policy)
            many["against"] = round(many["tokens_per_second"] / (args.ranks * one["tokens_per_second"]), 3)
            table.append(many)
    report: dict[str, Any] = {"machine": machine.in_words(device(args), torch.get_num_threads()), "runs": table}
    if args.expert_parallel:
        report["exchange"] = time_exchange(args)
    if args.json:
        print(json.dumps(report))
        return
    print(report["machine"])
    for run in table:
        print("  ".join(f"{name} {value}" for name, value in run.items()))
    if args.expert_parallel:
        print("exchange of one layer:", "  ".join(f"{name} {value}" for name, value in report["exchange"].items()))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--expert-parallel", action="store_true")
    policies = ("mixed", "decode_first")
    parser.add_argument("--step-policy", nargs="+", choices=policies, help="of the ranks, a run each (default: their own)")
    parser.add_argument("--num-prompts", type=int, default=64, help="of one rank")
    parser.add_argument("--num-seqs", type=int, default=32, help="running at once on one rank")
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--hidden", type=int, default=4096, help="width of the exchange's rows")
    parser.add_argument("--chosen", type=int, default=6, help="experts of a row in the exchange")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.expert_parallel and "mixed" in (args.step_policy or ()):
        parser.error("ranks with spread experts agree on steps of one kind: leave --step-policy mixed out")
    args.step_policy = args.step_policy or ["decode_first" if args.expert_parallel else "mixed"]
    return args


def device(args: argparse.Namespace) -> str:
    return ("cuda" if torch.cuda.is_available() else "cpu") if args.device == "auto" else args.device


def measure(args: argparse.Namespace, ranks: int, overlap: bool, policy: str) -> dict[str, Any]:
    """Throughput of ``ranks`` engines with their share of the prompts each, and the counts of all of them."""
    spread = {"data_parallel_size": ranks, "expert_parallel": args.expert_parallel} if ranks > 1 else {}
    settings: dict[str, Any] = {
        "load_format": args.load_format, "device": args.device, "max_num_seqs": args.num_seqs, "quiet": True, "zero_overhead": overlap,
        "max_model_len": args.input_len + args.output_len, "enable_prefix_caching": False, "step_policy": policy,
        **spread,
    }  # fmt: skip
    params = SamplingParams(temperature=0, max_tokens=args.output_len, ignore_eos=True, detokenize=False)
    with LLM(args.model, **settings) as llm:
        prompts = [{"prompt_token_ids": p} for p in random_prompts(args.num_prompts * ranks, args.input_len, llm.vocab_size, 0)]
        llm.generate(prompts[: args.num_seqs * ranks], params.clone(max_tokens=4), use_tqdm=False)
        before, seconds = llm.metrics(), []
        for _ in range(args.repeats):
            begin = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            seconds.append(time.perf_counter() - begin)
        after = llm.metrics()
    steps = after.totals["steps"] - before.totals["steps"]
    found = {
        "engines": ranks,
        "policy": policy,
        "overlap": overlap,
        "tokens_per_second": round(len(prompts) * args.output_len / statistics.median(seconds), 1),
        "steps_of_a_rank": steps // ranks // args.repeats,
        "device_ms_a_step": round(after.device_time.mean_ms, 3),
        "bubble": round(after.bubble, 4),
    }
    for name, per, of in (
        ("vote_us_a_round", "vote_rounds", "vote_wait_seconds"),
        ("exchange_us_on_the_host", "exchanges", "exchange_seconds"),
    ):
        if count := after.group.get(per, 0) - before.group.get(per, 0):
            found[name] = round((after.group[of] - before.group[of]) / count * 1e6, 1)
    return found


def time_exchange(args: argparse.Namespace) -> dict[str, Any]:
    """Microseconds of both ways of one layer's rows, on processes that do nothing else."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        torch.multiprocessing.spawn(_exchange, (args, folder, str(out)), nprocs=args.ranks)
        found: dict[str, Any] = json.loads(out.read_text())
        return found


def _exchange(rank: int, args: argparse.Namespace, folder: str, out: str) -> None:
    from deepinfer.engine.data_parallel.membership import Membership
    from deepinfer.engine.data_parallel.place import RankPlace

    kind = device(args)
    where = torch.device(kind, rank) if kind == "cuda" else torch.device("cpu")
    group = Membership(RankPlace(rank, args.ranks, f"{folder}/meet", True, 60.0), where).experts
    assert group is not None
    rows = args.num_seqs
    group.begin(rows)
    x = torch.randn(rows, args.hidden, device=where, dtype=torch.bfloat16)
    places = torch.randint(0, args.ranks * 8, (rows, args.chosen), device=where)
    weights = torch.rand(rows, args.chosen, device=where)
    made = torch.randn(args.ranks * rows, args.chosen, args.hidden, device=where, dtype=torch.bfloat16)
    found = {}
    for name, work in (("there_us", lambda: group.dispatch(x, places, weights)), ("back_us", lambda: group.combine(made, places // 8))):
        for _ in range(5):
            work()
        times = []
        for _ in range(7):
            if kind == "cuda":
                torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(20):
                work()
            if kind == "cuda":
                torch.cuda.synchronize()
            times.append((time.perf_counter() - begin) / 20)
        found[name] = round(statistics.median(times) * 1e6, 1)
    if rank == 0:
        Path(out).write_text(json.dumps({"rows": rows, "hidden": args.hidden, "chosen": args.chosen, **found}))
    group.close()


if __name__ == "__main__":
    sys.exit(exit_code(main))
