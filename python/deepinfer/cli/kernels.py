"""``deepinfer kernels``: what is compiled for a GPU: which kernels there are, building them beforehand, checking all of them."""

from __future__ import annotations

import argparse

from deepinfer.cli.parser import add_commands

EXAMPLES = (
    "deepinfer kernels list",
    "deepinfer kernels build --model smollm2",
    "deepinfer kernels check --shape llama-8b",
)
KINDS = {
    "list": "list every kernel and whether it is in the store",
    "build": "compile kernels into the store beforehand; needs no GPU",
    "check": "compile kernels anew and hold what they take against what is recorded; needs no GPU",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds one sub-command for each; a module of its own brings its ``run``."""
    add_commands(parser, "ACTION", {name: f"deepinfer.cli.kernels_{name}" for name in KINDS}, KINDS)
