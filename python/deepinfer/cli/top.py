"""``deepinfer top``: what a server is doing, live in the terminal."""

from __future__ import annotations

import argparse
import contextlib
import http.client
import os
import socket
import sys
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from deepinfer.cli import console
from deepinfer.cli.top_numbers import Scrape, Span, numbers, render

EXAMPLES = (
    "deepinfer top",
    "deepinfer top http://gpu-7:8000 --interval 5",
    "deepinfer top --once --json | jq .kv.usage",
)
_TIMEOUT = 5.0
_MOST = 32 << 20  # bytes of a page


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument(
        "url", nargs="?", default="http://127.0.0.1:8000", metavar="URL", help="the server (default: http://127.0.0.1:8000)"
    )
    parser.add_argument("--uds", metavar="PATH", help="the Unix socket that it listens on, instead")
    parser.add_argument("--api-key", metavar="KEY", help="key, for a server that protects its metrics (default: $DEEPINFER_API_KEY)")
    parser.add_argument("--interval", type=float, default=2.0, metavar="S", help="seconds between two looks (default: 2)")
    parser.add_argument("--once", action="store_true", help="look once, over one interval, and end")
    parser.add_argument("--json", action="store_true", help="one JSON object for each look")


def run(args: argparse.Namespace) -> int:
    """Looks again and again, until Ctrl-C."""
    if not 0 < args.interval <= 3600:
        raise console.UserError(f"--interval {args.interval:g} must be above 0 and at most 3600 seconds")
    try:
        import prometheus_client  # noqa: F401
    except ImportError:
        raise console.UserError("deepinfer top needs prometheus_client: pip install 'deepinfer[server]'") from None
    server = Server(args.url, args.uds, args.api_key or os.environ.get("DEEPINFER_API_KEY"))
    before = server.scrape()
    if args.once:
        time.sleep(args.interval)
        show(Span(server.scrape(), before), server.name, args.json)
        return console.EXIT_OK
    live = sys.stdout.isatty() and not args.json
    with _screen() if live else contextlib.nullcontext():
        first = True
        while True:
            if not first or not live:
                time.sleep(args.interval)
            try:
                now = server.scrape()
            except console.RunError as e:
                if not live:
                    raise
                _draw(f"{e}\n\ntrying again every {args.interval:g} s; Ctrl-C ends\n")
                time.sleep(args.interval)
                continue
            if live:
                _draw(render(numbers(Span(now, None if first else before)), server.name))
            else:
                show(Span(now, before), server.name, args.json)
            before, first = now, False


def show(span: Span, name: str, as_json: bool) -> None:
    """One look, for scripts and pipes."""
    if as_json:
        console.print_json(numbers(span))
    else:
        console.write_out(render(numbers(span), name) + "\n")


class Server:
    """Where the metrics come from.

    Raises:
        UserError: the address is none.
    """

    def __init__(self, url: str, uds: str | None, key: str | None) -> None:
        parts = urlsplit(url if "//" in url else "//" + url, scheme="http")
        try:
            port = parts.port
        except ValueError:
            port = -1
        if parts.scheme not in ("http", "https") or not parts.hostname or port == -1:
            raise console.UserError(f"{console.shortened(url)} is no address of a server; give it as http://HOST:PORT")
        self._secure, self._host, self._port, self._uds = parts.scheme == "https", parts.hostname, port, uds
        path = parts.path.rstrip("/")
        self._path = path if path.endswith("/metrics") else path + "/metrics"
        self._headers = {"authorization": f"Bearer {key}"} if key else {}
        self.name = uds if uds is not None else f"{parts.scheme}://{parts.netloc}"

    def scrape(self) -> Scrape:
        """The metrics now.

        Raises:
            RunError: nobody answers, or what comes are no metrics of a DeepInfer server.
        """
        connection = self._connection()
        try:
            connection.request("GET", self._path, headers=self._headers)
            answer = connection.getresponse()
            text = answer.read(_MOST)
        except (OSError, http.client.HTTPException) as e:
            said = getattr(e, "strerror", None) or console.one_line(e) or type(e).__name__
            raise console.RunError(f"{self.name} does not answer: {said}; is `deepinfer serve` running there?") from None
        finally:
            connection.close()
        if answer.status in (401, 403):
            raise console.RunError(f"{self.name} asks for a key: --api-key KEY, or DEEPINFER_API_KEY in the environment")
        if answer.status != 200:
            raise console.RunError(f"{self.name}{self._path} answered {answer.status}; is this a DeepInfer server?")
        try:
            scrape = Scrape.read(text.decode("utf-8"), time.monotonic())
        except ValueError:
            scrape = Scrape(0.0)
        if "deepinfer:engine_up" not in scrape.samples:
            raise console.RunError(f"{self.name}{self._path} has no metrics of a DeepInfer server")
        return scrape

    def _connection(self) -> http.client.HTTPConnection:
        if self._uds is not None:
            return _UnixConnection(self._uds)
        kind: Any = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        made: http.client.HTTPConnection = kind(self._host, self._port, timeout=_TIMEOUT)
        return made


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=_TIMEOUT)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(_TIMEOUT)
        self.sock.connect(self._path)


@contextlib.contextmanager
def _screen() -> Iterator[None]:
    """A screen of its own, so that the terminal is afterwards as it was."""
    console.write_out("\x1b[?1049h\x1b[?25l")
    try:
        yield
    finally:
        console.write_out("\x1b[?25h\x1b[?1049l")


def _draw(text: str) -> None:
    """In place of what is there; lines are cut rather than wrapped, and only what changed flickers."""
    lines = text.splitlines()
    with contextlib.suppress(OSError):
        size = os.get_terminal_size(sys.stdout.fileno())
        # A terminal that does not know its size says 0.
        lines = [line[: size.columns or None] for line in lines[: size.lines or None]]
    console.write_out("\x1b[H" + "\n".join(line + "\x1b[K" for line in lines) + "\x1b[J")
