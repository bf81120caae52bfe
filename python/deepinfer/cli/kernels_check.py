"""``deepinfer kernels check``: every kernel compiled anew, and what it takes of a GPU held against what is recorded."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from deepinfer.cli import console
from deepinfer.cli.kernels_options import add_choice, add_jobs, build, chosen, columns

if TYPE_CHECKING:
    from deepinfer.kernels.resources import Comparison
    from deepinfer.kernels.toolchain.building import Built

EXAMPLES = (
    "deepinfer kernels check",
    "deepinfer kernels check --shape smollm2-135m",
    "deepinfer kernels check --record",
    "deepinfer kernels check --ascend",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    add_choice(parser)
    add_jobs(parser)
    parser.add_argument("--record", action="store_true", help="write what kernels take to kernels/resources.json instead of comparing")
    parser.add_argument(
        "--ascend", action="store_true", help="lower the forms for Ascend instead, which is as far as this goes without CANN"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Prints a table; 1 if a kernel does not build, spills, wants too much shared memory, or takes many more registers than recorded."""
    from deepinfer.kernels import registry, resources

    if args.ascend:
        return _check_ascend(args)
    start = time.perf_counter()
    entries = chosen(args)
    resources.recorded(args.arch)  # damaged? before minutes are spent
    built = build(entries, args)
    kernels = [one.kernel for one in built if one.kernel is not None]
    failures = [str(one.error) for one in built if one.error is not None]
    if args.record:
        everything = {entry.program.name for entry in registry.entries()}
        resources.record(kernels, args.arch, everything)
        found = resources.Comparison()
    else:
        found = resources.compare(kernels, args.arch)
    failures += found.failures
    seconds = time.perf_counter() - start
    if args.json:
        console.print_json({**as_json(built, found), "failures": failures, "seconds": round(seconds, 2)})
    else:
        console.write_out(render(built, found) + f"{len(built)} kernels for {args.arch} in {seconds:.1f} s, {len(failures)} failures\n")
    for line in failures:
        console.error_line(line)
    return console.EXIT_FAILED if failures else console.EXIT_OK


def _check_ascend(args: argparse.Namespace) -> int:
    """Prints a line a kernel; 1 if one cannot be lowered."""
    from deepinfer.errors import KernelBuildError
    from deepinfer.kernels.toolchain.ascend import lower_for_ascend
    from deepinfer.kernels.toolchain.lowering import check_tilelang

    start = time.perf_counter()
    check_tilelang()
    entries = chosen(args, "asc")
    lengths: dict[str, int] = {}
    refused: dict[str, str] = {}
    with console.progress(len(entries), "lowering kernels", "kernel") as bar:
        for entry in entries:
            try:
                lengths[entry.program.name] = len(lower_for_ascend(entry.program))
            except KernelBuildError as e:
                refused[entry.program.name] = str(e)
            bar.update()
    seconds = time.perf_counter() - start
    if args.json:
        console.print_json({"lowered": lengths, "refused": refused, "seconds": round(seconds, 2)})
    else:
        rows = [(name, str(length)) for name, length in lengths.items()] + [(name, "-") for name in refused]
        console.write_out(columns([("kernel", "bytes of Ascend C"), *rows]))
        console.write_out(f"{len(entries)} kernels lowered for Ascend in {seconds:.1f} s, {len(refused)} refused; none is run\n")
    for name, reason in refused.items():
        console.error_line(f"{name} cannot be lowered for Ascend: {reason}")
    return console.EXIT_FAILED if refused else console.EXIT_OK


def as_json(built: Sequence[Built], found: Comparison) -> dict[str, Any]:
    """Kernels and what changed as JSON values."""
    kernels = {}
    for one in built:
        kernel = one.kernel
        if kernel is None:
            kernels[one.program.name] = {"error": one.error, "seconds": round(one.seconds, 3)}
            continue
        kernels[one.program.name] = {
            "registers": kernel.resources.registers,
            "static_shared": kernel.resources.static_shared,
            "dynamic_shared": kernel.shared,
            "spills": kernel.resources.spill_stores + kernel.resources.spill_loads,
            "threads": kernel.threads,
            "bytes": len(kernel.code),
            "seconds": round(one.seconds, 3),
        }
    return {"kernels": kernels, "changes": found.changes}


def render(built: Sequence[Built], found: Comparison) -> str:
    """The table, and what changed below it."""
    table: list[tuple[str, ...]] = [("kernel", "registers", "threads", "static", "dynamic", "spills", "bytes", "s")]
    for one in built:
        kernel = one.kernel
        if kernel is None:
            table.append((one.program.name, *["-"] * 6, f"{one.seconds:.2f}"))
            continue
        r = kernel.resources
        numbers = (r.registers, kernel.threads, r.static_shared, kernel.shared, r.spill_stores + r.spill_loads, len(kernel.code))
        table.append((one.program.name, *map(str, numbers), f"{one.seconds:.2f}"))
    return columns(table) + "".join(f"changed: {line}\n" for line in found.changes)
