"""``deepinfer kvstore serve``: a KV store behind sockets, until a signal ends it."""

from __future__ import annotations

import argparse
import signal
import threading
from types import FrameType
from typing import TYPE_CHECKING

from deepinfer.cli import console
from deepinfer.cli.kvstore_options import size

if TYPE_CHECKING:
    from deepinfer import _core

EXAMPLES = (
    "deepinfer kvstore serve",
    "deepinfer kvstore serve --settings /etc/deepinfer/kvstore.toml",
    "deepinfer kvstore serve --set root=/nvme/kv --set store.capacity=2TiB --set listen=unix:/run/kv.sock",
    "deepinfer kvstore serve --print-settings > kvstore.toml",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument("--settings", default=None, metavar="FILE", help="TOML file (default: built-in settings; see --print-settings)")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="one setting, nearer than environment and file; may be repeated"
    )
    parser.add_argument("--print-settings", action="store_true", help="print a settings file with every key and its default, and end")
    parser.add_argument("--json", action="store_true", help="print one JSON object with the addresses once it listens")


def run(args: argparse.Namespace) -> int:
    """Serves until SIGTERM or Ctrl-C, then drains: 0. A second signal ends the process at once."""
    from deepinfer import _core

    if args.print_settings:
        console.write_out(_core.KV_SETTINGS_EXAMPLE)
        return console.EXIT_OK
    ended = threading.Event()
    with Ending(ended):
        server = _core.KvServer(args.settings, overrides(args.set))
        ready(args.json, server)
        ended.wait()
        console.note("kvstore: draining; a second signal ends at once")
        server.drain()
        console.note("kvstore: drained")
    return console.EXIT_OK


def overrides(given: list[str]) -> list[tuple[str, str]]:
    """``--set`` as keys and values."""
    pairs = []
    for text in given:
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            raise console.UserError(f"--set {text}: give KEY=VALUE, for example store.capacity=2TiB")
        pairs.append((key.strip(), value.strip()))
    return pairs


def ready(as_json: bool, server: _core.KvServer) -> None:
    """Says where it listens, on stderr for people and on stdout for programs."""
    about = server.describe()
    console.note(
        f"kvstore: {about['media']} store in {about['root']}, {size(about['capacity'])}, policy {about['policy']}: "
        f"{about['blocks']:,} blocks, {about['slices']:,} slices"
    )
    metrics = f"; metrics on http://{about['metrics']}/metrics" if about["metrics"] else ""
    console.note(f"kvstore: listening on {', '.join(about['addresses'])}{metrics}")
    if as_json:
        console.print_json(about)


class Ending:
    """While it is entered, the first SIGTERM or Ctrl-C sets an event; the second one ends the process as if nobody listened."""

    def __init__(self, ended: threading.Event) -> None:
        self._ended = ended
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._before[number] = signal.signal(number, self._end)

    def __exit__(self, *_: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)  # type: ignore[arg-type]

    def _end(self, number: int, frame: FrameType | None) -> None:
        for each in self._before:
            signal.signal(each, signal.SIG_DFL)
        self._ended.set()
