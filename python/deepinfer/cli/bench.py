"""``deepinfer bench``: throughput and latency of whole runs, and the cost of scheduling alone."""

from __future__ import annotations

import argparse

from deepinfer.cli.parser import add_commands

EXAMPLES = (
    "deepinfer bench throughput --model smollm2 --num-prompts 32 --num-seqs 8 --json",
    "deepinfer bench latency --model smollm2 --num-seqs 1",
    "deepinfer bench scheduler --json",
)
KINDS = {
    "throughput": "tokens per second over many prompts submitted at once",
    "latency": "time to first token, between tokens and of whole answers, for a batch of fixed size",
    "scheduler": "time scheduling alone, through Python and inside Rust, without a model",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds one sub-command per kind of benchmark; each is a module of its own and brings its own ``run``."""
    add_commands(parser, "WHAT", {name: f"deepinfer.cli.bench_{name}" for name in KINDS}, KINDS)
