"""``deepinfer kvstore stats``: what a store holds, counts and met."""

from __future__ import annotations

import argparse
import json
from typing import Any

from deepinfer.cli import console
from deepinfer.cli.kvstore_options import add_server, operator, size, table

EXAMPLES = (
    "deepinfer kvstore stats",
    "deepinfer kvstore stats --address unix:/run/kv.sock --token-file admin.token --json",
    "deepinfer kvstore stats --address dir:/nvme/kv",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    add_server(parser, "admin")


def run(args: argparse.Namespace) -> int:
    """Prints sizes, counters and tenants."""
    ask = operator(args, "admin")
    stats = {**json.loads(ask.admin('{"do": "stats"}')), "tenants": json.loads(ask.admin('{"do": "tenants"}'))}
    if args.json:
        console.print_json(stats)
    else:
        console.write_out(render(stats))
    return console.EXIT_OK


def render(stats: dict[str, Any]) -> str:
    """Tables for a person; counters that are 0 are left out."""
    counts = stats["counts"]
    asked = counts["hits"] + counts["misses"]
    text = "holds\n" + table(
        [
            ("blocks", stats["blocks"]),
            ("slices", stats["slices"]),
            ("bytes of objects", size(stats["bytes"])),
            *_capacity(stats),
            ("sealed segments", f"{stats['segments']:,}, {size(stats['sealed'])}"),
            ("index in memory", size(stats["memory"])),
            ("reads that hit", f"{counts['hits'] / asked:.1%}" if asked else "none yet"),
        ]
    )
    parts = [("counted since the start", counts), ("media", stats.get("media", {})), ("server", stats.get("server") or {})]
    for title, numbers in parts:
        shown = [(name.replace("_", " "), size(n) if "bytes" in name else n) for name, n in numbers.items() if n]
        if shown:
            text += f"{title}\n{table(shown)}"
    if stats.get("last_failure"):
        text += f"failed last with\n  {stats['last_failure']}\n"
    if stats["tenants"]:
        rows = [
            (tenant["name"], size(tenant["bytes"]) + (f" of {size(tenant['quota'])}" if tenant["quota"] is not None else ""))
            for tenant in stats["tenants"]
        ]
        text += f"tenants\n{table(rows)}"
    return text


def _capacity(stats: dict[str, Any]) -> list[tuple[str, str]]:
    """Its own setting is a server's; a store that nobody serves is opened here, without a bound."""
    if stats["server"] is None:
        return []
    return [("of capacity", f"{stats['live'] / stats['capacity']:.1%} of {size(stats['capacity'])}")]
