"""``deepinfer kvstore``: the KV store that outlives engines: its server, its agent, and what is done to them."""

from __future__ import annotations

import argparse

from deepinfer.cli.parser import add_commands

EXAMPLES = (
    "deepinfer kvstore serve",
    "deepinfer kvstore stats",
    "deepinfer kvstore bench --json",
)
KINDS = {
    "serve": "serve a KV store over sockets until it is told to end",
    "agent": "share a host's memory between its engines, in front of a store",
    "check": "ask how much of a chain of keys is there",
    "identity": "print what an engine's keys are made of besides tokens, for check",
    "stats": "show what a store holds, counts and met",
    "scrub": "read everything that is stored, find damage and have it repaired",
    "gc": "collect segments of which little lives",
    "bench": "measure the store beside what this machine's disk and memory do",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds one sub-command for each; a module of its own brings its ``run``."""
    add_commands(parser, "ACTION", {name: f"deepinfer.cli.kvstore_{name}" for name in KINDS}, KINDS)
