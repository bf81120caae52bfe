"""What a connection carries besides good requests: it ends in time, and nobody's answer has another one's bytes in it."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Iterator

import pytest

from deepinfer.server.settings import ServerSettings
from server_kit import Local, local

HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"


@pytest.fixture(scope="module")
def front() -> Iterator[Local]:
    settings = ServerSettings(served_model_name=("tiny",), port=0, header_timeout=0.5, body_timeout=0.6, keep_alive_timeout=1)
    with local(settings) as made:
        yield made


def raw(front: Local, *parts: bytes, pause: float = 0.1, seconds: float = 5) -> bytes:
    """Everything that comes until the other side ends the connection."""
    with socket.create_connection(("127.0.0.1", front.port), timeout=seconds) as connection:
        got = b""
        with contextlib.suppress(ConnectionError):
            for part in parts:
                connection.sendall(part)
                time.sleep(pause)
            while piece := connection.recv(1 << 16):
                got += piece
        return got


def post(body: dict[str, object], version: bytes = b"1.1") -> bytes:
    data = json.dumps({"max_tokens": 3, "ignore_eos": True, "prompt": "the fox", **body}).encode()
    return b"POST /v1/completions HTTP/%s\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n%s" % (version, len(data), data)


@pytest.mark.parametrize("headers", [b"x-a: " + b"y" * 100_000 + b"\r\n", b"x-a: yyyyyyyyyyyyy\r\n" * 6000], ids=["one", "many"])
def test_headers_that_come_at_once_are_counted_too(front: Local, headers: bytes) -> None:
    for first in (b"", b"GET /version HTTP/1.1\r\nhost: localhost\r\n\r\n"):
        got = raw(front, first, b"GET /health HTTP/1.1\r\nhost: localhost\r\n" + headers + b"\r\n")
        assert b"HTTP/1.1 431 " in got and got.count(b" 200 OK") == bool(first)
    under = raw(
        front, b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n" + headers[:60_000].rpartition(b"\r\n")[0] + b"\r\n\r\n"
    )
    assert under.startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("rest", [b"0\r\n" + b"x-a: yyyyyyyyyyyyy\r\n" * 6000, b"1;" + b"e" * 400_000], ids=["trailers", "extension"])
def test_what_is_beside_a_body_in_pieces_is_bounded(front: Local, rest: bytes) -> None:
    began = time.monotonic()
    got = raw(front, HEAD + b"transfer-encoding: chunked\r\n\r\n2\r\n{}\r\n" + rest, pause=0)
    assert got.startswith(b"HTTP/1.1 431 ") and time.monotonic() - began < 0.5
    front.at_rest()


@pytest.mark.parametrize("rest", [b"xchunked\r\n\r\n0\r\n\r\n", b"chunked\r\n\r\n2\r\n{}\r\nzz\r\n"], ids=["coding", "size"])
@pytest.mark.parametrize("path", [b"/v1/completions", b"/nothing"])
def test_a_body_in_pieces_that_are_none_is_told(front: Local, path: bytes, rest: bytes) -> None:
    for pause in (0.0, 0.1):
        head = HEAD.replace(b"/v1/completions", path) + b"transfer-encoding: "
        got = raw(front, head + rest[:-4], rest[-4:], pause=pause)
        assert got.count(b"HTTP/1.1 ") == 1 and got.startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 404 "))
    front.at_rest()


def test_a_body_that_nobody_reads_does_not_keep_a_connection(front: Local) -> None:
    for head in (b"GET /health HTTP/1.1", b"POST /nothing HTTP/1.1"):
        began = time.monotonic()
        got = raw(front, head + b"\r\nhost: localhost\r\ncontent-length: 9000\r\n\r\n", b"x", b"x")
        assert got.count(b"HTTP/1.1 ") == 1 and time.monotonic() - began < 3


def test_line_breaks_do_not_keep_a_connection(front: Local) -> None:
    began = time.monotonic()
    raw(front, b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n", *[b"\r\n"] * 3)
    assert time.monotonic() - began < 3


def test_a_line_break_behind_a_body_changes_nothing(front: Local) -> None:
    got = raw(front, post({}) + b"\r\n", b"GET /version HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
    assert got.count(b"HTTP/1.1 200 OK") == 2 and b'"version"' in got


def test_noise_behind_a_request_is_not_answered_within_its_answer(front: Local) -> None:
    got = raw(front, post({"stream": True, "max_tokens": 400}), b"noise\r\n\r\n", pause=0.15)
    assert got.count(b"HTTP/1.1 ") == 1 and b"invalid_http" not in got
    front.at_rest()


def test_http_1_0_gets_no_pieces(front: Local) -> None:
    got = raw(front, post({"stream": True, "temperature": 0}, b"1.0"))
    head, _, body = got.partition(b"\r\n\r\n")
    assert b"chunked" not in head and b"connection: close" in head
    assert body.startswith(b"data: {") and body.endswith(b"data: [DONE]\n\n") and b"\r\n" not in body
    whole = raw(front, post({"temperature": 0}, b"1.0")).partition(b"\r\n\r\n")[2]
    assert json.loads(whole)["usage"]["completion_tokens"] == 3


def test_who_asks_for_another_protocol_is_answered_in_this_one(front: Local) -> None:
    asked = b"connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\ncontent-length"
    got = raw(front, *[post({}).replace(b"content-length", asked)] * 2, pause=0.4)
    assert got.count(b"HTTP/1.1 200 OK") == 2 and got.count(b'"completion_tokens":3') == 2


@pytest.mark.parametrize("at_once", [True, False], ids=["with the request", "during the answer"])
def test_a_client_that_shuts_down_its_side_has_left(front: Local, at_once: bool) -> None:
    """TCP tells it from no closed connection, behind which a request would run on for nobody."""
    with socket.create_connection(("127.0.0.1", front.port)) as sock:
        sock.settimeout(20)
        sock.sendall(post({"stream": True, "max_tokens": 480}))
        got = b""
        if not at_once:
            while got.count(b"data: ") < 3:
                got += sock.recv(1 << 16)
        sock.shutdown(socket.SHUT_WR)
        front.at_rest()
        while piece := sock.recv(1 << 16):
            got += piece
    assert b"[DONE]" not in got and got.count(b"data: ") < 480
    if at_once:
        assert got.count(b"data: ") < 100
