"""``deepinfer kvstore scrub``: reads everything that is stored, so that damage is found while it can be made good."""

from __future__ import annotations

import argparse
import json

from deepinfer.cli import console
from deepinfer.cli.kvstore_options import add_server, operator, size

EXAMPLES = (
    "deepinfer kvstore scrub",
    "deepinfer kvstore scrub --address dir:/nvme/kv --json",
)
STEP = 64 << 20  # bytes a request: well within its time even on slow disks


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    add_server(parser, "admin")


def run(args: argparse.Namespace) -> int:
    """One round over all objects, then over all shards of stripes, then repair; 1 if anything was damaged or could not be read."""
    ask = operator(args, "admin")
    total = int(json.loads(ask.admin('{"do": "stats"}'))["bytes"])
    did = {"objects": 0, "bytes": 0, "damaged": 0, "errors": 0, "shards_damaged": 0, "domains_away": 0, "repaired": 0, "backlog": 0}
    with console.progress(total, "scrub", "B") as bar:
        done = False
        while not done:
            step = json.loads(ask.admin(json.dumps({"do": "scrub", "bytes": STEP})))
            for name in ("objects", "bytes", "damaged", "errors"):
                did[name] += step[name]
            bar.update(step["bytes"])
            done = step["done"]
    segment: int | None = 0
    while segment is not None:
        step = json.loads(ask.admin(json.dumps({"do": "shards", "after": segment})))
        segment = step["segment"]
        did["shards_damaged"] += step["damaged"]
        did["domains_away"] = max(did["domains_away"], step["away"])
    made = 1
    while made:
        step = json.loads(ask.admin(json.dumps({"do": "repair", "limit": 64})))
        made = step["made"] + step["deleted"]
        did["repaired"] += step["made"]
        did["backlog"] = step["left"]
    bad = did["damaged"] or did["errors"] or did["shards_damaged"]
    if args.json:
        console.print_json(did)
    else:
        console.write_out(
            f"read {did['objects']:,} objects, {size(did['bytes'])}: {did['damaged']} damaged (quarantined), {did['errors']} errors\n"
        )
        if did["shards_damaged"] or did["repaired"] or did["backlog"] or did["domains_away"]:
            console.write_out(
                f"stripes: {did['shards_damaged']} domains' objects damaged, {did['repaired']} repaired, {did['backlog']} left, "
                f"{did['domains_away']} domains away\n"
            )
    return console.EXIT_FAILED if bad else console.EXIT_OK
