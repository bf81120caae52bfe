"""``deepinfer kernels list``: every kernel and whether it is in the store."""

from __future__ import annotations

import argparse

from deepinfer.cli import console
from deepinfer.cli.kernels_options import add_choice, chosen, columns

EXAMPLES = ("deepinfer kernels list", "deepinfer kernels list --model smollm2 --json")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    add_choice(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Prints a line a kernel."""
    from deepinfer.kernels.toolchain.store import KernelStore, default_store

    store = KernelStore(default_store().folder, args.arch)
    rows = [(entry, store.find(entry.program)) for entry in chosen(args)]
    if args.json:
        kernels = [
            {
                "operator": entry.program.op,
                "kernel": entry.program.factory,
                "constants": dict(entry.program.constants),
                "dtype": entry.dtype,
                "shape": entry.shape,
                "stored": kept is not None,
            }
            for entry, kept in rows
        ]
        console.print_json({"folder": str(store.folder), "arch": args.arch, "kernels": kernels})
        return console.EXIT_OK
    table = [("operator", "kernel", "shape", "stored")]
    for entry, kept in rows:
        table.append((entry.program.op, entry.program.name.partition("/")[2], entry.shape, "no" if kept is None else "yes"))
    there = sum(kept is not None for _, kept in rows)
    console.write_out(columns(table) + f"{there} of {len(rows)} for {args.arch} are in {store.folder}\n")
    return console.EXIT_OK
