"""``deepinfer kvstore serve``: a KV store behind sockets, until a signal ends it."""

from __future__ import annotations

import argparse
import os
import select
import signal
import time
from collections.abc import Callable
from contextlib import suppress
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
    with Ending() as ending:
        server = _core.KvServer(args.settings, overrides(args.set))
        ending.arm()
        ready(args.json, server)
        ending.wait(Complaints("the store fails", server.trouble).look)
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
    unanswered(about["directory"])
    metrics = f"; metrics on http://{about['metrics']}/metrics" if about["metrics"] else ""
    console.note(f"kvstore: listening on {', '.join(about['addresses'])}{metrics}")
    if as_json:
        console.print_json(about)


def unanswered(directory: bool | None) -> None:
    """Says it once if the directory server is not there: the store serves all the same."""
    if directory is False:
        console.note("kvstore: no server of directory.servers answers: what other stores hold is a miss until one does")


class Complaints:
    """Says on stderr what fails: at once, and from then on once a minute while there is more.

    Args:
        what: begins the line.
        ask: gives how often it has failed so far, and why at last.
    """

    PAUSE = 60.0
    """Seconds between two lines."""

    def __init__(self, what: str, ask: Callable[[], tuple[int, str | None]]) -> None:
        self._what, self._ask = what, ask
        self._told, self._next = 0, 0.0

    def look(self) -> None:
        """Asks, and says it if there is something to be said."""
        count, why = self._ask()
        now = time.monotonic()
        if count > self._told and now >= self._next:
            more = f" ({count - self._told:,} times)" if count - self._told > 1 else ""
            with suppress(OSError):  # nobody reads it any more: no reason to end
                console.note(f"kvstore: {self._what}: {console.one_line(why)}{more}")
            self._told, self._next = count, now + self.PAUSE


class Ending:
    """How a server is told to end. While it opens, a signal ends it at once, which loses nothing; from ``arm`` on the first SIGTERM
    or Ctrl-C ends ``wait``, and the next one ends the process as if nobody listened.

    A signal may reach any thread, the core's too, and at any moment: it is read from a pipe, so that none is slept through.
    """

    def __enter__(self) -> Ending:
        self._before = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGTERM, signal.SIGINT)}
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        return self

    def arm(self) -> None:
        """From now on the first signal is waited for."""
        signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        for number in self._before:
            signal.signal(number, lambda number, frame: None)

    def wait(self, look: Callable[[], None]) -> None:
        """Returns at the first signal; calls ``look`` every second until then."""
        while not select.select([self._read], [], [], 1.0)[0]:
            look()
        for number in self._before:
            signal.signal(number, signal.SIG_DFL)

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(-1)
        for number, before in self._before.items():
            signal.signal(number, before)
        os.close(self._read)
        os.close(self._write)
