"""``deepinfer kernels build``: kernels compiled into the store beforehand."""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

from deepinfer.cli import console
from deepinfer.cli.kernels_options import add_choice, add_jobs, build, chosen

EXAMPLES = (
    "deepinfer kernels build",
    "deepinfer kernels build --model smollm2",
    "deepinfer kernels build --shape llama-8b --output /opt/kernels --jobs 8",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    add_choice(parser)
    add_jobs(parser)
    parser.add_argument("--output", default=None, metavar="DIR", help="folder of the store (default: where engines look for it)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Builds what the store lacks; 1 if a kernel cannot be built."""
    from deepinfer.kernels.toolchain.store import KernelStore, default_store

    start = time.perf_counter()
    folder = default_store().folder if args.output is None else Path(args.output).expanduser()
    entries = chosen(args)
    store = KernelStore(folder, args.arch)
    missing = [entry for entry in entries if store.find(entry.program) is None]
    if missing:
        _make(folder)
    built = build(missing, args, store.keep) if missing else []
    failed = [one for one in built if one.error is not None]
    seconds = time.perf_counter() - start
    done, kept = len(built) - len(failed), len(entries) - len(missing)
    if args.json:
        console.print_json(
            {
                "folder": str(folder),
                "arch": args.arch,
                "built": done,
                "kept": kept,
                "failed": {one.program.name: one.error for one in failed},
                "seconds": round(seconds, 2),
            }
        )
    else:
        console.write_out(f"{done} kernels built, {kept} were there, {len(failed)} failed: {folder} ({seconds:.1f} s)\n")
        for one in failed:
            console.error_line(one.error)
    return console.EXIT_FAILED if failed else console.EXIT_OK


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise console.UserError(f"{folder} cannot be made a store of kernels: {e.strerror}") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise console.UserError(f"{folder} cannot be written; give another folder with --output")
