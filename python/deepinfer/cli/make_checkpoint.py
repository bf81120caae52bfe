"""``deepinfer make-checkpoint``: a random DeepSeek-V4.1 checkpoint in the released format, for tests and for sizing."""

from __future__ import annotations

import argparse
from pathlib import Path

from deepinfer.cli import console

EXAMPLES = (
    "deepinfer make-checkpoint --config tests/data/deepseek_v41/tiny.json --seed 1 /tmp/tiny",
    "deepinfer make-checkpoint --config config.json --seed 1 --plain /tmp/plain",
)
USAGE = "[options] --config FILE DIR"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument("directory", metavar="DIR", help="where to write; must be empty or absent")
    parser.add_argument("--config", required=True, metavar="FILE", help="config.json of the model to make")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="the same seed gives the same bytes (default: 0)")
    parser.add_argument("--plain", action="store_true", help="write the same numbers as float32, not packed")
    parser.add_argument("--shard-gb", type=float, default=10.0, metavar="X", help="most gigabytes of a file (default: 10)")
    parser.add_argument("--json", action="store_true", help="print one JSON object: directory, tensors, bytes, shards")


def run(args: argparse.Namespace) -> int:
    """Writes the checkpoint and says what it is."""
    shard_bytes = console.gigabytes("--shard-gb", args.shard_gb)
    from deepinfer.models.config import read_json
    from deepinfer.models.deepseek_v41.make_checkpoint import make_checkpoint

    config = read_json(Path(args.config))
    with console.progress(None, "writing", "GB") as bar:

        def show(done: int, total: int) -> None:
            bar.set_postfix_str(f"{done / 1e9:.1f} of {total / 1e9:.1f}")

        made = make_checkpoint(config, Path(args.directory), args.seed, args.plain, shard_bytes, show)
    if args.json:
        console.print_json(
            {"directory": str(made.directory), "tensors": made.tensors, "bytes": made.nbytes, "shards": made.shards, "seed": args.seed}
        )
    else:
        files = "1 file" if made.shards == 1 else f"{made.shards} files"
        console.write_out(f"{made.directory}: {made.tensors:,} tensors, {made.nbytes / 1e9:.2f} GB in {files}, seed {args.seed}\n")
    return console.EXIT_OK
