"""Microseconds of products with packed weights, by every kernel that could be chosen, beside those of the expanded weight.

    python benches/packed_products.py --build                # compiles the kernels into the store; needs no GPU
    python benches/packed_products.py --rows 1 16 64 256

For each (in, out) of a layer and each number of rows: ``plain`` the bfloat16 weight as `linear.cuda.Projection` runs it, ``library`` by
cuBLAS, ``expand`` the packed weight expanded and multiplied by cuBLAS, ``chosen`` what `linear_fp8.cuda.choose` says, and the fastest
candidates by (tokens, tile, KB under way, chunk, turned). ``limit``: the bytes of the packed weight at 4.5 TB/s. A graph of programmatic
launches over weights of more than 130 MB; median of 7 replays.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch

from deepinfer.cli.app import exit_code
from deepinfer.errors import KernelBuildError
from deepinfer.kernels.linear.cuda import ProductKernels, Projection, linears_of, programs_of
from deepinfer.kernels.linear_fp8 import PackedWeight, scale_shape
from deepinfer.kernels.linear_fp8.cuda import Choice, Expansion, FewRowsFp8, PackedProjection, choose, expand_program, few_rows_program
from deepinfer.kernels.toolchain import Program, default_store
from deepinfer.kernels.toolchain.loading import require
from deepinfer.kernels.toolchain.shapes import NAMED
from deepinfer.platforms import get_platform

_KB = 1024
_BYTES = 130 << 20
_PER_US = 4.5e6  # bytes that memory gives in a microsecond
_SHOWN = 3


def candidates(rows: int) -> list[Choice]:
    """What may be worth choosing for ``rows`` rows."""
    if rows <= 32:
        tokens = 16 if rows <= 16 else 32
        turned = [Choice(tokens, tile, ahead * _KB, turned=True) for tile in (16, 32, 64) for ahead in (16, 32)]
        return [*turned, Choice(8 if rows <= 8 else tokens, 32, 32 * _KB)]
    if rows <= 64:
        turned = [Choice(tokens, 32, 20 * _KB, 64, turned=True) for tokens in (32, 64)]
        return [*turned, *(Choice(64, tile, ahead * _KB, 64) for tile in (32, 64) for ahead in (12, 20))]
    if rows > 512:
        return []
    wide = [Choice(64, 64, 20 * _KB, 64), Choice(128, 64, 8 * _KB, 64), Choice(128, 64, 16 * _KB, 64)]
    return wide if rows <= 128 else [*wide, Choice(256, 64, 8 * _KB, 64)]


def programs(pairs: list[tuple[int, int]], counts: list[int]) -> list[Program]:
    """All kernels that are launched."""
    found: dict[Program, None] = {}
    for in_features, out_features in pairs:
        found |= dict.fromkeys(programs_of(in_features, out_features, "bfloat16"))
        found[expand_program(in_features, "bfloat16")] = None
        for rows in counts:
            chosen = choose(in_features, out_features, rows)
            every = [*candidates(rows), *([chosen] if chosen else [])]
            found |= dict.fromkeys(few_rows_program(in_features, choice, "bfloat16") for choice in every)
    return list(found)


def timed(step: Callable[[], None], products: int) -> float:
    """Microseconds of one of the ``products`` of ``step``."""
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    spent = []
    for _ in range(8):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        spent.append(1e3 * begin.elapsed_time(end) / products)
    return round(statistics.median(spent[1:]), 2)


class Weights:
    """Random weights ``[out, in]``, so many that none of them is found in a cache."""

    def __init__(self, in_features: int, out_features: int, device: torch.device) -> None:
        count = max(4, -(-_BYTES // (in_features * out_features)))
        shape = scale_shape(out_features, in_features)
        self.packed = []
        for _ in range(count):
            values = (torch.randint(0, 256, (out_features, in_features), device=device, dtype=torch.uint8) & 0xBF).view(torch.float8_e4m3fn)
            self.packed.append(PackedWeight(values, torch.rand(shape, device=device) * in_features**-0.5))
        self.plain = [weight.expanded(torch.bfloat16) for weight in self.packed[: max(4, -(-count // 2))]]


def measure(in_features: int, out_features: int, counts: list[int], device: torch.device) -> list[dict[str, Any]]:
    """One record a number of rows."""
    dtype, weights = torch.bfloat16, Weights(in_features, out_features, device)
    expansion, few = Expansion(dtype, device), ProductKernels(in_features, out_features, dtype, device)
    packed = [PackedProjection(w, FewRowsFp8(in_features, out_features, dtype, device), expansion) for w in weights.packed]
    plain = [Projection(w, None, few) for w in weights.plain]
    found = []
    for rows in counts:
        x = torch.randn(rows, in_features, device=device).to(dtype)
        out = torch.empty(rows, out_features, dtype=dtype, device=device)
        want = packed[0].by_library(x)
        spent: dict[str, float] = {}
        for choice in candidates(rows):
            try:
                (kernel,) = require([few_rows_program(in_features, choice, "bfloat16")], device, after=True)
            except KernelBuildError:  # told in a warning
                continue

            def launch(weight: PackedWeight, kernel: Any = kernel, choice: Choice = choice, x: Any = x, out: Any = out) -> None:
                grid = (out_features // choice.tile, -(-len(x) // choice.tokens))
                kernel.launch(grid, x, weight.values, weight.scale, out, len(x), out_features, weight.scale.shape[0])

            launch(weights.packed[0])
            same = "" if torch.equal(out, want) else " OTHER BITS"
            form = " turned" if choice.turned else ""
            name = f"{choice.tokens},{choice.tile},{choice.ahead // _KB},{choice.chunk}{form}{same}"
            spent[name] = timed(lambda launch=launch: [launch(w) for w in weights.packed], len(packed))  # type: ignore[misc]
        best = dict(sorted(spent.items(), key=lambda item: item[1])[:_SHOWN])
        found.append(
            {
                "in": in_features,
                "out": out_features,
                "rows": rows,
                "limit": round(in_features * out_features / _PER_US, 2),
                "plain": timed(lambda x=x: [p(x) for p in plain], len(plain)),  # type: ignore[misc]
                "library": timed(lambda x=x: [p.by_library(x) for p in plain], len(plain)),  # type: ignore[misc]
                "expand": timed(lambda x=x: [p.by_library(x) for p in packed], len(packed)),  # type: ignore[misc]
                "chosen": timed(lambda x=x: [p(x) for p in packed], len(packed)),  # type: ignore[misc]
                "best": best | {name: us for name, us in spent.items() if "OTHER" in name},
            }
        )
    return found


def main() -> None:
    """Prints one JSON object a line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=[name for name, shape in NAMED.items() if shape.weights == "fp8"], default="qwen3-8b-fp8")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 16, 32, 64, 128, 256, 1024, 8192])
    parser.add_argument("--build", action="store_true", help="compile every kernel that is measured into the store, and nothing else")
    args = parser.parse_args()
    pairs = linears_of(NAMED[args.shape])[:-1]
    if args.build:
        built = default_store().get_all(programs(pairs, args.rows))
        for program, kernel in built.items():
            if isinstance(kernel, Exception):
                print(f"{program.name}: {kernel}")
        print(f"{len(built)} kernels in {default_store().folder}")
        return
    get_platform("cuda").prepare(None)
    for pair in pairs:
        for record in measure(*pair, args.rows, torch.device("cuda")):
            print(json.dumps(record), flush=True)


if __name__ == "__main__":
    sys.exit(exit_code(main))
