"""`deepinfer serve` as a process: how it starts and ends, signals, sockets, its configuration file."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import api_kit
from deepinfer.cli import main
from deepinfer.server.run import warn_of_strangers
from deepinfer.server.settings import ServerSettings
from process_kit import gone
from server_kit import TINY, Served, children, command_of, serving, start, wait_ready

Refused = Callable[..., str]
LONG: dict[str, Any] = {"prompt": "x", "max_tokens": 480, "ignore_eos": True, "temperature": 0}


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Refused:
    """What it says when it does not start, which is before any process is."""

    api_kit.tiny_model()
    capsys.readouterr()

    def run(*options: str) -> str:
        assert main(["serve", api_kit.tiny_model(), *TINY, *options]) == 2
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1 and lines[0].startswith("deepinfer: error: "), lines
        return lines[0]

    return run


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--port", "99999"), "--port must be between 0 and 65535"),
        (("--max-body-bytes", "0"), "--max-body-bytes must be at least 1"),
        (("--header-timeout", "nan"), "--header-timeout must be"),
        (("--host", "no.such.host.invalid"), "is no address of this machine"),
        (("--api-key-file", "/no/such/file"), "cannot be read"),
        (("--config", "/no/such/file"), "cannot be read"),
        (("--model", "other"), "different models"),
        (("--served-model-name", ""), "must not be empty"),
    ],
)
def test_a_wrong_option_takes_one_line(refused: Refused, options: tuple[str, ...], says: str) -> None:
    assert says in refused(*options)


def test_a_port_in_use_is_named_before_anything_is_loaded(refused: Refused) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"port {port} of 127.0.0.1 is in use" in refused("--port", str(port))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("max-num-seq: 4", "did you mean max-num-seqs?"),
        ("- a", "must hold a mapping"),
        ("a: [", "is no YAML"),
        ("port: x", "invalid int value"),
        ("load-format: zip", "invalid choice"),
        ("port: {a: 1}", "one value or a list"),
        ("enable_prefix_caching: 3", "ignored explicit argument"),
        ("port: 1\nport_: 2\n", "unknown option"),
    ],
)
def test_a_wrong_file_names_itself(refused: Refused, tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text(text, encoding="utf-8")
    line = refused("--config", str(path))
    assert says in line and "--config" in line


def test_the_command_line_wins_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text(
        f"model: {api_kit.tiny_model()}\nserved-model-name: [one, two]\nmax_model_len: 64\napi-key: k\nnum-kv-blocks: 32\nblock-size: 16\n"
        "enable-prefix-caching: false\nquiet: true\ndtype: float32\n",
        encoding="utf-8",
    )
    served = start("--config", str(path), "--served-model-name", "three", DEEPINFER_API_KEY="from-env")
    try:
        wait_ready(served)
        for key in ("k", "from-env"):
            cards = served.get("/v1/models", headers={"authorization": f"Bearer {key}"}).json()["data"]
            assert [(c["id"], c["max_model_len"]) for c in cards] == [("three", 64)]
        assert served.get("/v1/models").status_code == 401
        assert served.end() == 0
    finally:
        served.process.kill()


def test_a_unix_socket(refused: Refused, tmp_path: Path) -> None:
    path = tmp_path / "s"
    old = socket.socket(socket.AF_UNIX)
    old.bind(str(path))
    old.close()  # as a killed server leaves it
    served = start(api_kit.tiny_model(), *TINY, "--uds", str(path))
    try:
        wait_ready(served)
        assert served.url == f"http+unix://{path}" and stat.S_IMODE(path.stat().st_mode) == 0o600
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://here") as client:
            assert client.get("/health").status_code == 200
        assert "in use by another server" in refused("--uds", str(path))
        assert served.end() == 0 and not path.exists()
    finally:
        served.process.kill()


@pytest.mark.parametrize(
    ("values", "warned"),
    [
        ({"host": "0.0.0.0"}, True),
        ({"host": "0.0.0.0", "api_key": ("k",)}, False),
        ({"host": "::"}, True),
        ({"host": "127.0.0.1"}, False),
        ({"host": "localhost"}, False),
        ({"host": "0.0.0.0", "uds": "/s"}, False),
    ],
)
def test_an_open_server_says_that_it_is(values: dict[str, Any], warned: bool) -> None:
    said: list[str] = []
    warn_of_strangers(ServerSettings(**values), said.append)
    assert bool(said) == warned


# Signals


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_it_loads_ends_both_processes(number: signal.Signals) -> None:
    served = start(api_kit.tiny_model(), *TINY)
    pids: list[int] = []
    end = time.monotonic() + 60
    while not pids and time.monotonic() < end and served.process.poll() is None:
        pids = [int(p) for p in children(served.process.pid) if "async_engine.process" in command_of(int(p))]
        time.sleep(0.005)
    assert pids
    assert served.end(number) == 0
    assert gone(pids[0], 10) and "listening" not in " ".join(served.lines)


def test_sigterm_drains_and_running_requests_end() -> None:
    with serving() as served:
        engine = served.engine_pid()
        events: list[Any] = []
        first = threading.Event()

        def read() -> None:
            with httpx.stream("POST", served.url + "/v1/completions", json={**LONG, "stream": True}, timeout=60) as answer:
                for line in answer.iter_lines():
                    events.append(line)
                    first.set()

        reader = threading.Thread(target=read)
        with served.client() as kept:
            assert kept.get("/ready").status_code == 200  # a connection that stays
            reader.start()
            assert first.wait(30)
            served.process.send_signal(signal.SIGTERM)
            late: list[tuple[int, bool]] = []
            while served.process.poll() is None and not late:
                with contextlib.suppress(httpx.TransportError):
                    answer = kept.post("/v1/completions", json=LONG)
                    if answer.status_code == 503:
                        late.append((answer.status_code, "retry-after" in answer.headers))
            reader.join(30)
            assert served.process.wait(30) == 0
        assert "data: [DONE]" in events
        assert gone(engine, 10)
        assert late in ([(503, True)], [])  # the stream may have ended first


def test_a_second_signal_hurries_and_tells_the_client() -> None:
    with serving(None, "--drain-timeout", "600", "--max-model-len", "512") as served:
        engine = served.engine_pid()
        os.kill(engine, signal.SIGSTOP)  # so that nothing ends by itself
        try:
            answers: list[httpx.Response] = []
            asking = threading.Thread(target=lambda: answers.append(served.post("/v1/completions", LONG)))
            asking.start()
            time.sleep(0.3)
            served.process.send_signal(signal.SIGTERM)
            time.sleep(0.3)
            assert served.process.poll() is None and asking.is_alive()
            served.process.send_signal(signal.SIGTERM)
            asking.join(20)
            assert answers[0].status_code == 503 and answers[0].json()["error"]["code"] == "shutting_down"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(engine, signal.SIGCONT)
        assert served.process.wait(30) == 0 and gone(engine, 10)


def test_no_engine_outlives_a_killed_server() -> None:
    with serving() as served:
        engine = served.engine_pid()

        def ask() -> None:
            with contextlib.suppress(httpx.TransportError):
                served.post("/v1/completions", LONG)

        asking = threading.Thread(target=ask)
        asking.start()
        served.get("/health")
        served.process.kill()
        asking.join(20)
        assert served.process.wait(10) == -signal.SIGKILL
        assert gone(engine, 10)


def test_a_killed_engine_turns_health_red_within_a_second() -> None:
    with serving() as served:
        answers: list[httpx.Response] = []
        asking = threading.Thread(target=lambda: answers.append(served.post("/v1/completions", LONG)))
        asking.start()
        time.sleep(0.1)
        os.kill(served.engine_pid(), signal.SIGKILL)
        killed = time.monotonic()
        while served.get("/health").status_code == 200:
            assert time.monotonic() < killed + 5
        assert time.monotonic() - killed < 1.0
        asking.join(20)
        assert answers[0].status_code in (200, 503)  # it may have been quick
        for path in ("/ready", "/health"):
            assert served.get(path).status_code == 503
        refused = served.post("/v1/completions", LONG)
        assert refused.status_code == 503 and int(refused.headers["retry-after"]) >= 1
        assert served.get("/v1/models").status_code == 200  # what it is can still be asked
        time.sleep(0.7)
        assert sum("the engine has ended" in line for line in served.lines) == 1
        assert served.end() == 1


# Connections


def raw(served: Served, data: bytes, seconds: float = 10) -> bytes:
    """Sends bytes; gives what comes back until the connection is closed, or for so long."""
    with socket.create_connection(("127.0.0.1", served.port), timeout=seconds) as connection:
        connection.sendall(data)
        got = b""
        with contextlib.suppress(TimeoutError, ConnectionError):
            while part := connection.recv(1 << 16):
                got += part
        return got


@pytest.fixture(scope="module")
def strict() -> Iterator[Served]:
    limits = {"--header-timeout": "0.5", "--max-connections": "6", "--keep-alive-timeout": "1", "--max-body-bytes": "2000"}
    with serving(None, *(word for limit in limits.items() for word in limit)) as made:
        yield made


def test_headers_that_do_not_come_are_given_up(strict: Served) -> None:
    for data in (b"", b"GET /health HTTP/1.1\r\nhost: localhost\r\n"):
        began = time.monotonic()
        got = raw(strict, data)
        assert got.startswith(b"HTTP/1.1 408 ") and b"header_timeout" in got
        assert time.monotonic() - began < 5
    kept = raw(strict, b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\nGET /hea")  # a second request on the same connection
    assert kept.startswith(b"HTTP/1.1 200 ") and b"HTTP/1.1 408 " in kept


def test_headers_without_end_are_cut(strict: Served) -> None:
    got = raw(strict, b"GET /health HTTP/1.1\r\n" + b"x-filler: yyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyy\r\n" * 3000)
    assert got == b"" or got.startswith(b"HTTP/1.1 431 ")  # the client may still be sending when the connection closes


def test_noise_is_no_request(strict: Served) -> None:
    for data in (b"\x16\x03\x01 tls?", b"GET\r\n\r\n", b"POST /v1/completions HTTP/1.1\r\ncontent-length: x\r\n\r\n"):
        got = raw(strict, data)
        assert got.startswith(b"HTTP/1.1 400 ") and b'"error"' in got, data


def test_one_connection_too_many_is_told(strict: Served) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(6):
            stack.enter_context(socket.create_connection(("127.0.0.1", strict.port)))
        time.sleep(0.1)
        got = raw(strict, b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert got == b"" or (got.startswith(b"HTTP/1.1 503 ") and b"too_many_connections" in got)
    time.sleep(0.1)
    assert strict.get("/health").status_code == 200


def test_a_body_that_is_too_large_is_told_even_to_a_busy_sender(strict: Served) -> None:
    for content in (b"x" * 5000, iter([b"x" * 1000] * 20)):  # with its length, and in chunks
        answer = httpx.post(f"{strict.url}/v1/completions", content=content)
        assert answer.status_code == 413 and answer.json()["error"]["code"] == "body_too_large"
