"""``deepinfer kvstore agent``: memory that the engines of a host share, in front of a KV store."""

from __future__ import annotations

import argparse

from deepinfer.cli import console
from deepinfer.cli.kvstore_options import size
from deepinfer.cli.kvstore_serve import Complaints, Ending, overrides, unanswered

EXAMPLES = (
    "deepinfer kvstore agent",
    "deepinfer kvstore agent --set agent.upstream=tcp://10.0.0.1:7460,10.0.0.2:7460 --set agent.arena=64GiB",
    "deepinfer kvstore agent --set agent.upstream=own --set root=/nvme/kv",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument("--settings", default=None, metavar="FILE", help="TOML file, as for serve; its part [agent] counts")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="one setting, nearer than environment and file; may be repeated"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object with the address once it serves")


def run(args: argparse.Namespace) -> int:
    """Serves until SIGTERM or Ctrl-C, then waits until the store has what engines put: 0. A second signal ends the process at once."""
    from deepinfer import _core

    with Ending() as ending:
        agent = _core.KvAgent(args.settings, overrides(args.set))
        ending.arm()
        about = agent.describe()
        metrics = f"; metrics on http://{about['metrics']}/metrics" if about["metrics"] else ""
        console.note(f"kvstore: agent at {about['address']}, {size(about['arena'])} of shared memory{metrics}")
        unanswered(about["directory"])
        if args.json:
            console.print_json(about)
        ending.wait(Complaints("the store behind this agent fails", agent.trouble).look)
        console.note("kvstore: draining; a second signal ends at once")
        agent.drain()
        console.note("kvstore: drained")
    return console.EXIT_OK
