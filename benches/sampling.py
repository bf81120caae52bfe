"""How long a GPU takes from logits to tokens: the sampler's kernels beside torch operators that give the same tokens.

    python benches/sampling.py [--vocab 49152 128256] [--rows 1 64 256] [--dtype bfloat16] [--json]
    python benches/sampling.py --kind top_k top_p min_p logprobs --rows 1 256 --no-torch
    python benches/sampling.py --kind top_k top_p logprobs --rows 1 8 16 32 64 128 --no-torch --few-rows 0  # and 1000

Each line is a median of ``--repeats`` measurements, each the mean of many calls on logits that lie in turn in enough memory that they do
not come from the cache. Kernels are captured in one CUDA graph; torch operators, which allocate, run eagerly behind a warm-up, launches and
all. Logits are normal with deviation 3 and a few likely tokens. ``kind``: what all rows want; ``kernels_us``: the whole of it, argmax or
the gathering of log-probabilities included; ``by_rank_us``: of that the one kernel that works by rank. ``--few-rows``: up to so many rows
several blocks share a row; 0 and 1000 show where the two forms meet.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from functools import partial

import torch

from deepinfer.kernels.sample.cuda import FEW_ROWS, Draws, Logprobs
from deepinfer.sampling import SamplingParams
from deepinfer.worker.device_sampler import DeviceSampler
from deepinfer.worker.logprobs import gather_logprobs
from deepinfer.worker.sampler import Sampler, SampleRows
from deepinfer.worker.sampling_state import RowSampling, SamplingState

KINDS = {
    "greedy": {"temperature": 0.0},
    "plain": {"temperature": 0.8},
    "min_p": {"temperature": 0.8, "min_p": 0.05},
    "top_k": {"temperature": 0.8, "top_k": 50},
    "top_p": {"temperature": 0.8, "top_p": 0.9},
    "top_k+top_p": {"temperature": 0.8, "top_k": 50, "top_p": 0.9},
    "flat_top_p": {"temperature": 1e30, "top_p": 0.9},
    "penalties": {"temperature": 0.0, "repetition_penalty": 1.2, "frequency_penalty": 0.3},
    "logprobs": {"temperature": 0.0, "logprobs": 20},
}
_COLD = 256 << 20
"""Bytes of logits that calls go through in turn."""


def model_like(rows: int, vocab: int, seed: int) -> torch.Tensor:
    """Logits float32 ``[rows, vocab]``."""
    g = torch.Generator(device="cuda").manual_seed(seed)
    x = torch.randn(rows, vocab, device="cuda", generator=g) * 3
    likely = torch.randint(vocab, (rows, 8), device="cuda", generator=g)
    return x.scatter_add_(1, likely, torch.rand(rows, 8, device="cuda", generator=g) * 20)


def row_state(rows: int, vocab: int, values: dict[str, float]) -> tuple[SamplingState, SampleRows]:
    """``rows`` sequences that want the same."""
    device = torch.device("cuda")
    state = SamplingState(rows + 1, vocab, device)
    params = SamplingParams(max_tokens=99, **values)  # type: ignore[arg-type]
    for slot in range(1, rows + 1):
        state.admit(slot, RowSampling(params, slot, [1, 2, 3]), [4, 5])
    every = torch.arange(rows, device=device)
    draws, edits = values["temperature"] > 0, "repetition_penalty" in values
    by_rank = draws and ("top_k" in values or "top_p" in values)
    return state, SampleRows(
        every + 1,
        every + 7,
        int(state.flags[1]),
        edit=every if edits else None,
        plain=every if draws and not by_rank else None,
        ranked=every if by_rank else None,
        max_top_k=int(values.get("top_k", vocab)),
    )


def timed(call: Callable[[], None], repeats: int, calls: int) -> float:
    """Median microseconds of a call that makes ``calls`` of them."""
    call()
    torch.cuda.synchronize()
    found = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        call()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) * 1e3 / calls)
    return statistics.median(found)


def by_rank(
    logits: list[torch.Tensor], values: dict[str, float], wanted: SampleRows, state: SamplingState, few_rows: int
) -> list[Callable[[], None]]:
    """Launches of the kernel alone that works by rank, if there is one."""
    (rows, vocab), dtype, device = logits[0].shape, logits[0].dtype, logits[0].device
    found: list[Callable[[], None]] = []
    if wanted.ranked is not None:
        draws = Draws(vocab, dtype, rows, device, few_rows=few_rows)
        for x in logits:
            answers = x.max(-1).values.float(), x.argmax(-1).int()
            found.append(partial(draws.ranked, x, wanted.ranked, wanted.slots, state.table, wanted.positions, *answers))
    elif "logprobs" in values:
        kernel = Logprobs(vocab, device, few_rows=few_rows)
        for x in logits:
            tokens, rank = x.argmax(-1), torch.empty(rows, dtype=torch.int32, device=device)
            answers = torch.empty(rows, device=device), torch.empty_like(tokens), rank, rank.new_empty((rows, int(values["logprobs"])))
            found.append(partial(kernel, x, tokens, *answers))
    return found


def measure(kind: str, rows: int, vocab: int, dtype: torch.dtype, repeats: int, few_rows: int, torch_too: bool) -> dict[str, object]:
    """One line."""
    values = KINDS[kind]
    state, wanted = row_state(rows, vocab, values)
    narrow = wanted.edit is None and "logprobs" not in values
    kept = dtype if narrow else torch.float32
    copies = max(2, -(-_COLD // (rows * vocab * kept.itemsize)))
    copies = min(copies, 64)
    logits = [model_like(rows, vocab, i).to(kept) for i in range(copies)]
    device = torch.device("cuda")
    kernels = DeviceSampler.on(device, vocab, dtype, rows, few_rows)
    if kernels is None:
        raise SystemExit("the sampler's kernels cannot be had here; the warning above says why")
    plain = Sampler(state, vocab)

    def by_kernels() -> None:
        for x in logits:
            if "logprobs" in values:
                gather_logprobs(x, wanted.slots, int(values["logprobs"]), kernels.logprobs)
            elif values["temperature"] == 0 and wanted.edit is None:
                kernels.greedy(x)
            else:
                kernels.draw(x, wanted, None, state)

    def by_torch() -> None:
        for x in logits:
            if "logprobs" in values:
                gather_logprobs(x, wanted.slots, int(values["logprobs"]))
            else:
                plain.draw(x.float(), wanted, None)

    def replayed(call: Callable[[], None]) -> float:
        call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        return round(timed(graph.replay, repeats, copies), 2)

    line = {"kind": kind, "rows": rows, "vocab": vocab, "logits": str(kept).removeprefix("torch.")}
    line["kernels_us"] = replayed(by_kernels)
    alone = by_rank(logits, values, wanted, state, few_rows)
    if alone:

        def by_rank_alone() -> None:
            for launch in alone:
                launch()

        line["by_rank_us"] = replayed(by_rank_alone)
    if torch_too:
        line["torch_us"] = round(timed(by_torch, repeats, copies), 2)
    line["one_read_us"] = round(rows * vocab * kept.itemsize / 4.5e6, 2)  # at 4.5 TB/s
    return line


def main() -> None:
    """Prints a line a measurement."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, nargs="+", default=[49152, 128256])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--kind", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--few-rows", type=int, default=FEW_ROWS, help="up to so many rows have several blocks each (default: %(default)s)")
    parser.add_argument("--no-torch", dest="torch", action="store_false", help="leave out torch's operators, which take longest")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(2, "this measures a GPU, and torch sees none; the sampler on a CPU is part of `deepinfer bench latency`\n")
    print(json.dumps({"device": torch.cuda.get_device_name(), "torch": torch.__version__}))
    with torch.inference_mode():
        for vocab in args.vocab:
            for rows in args.rows:
                for kind in args.kind:
                    line = measure(kind, rows, vocab, getattr(torch, args.dtype), args.repeats, args.few_rows, args.torch)
                    print(json.dumps(line) if args.json else "  ".join(f"{k} {v}" for k, v in line.items()), flush=True)


if __name__ == "__main__":
    main()
