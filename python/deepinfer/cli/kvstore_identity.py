"""``deepinfer kvstore identity``: what an engine's keys are made of besides tokens."""

from __future__ import annotations

import argparse

from deepinfer.cli import console, options

EXAMPLES = (
    "deepinfer kvstore identity --model smollm2 --dtype bfloat16 --kv-store-tenant team-a > engine.json",
    "deepinfer kvstore check --tokens prompt.json --identity engine.json",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    options.add_engine_options(parser)
    parser.add_argument("--cache-salt", default="", metavar="TEXT", help="of the requests that are meant (default: none)")
    parser.add_argument("--json", action="store_true", help="on one line")


def run(args: argparse.Namespace) -> int:
    """Prints the JSON object that ``kvstore check --identity`` takes; with the engine's own options, on the engine's kind of machine."""
    import json

    from deepinfer.engine.config import EngineConfig
    from deepinfer.engine.kv_store import identity_of

    identity = identity_of(EngineConfig.from_args(**options.engine_arguments(args)), args.cache_salt)
    if args.json:
        console.print_json(identity)
    else:
        console.write_out(json.dumps(identity, indent=2) + "\n")
    return console.EXIT_OK
