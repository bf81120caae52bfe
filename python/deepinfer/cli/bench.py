"""``deepinfer bench``: throughput and latency of whole runs, and the cost of scheduling alone."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
from typing import Any

from deepinfer.cli.parser import CommandParser, add_command

HELP = "measure this machine: throughput, latency, or the scheduler alone"
EXAMPLES = (
    "deepinfer bench throughput --model smollm2 --num-prompts 32 --num-seqs 8 --json",
    "deepinfer bench latency --model smollm2 --num-seqs 1",
    "deepinfer bench scheduler --json",
)
KINDS = ("throughput", "latency", "scheduler")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds one sub-command per kind of benchmark; each is a module of its own."""
    kinds: Any = parser.add_subparsers(dest="kind", metavar="WHAT", required=True, parser_class=CommandParser)
    for name in KINDS:
        if importlib.util.find_spec(f"deepinfer.cli.bench_{name}") is None:
            continue
        add_command(kinds, name, importlib.import_module(f"deepinfer.cli.bench_{name}"))


def run(args: argparse.Namespace) -> int:
    """Never reached: every kind brings its own ``run``, and naming one is required."""
    raise AssertionError(args.kind)
