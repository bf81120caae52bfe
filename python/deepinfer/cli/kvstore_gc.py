"""``deepinfer kvstore gc``: collects segments of which little lives, now instead of when the slack is used up."""

from __future__ import annotations

import argparse
import json

from deepinfer.cli import console
from deepinfer.cli.kvstore_options import add_server, operator, size

EXAMPLES = (
    "deepinfer kvstore gc",
    "deepinfer kvstore gc --address dir:/nvme/kv --json",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    add_server(parser, "admin")


def run(args: argparse.Namespace) -> int:
    """Collects piece by piece, so that nobody waits long, until nothing is worth it."""
    ask = operator(args, "admin")
    before = json.loads(ask.admin('{"do": "stats"}'))
    with console.progress(None, "gc", "pieces") as bar:
        while json.loads(ask.admin('{"do": "collect", "force": true}'))["more"]:
            bar.update(1)
    after = json.loads(ask.admin('{"do": "stats"}'))
    counts = {name: after["counts"][name] - before["counts"][name] for name in ("segments_deleted", "copied_bytes")}
    did = {**counts, "freed_bytes": before["sealed"] - after["sealed"], "segments": after["segments"], "sealed_bytes": after["sealed"]}
    if args.json:
        console.print_json(did)
    else:
        console.write_out(
            f"freed {size(max(did['freed_bytes'], 0))}: {did['segments_deleted']:,} segments deleted, {size(did['copied_bytes'])} copied; "
            f"{did['segments']:,} segments of {size(did['sealed_bytes'])} are left\n"
        )
    return console.EXIT_OK
