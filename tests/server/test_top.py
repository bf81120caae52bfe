"""`deepinfer top` beside a running server: what it shows, to a person, to a pipe and to a script."""

from __future__ import annotations

import http.server
import json
import math
import os
import pty
import select
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from cli.running import COMMAND, environment, run
from deepinfer.cli.top_numbers import Scrape, Span, numbers, quantile, render
from server_kit import Served

BUCKETS = [(1.0, 2.0), (2.0, 6.0), (4.0, 8.0), (math.inf, 10.0)]


@pytest.mark.parametrize(("q", "want"), [(0.2, 1.0), (0.1, 0.5), (0.4, 1.5), (0.6, 2.0), (0.7, 3.0), (0.95, 4.0)])
def test_a_quantile_lies_within_its_bucket(q: float, want: float) -> None:
    assert quantile(BUCKETS, q) == pytest.approx(want)


PAGE = """
# TYPE deepinfer:engine_up gauge
deepinfer:engine_up{model_name="m"} 1
# TYPE deepinfer:output_tokens counter
deepinfer:output_tokens_total{engine="prompt"} 3
deepinfer:output_tokens_total{engine="completion"} %d
# TYPE deepinfer:kv_usage_ratio gauge
deepinfer:kv_usage_ratio{engine="prompt"} 0.25
deepinfer:kv_usage_ratio{engine="completion"} 0.5
# TYPE deepinfer:hit_tokens counter
deepinfer:hit_tokens_total{engine="prompt"} 30
# TYPE deepinfer:asked_tokens counter
deepinfer:asked_tokens_total{engine="prompt"} 40
# TYPE deepinfer:time_to_first_token_seconds histogram
deepinfer:time_to_first_token_seconds_bucket{le="0.1"} %d
deepinfer:time_to_first_token_seconds_bucket{le="+Inf"} %d
"""


def test_numbers_of_two_looks() -> None:
    before, now = Scrape.read(PAGE % (100, 4, 4), 10.0), Scrape.read(PAGE % (160, 4, 8), 14.0)
    n = numbers(Span(now, before))
    assert n["tokens_per_second"]["out"] == 15.0
    assert n["kv"] == {"usage": 0.5, "hit_rate": 0.75, "preemptions": 0}
    assert n["seconds"]["time_to_first_token"]["p50"] == 0.1, "all of this span are above the last bound"
    again = numbers(Span(Scrape.read(PAGE % (20, 1, 1), 16.0), now))
    assert again["tokens_per_second"]["out"] == 10.0, "a process that was started again counts from 0"
    alone = numbers(Span(now))
    assert alone["tokens_per_second"]["out"] is None and alone["seconds"]["time_to_first_token"]["p50"] == 0.1
    assert "m · x · serving" in render(n, "x") and "50.0 %" in render(n, "x")


def test_a_look_at_a_server(server: Served) -> None:
    server.post("/v1/completions", {"model": "tiny", "prompt": "look", "max_tokens": 9, "ignore_eos": True})
    time.sleep(0.6)
    made = run("top", server.url, "--once", "--json", "--interval", "0.1")
    assert (made.returncode, made.stderr) == (0, b"")
    shown = json.loads(made.stdout)
    assert shown["model"] == "tiny" and shown["up"] is True
    assert shown["requests"]["running"] == 0 and shown["requests"]["ended"]["length"] >= 1
    assert set(shown["seconds"]["inter_token_latency"]) == {"p50", "p90", "p99"}
    plain = run("top", f"127.0.0.1:{server.port}", "--once", "--interval", "0.1")
    text = plain.stdout.decode()
    assert plain.returncode == 0 and "\x1b" not in text
    assert {"requests", "tokens/s", "KV usage", "hit rate", "first token", "inter-token", "steps"} <= {
        line[:13].strip() for line in text.splitlines()
    }


def test_a_pipe_gets_one_object_a_look_until_its_reader_leaves(server: Served) -> None:
    top = subprocess.Popen(
        [*COMMAND, "top", server.url, "--json", "--interval", "0.05"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()
    )
    assert top.stdout is not None and top.stderr is not None
    assert all(json.loads(top.stdout.readline())["up"] for _ in range(3))
    top.stdout.close()
    assert (top.wait(30), top.stderr.read()) == (141, b"")
    top.stderr.close()


def test_in_a_terminal_it_draws_in_place_and_leaves_it_as_it_was(server: Served) -> None:
    ours, theirs = pty.openpty()
    top = subprocess.Popen(
        [*COMMAND, "top", server.url, "--interval", "0.1"],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=environment(),
        start_new_session=True,
    )
    os.close(theirs)
    seen = b""
    try:
        end = time.monotonic() + 60
        while seen.count(b"\x1b[H") < 3 and time.monotonic() < end:
            seen += read(ours)
        assert seen.startswith(b"\x1b[?1049h") and b"requests" in seen and seen.count(b"\x1b[H") >= 3
        top.send_signal(signal.SIGINT)
        while top.poll() is None and time.monotonic() < end:
            seen += read(ours)
        seen += read(ours)
        assert top.returncode == 130 and seen.rstrip().endswith(b"\x1b[?1049l") and b"Traceback" not in seen
    finally:
        if top.poll() is None:
            top.kill()
            top.wait(10)
        os.close(ours)


def read(fd: int) -> bytes:
    """What a terminal got within a moment."""
    if not select.select([fd], [], [], 0.1)[0]:
        return b""
    try:
        return os.read(fd, 65536)
    except OSError:  # the other end is closed
        return b""


class _Other(http.server.BaseHTTPRequestHandler):
    """A server of something else."""

    def do_GET(self) -> None:
        self.send_response({"/secret/metrics": 401, "/none/metrics": 404}.get(self.path, 200))
        self.end_headers()
        self.wfile.write(b"<html>" if self.path.startswith("/html") else b"other_metric 1\n")

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture(scope="module")
def other() -> Iterator[str]:
    """Address of a server that is not ours."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Other) as made:
        thread = threading.Thread(target=made.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{made.server_port}"
        made.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("http://127.0.0.1:9",), 1, "does not answer: Connection refused; is `deepinfer serve` running there?"),
        (("--uds", "/no/such/socket"), 1, "/no/such/socket does not answer: No such file or directory"),
        (("ftp://x",), 2, "'ftp://x' is no address of a server"),
        (("http://x:port",), 2, "is no address of a server"),
        (("--interval", "0"), 2, "--interval 0 must be above 0"),
        (("{other}/secret",), 1, "asks for a key: --api-key KEY"),
        (("{other}/none",), 1, "/none/metrics answered 404"),
        (("{other}/html",), 1, "has no metrics of a DeepInfer server"),
        (("{other}",), 1, "has no metrics of a DeepInfer server"),
    ],
)
def test_a_mistake_takes_one_line(other: str, arguments: tuple[str, ...], code: int, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    from deepinfer.cli.app import main

    assert main(["top", "--once", *(a.replace("{other}", other) for a in arguments)]) == code
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith("deepinfer: error: ") and says in err
