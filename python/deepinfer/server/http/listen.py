"""The socket, and connections before there is a whole request in them.

Owns: binding, saying where it is bound, limits of headers and of connections. Never touches: requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import re
import socket
import stat
from pathlib import Path
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from deepinfer.errors import ConfigError
from deepinfer.server.errors import ApiError
from deepinfer.server.settings import ServerSettings

MOST_HEADER_BYTES = 64 << 10
"""Request line and headers together."""

_MOST_PIPELINED = 8
"""Requests that may wait behind one on the same connection; nobody who does that sends more."""

_UPGRADE = re.compile(rb"\r\nupgrade:", re.IGNORECASE)
"""Is not heeded, as a server may do; Java's client asks for HTTP/2 with each request, and the parser would drop that one's body."""

_REASONS = {400: "Bad Request", 408: "Request Timeout", 431: "Request Header Fields Too Large", 503: "Service Unavailable"}


class Bound:
    """A bound socket, not yet listening: nobody connects before there is anybody to answer."""

    def __init__(self, settings: ServerSettings) -> None:
        self._path = settings.uds
        self._made: os.stat_result | None = None
        if settings.uds is not None:
            self.socket, self.url = self._bind_path(settings.uds), f"http+unix://{settings.uds}"
        else:
            self.socket = _bind_port(settings.host, settings.port)
            host, port = self.socket.getsockname()[:2]
            self.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def _bind_path(self, path: str) -> socket.socket:
        made = socket.socket(socket.AF_UNIX)
        try:
            with contextlib.suppress(FileNotFoundError):
                if not stat.S_ISSOCK(os.stat(path).st_mode):
                    raise ConfigError(f"--uds {path} exists and is no socket; choose another path")
                try:
                    made.connect(path)
                except OSError:
                    os.unlink(path)  # its server has gone
                else:
                    raise ConfigError(f"--uds {path} is in use by another server")
                made.close()
                made = socket.socket(socket.AF_UNIX)
            made.bind(path)
            os.chmod(path, 0o600)  # whoever may connect may ask
            self._made = os.stat(path)
        except OSError as e:
            made.close()
            raise ConfigError(f"cannot listen on --uds {path}: {e.strerror or e}") from None
        except ConfigError:
            made.close()
            raise
        return made

    def close(self) -> None:
        """Takes the socket away, and its path if it is still ours."""
        self.socket.close()
        if self._path is not None and self._made is not None:
            with contextlib.suppress(OSError):
                now = os.stat(self._path)
                if (now.st_dev, now.st_ino) == (self._made.st_dev, self._made.st_ino):
                    Path(self._path).unlink()


def _bind_port(host: str, port: int) -> socket.socket:
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as e:
        raise ConfigError(f"--host {host!r} is no address of this machine: {getattr(e, 'strerror', None) or e}") from None
    family, kind, protocol, _, address = found[0]
    made = socket.socket(family, kind, protocol)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
    except OSError as e:
        made.close()
        if e.errno == errno.EADDRINUSE:
            raise ConfigError(f"port {port} of {host} is in use; choose another with --port, or 0 for a free one") from None
        raise ConfigError(f"cannot listen on {host} port {port}: {e.strerror or e}") from None
    return made


def raw_answer(error: ApiError) -> bytes:
    """An error as a whole answer that closes its connection, for where there is no request to answer yet."""
    body = json.dumps(error.body()).encode()
    head = f"HTTP/1.1 {error.status} {_REASONS.get(error.status, 'Error')}\r\ncontent-type: application/json\r\n"
    head += f"content-length: {len(body)}\r\nconnection: close\r\n"
    if error.retry_after is not None:
        head += f"retry-after: {round(error.retry_after)}\r\n"
    return head.encode() + b"\r\n" + body


def http_protocol(settings: ServerSettings) -> type[asyncio.Protocol]:
    """uvicorn's protocol with limits that it has not: time and size of headers; and an answer in our shape to whoever is one too many."""

    class LimitedProtocol(HttpToolsProtocol):
        _waiting: asyncio.TimerHandle | None = None
        _stuck: asyncio.TimerHandle | None = None
        _answering: RequestResponseCycle | None = None
        _unused: asyncio.TimerHandle | None = None
        _header_bytes = _loose_bytes = 0
        _in_headers, _in_body = True, False

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            if len(self.connections) > settings.max_connections:
                self._turn_away(ApiError(503, "too many connections are open", code="too_many_connections", retry_after=1))
            else:
                self._wait_for_headers()

        def connection_lost(self, exc: Exception | None) -> None:
            self._headers_are_there()
            self._body_is_there()
            self._reads_again()
            super().connection_lost(exc)
            if self._answering is not None and self._answering is not self.cycle:
                # The base class tells the newest request only, and behind the one that is answered others may wait.
                self._answering.disconnected = True
                self._answering.message_event.set()

        def pause_writing(self) -> None:
            super().pause_writing()
            if self._stuck is None:
                self._stuck = self.loop.call_later(settings.write_timeout, self.transport.abort)

        def resume_writing(self) -> None:
            super().resume_writing()
            self._reads_again()

        def _reads_again(self) -> None:
            if self._stuck is not None:
                self._stuck.cancel()
                self._stuck = None

        def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
            self._answering = cycle
            super()._start_asgi_task(cycle, _plainly(cycle, app) if cycle.scope["http_version"] == "1.0" else app)

        def data_received(self, data: bytes) -> None:
            if self.transport.is_closing():
                return
            if not self._in_body and _UPGRADE.search(data):
                head, end, rest = data.partition(b"\r\n\r\n")
                data = _UPGRADE.sub(b"\r\nx-asked:", head) + end + rest
            self._loose_bytes += len(data)  # that were not given out: of a header without end, or beside a body in pieces
            super().data_received(data)
            if self.transport.is_closing():
                return
            if self._loose_bytes > MOST_HEADER_BYTES:
                self._too_many_headers()
            elif not (self._in_body or self._running() or self._waiting or self.timeout_keep_alive_task):
                self._wait_for_headers()  # line breaks before a request end the wait for it, and begin none

        def on_message_begin(self) -> None:
            super().on_message_begin()
            self._in_headers, self._header_bytes, self._loose_bytes = True, 0, 0
            if self._waiting is None:
                self._wait_for_headers()

        def on_url(self, url: bytes) -> None:
            self._count_header(len(url))
            super().on_url(url)

        def on_header(self, name: bytes, value: bytes) -> None:
            self._count_header(len(name) + len(value) + 4)
            if self._in_headers:  # else it comes behind a body in pieces, and says nothing that anybody reads
                super().on_header(name, value)

        def _count_header(self, length: int) -> None:
            self._loose_bytes = 0
            self._header_bytes += length
            if self._header_bytes > MOST_HEADER_BYTES:
                self._too_many_headers()
                raise ValueError("the headers are too large")  # ends the parser's work

        def on_headers_complete(self) -> None:
            self._in_headers, self._in_body, self._header_bytes = False, True, 0
            self._headers_are_there()
            super().on_headers_complete()
            if len(self.pipeline) > _MOST_PIPELINED:
                self.transport.abort()
            elif self.pipeline:
                self.flow.resume_reading()  # else nobody would notice that the client leaves

        def on_body(self, body: bytes) -> None:
            self._loose_bytes = 0
            super().on_body(body)

        def on_message_complete(self) -> None:
            self._in_body, self._loose_bytes = False, 0
            self._body_is_there()
            super().on_message_complete()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            if self._in_body and self._unused is None and not (self._running() or self.transport.is_closing()):
                self._unused = self.loop.call_later(settings.body_timeout, self.transport.abort)

        def _body_is_there(self) -> None:
            if self._unused is not None:
                self._unused.cancel()
                self._unused = None

        def _running(self) -> bool:
            return self.cycle is not None and not self.cycle.response_complete

        def send_400_response(self, msg: str) -> None:
            if not self.transport.is_closing():
                self._turn_away(ApiError(400, "this is no HTTP request that can be read", code="invalid_http"))

        def _wait_for_headers(self) -> None:
            self._waiting = self.loop.call_later(settings.header_timeout, self._too_late)

        def _headers_are_there(self) -> None:
            if self._waiting is not None:
                self._waiting.cancel()
                self._waiting = None

        def _too_late(self) -> None:
            self._waiting = None
            if not self.transport.is_closing():
                message = f"the headers did not arrive within {settings.header_timeout:g} s"
                self._turn_away(ApiError(408, message, code="header_timeout"))

        def _too_many_headers(self) -> None:
            message = f"the headers have more than {MOST_HEADER_BYTES} bytes"
            self._turn_away(ApiError(431, message, code="headers_too_large"))

        def _turn_away(self, error: ApiError) -> None:
            self._headers_are_there()
            cycle = self._answering
            if cycle is None or (cycle.response_complete and not self._in_body):
                self.transport.write(raw_answer(error))
            elif cycle is self.cycle and self._in_body and not cycle.response_started:  # its own body is at fault
                cycle.disconnected = True  # no other answer may follow
                cycle.message_event.set()
                self.transport.write(raw_answer(error))
            # else it would be taken for a part of an answer, or for the next one's
            self.transport.close()

    return LimitedProtocol


def _plainly(cycle: RequestResponseCycle, app: Any) -> Any:
    """An application whose answers end with the connection, where it does not say their length: HTTP/1.0 knows no pieces."""

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        said = False

        async def send_plainly(message: Any) -> None:
            nonlocal said
            if message["type"] == "http.response.start":
                said = any(name.lower() == b"content-length" for name, _ in message["headers"])
                if not said:
                    cycle.chunked_encoding = False
            elif not said:
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await app(scope, receive, send_plainly)

    return answer


def many_descriptors(wanted: int) -> None:
    """Raises this process's limit of open files as far as it may, so that connections do not end at a default of 1,024."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most: Any = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
