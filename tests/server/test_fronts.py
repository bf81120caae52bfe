"""Several front processes on one port and one engine."""

from __future__ import annotations

import os
import re
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from deepinfer.scratch import ScratchFolder
from process_kit import gone
from server_kit import Served, children, command_of, serving

GREEDY: dict[str, Any] = {"prompt": "the fox", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
LONG: dict[str, Any] = {**GREEDY, "max_tokens": 480}


@pytest.fixture(scope="module")
def temporary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the server keeps temporary files."""
    return tmp_path_factory.mktemp("temporary")


@pytest.fixture(scope="module")
def served(temporary: Path) -> Iterator[Served]:
    with serving(None, "--front-processes", "2", TMPDIR=str(temporary)) as made:
        yield made


def counts(place: Path) -> list[Path]:
    """Folders in which front processes count."""
    return list(place.glob("deepinfer-*"))


def fronts(served: Served) -> list[int]:
    """Processes that answer clients."""
    return sorted(int(p) for p in children(served.process.pid) if "front_process" in command_of(int(p)))


def test_every_answer_is_that_of_one_engine(served: Served) -> None:
    assert len(fronts(served)) == 2
    expected = served.post("/v1/completions", GREEDY).json()["choices"][0]["text"]
    with ThreadPoolExecutor(16) as pool:
        made = list(pool.map(lambda i: served.post("/v1/completions", {**GREEDY, "request_id": "same", "user": str(i)}), range(48)))
    assert [(m.status_code, m.json()["choices"][0]["text"]) for m in made] == [(200, expected)] * 48
    streamed = served.events("/v1/completions", {**GREEDY, "stream": True})
    assert "".join(e["choices"][0]["text"] for e in streamed[:-1]) == expected
    for _ in range(4):  # whichever front is asked
        page = served.get("/metrics").text
        (tokens,) = re.findall(r"^deepinfer:generation_tokens_total\{.*\} ([0-9.]+)$", page, re.MULTILINE)
        assert float(tokens) == 12 * 50


def test_a_front_that_dies_takes_its_own_requests_only_and_is_replaced(served: Served) -> None:
    engine, before = served.engine_pid(), fronts(served)
    results: list[int | None] = []

    def ask() -> None:
        try:
            results.append(served.post("/v1/completions", LONG).status_code)
        except httpx.TransportError:
            results.append(None)

    asking = [threading.Thread(target=ask) for _ in range(8)]
    for thread in asking:
        thread.start()
    time.sleep(0.1)
    os.kill(before[0], signal.SIGKILL)
    for thread in asking:
        thread.join(60)
    assert set(results) <= {200, None} and len(results) == 8
    end = time.monotonic() + 60
    while len(fronts(served)) < 2:
        assert time.monotonic() < end
        time.sleep(0.05)
    now = fronts(served)
    assert before[0] not in now and before[1] in now and served.engine_pid() == engine
    assert any("front process" in line and "SIGKILL" in line for line in served.lines)
    left = re.findall(r"^deepinfer:(?:requests|tokens)_in_flight{[^}]*} (\S+)", served.get("/metrics").text, re.MULTILINE)
    assert left == ["0.0", "0.0"]
    os.kill(before[1], signal.SIGSTOP)  # so that the new one has to answer
    try:
        end = time.monotonic() + 90
        while True:
            try:
                answer = httpx.post(f"{served.url}/v1/completions", json=GREEDY, timeout=3)
                break
            except httpx.TimeoutException:
                assert time.monotonic() < end
        assert answer.status_code == 200
    finally:
        os.kill(before[1], signal.SIGCONT)


def test_limits_of_a_tenant_hold_over_all_fronts(tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text("tenants: [{name: t, keys: [k], requests_per_minute: 30, tokens_per_minute: 600}]", encoding="utf-8")
    with serving(None, "--front-processes", "2", "--api-key-file", str(keys)) as served:
        body, began, asked = {**GREEDY, "max_tokens": 5}, time.monotonic(), 0
        prompt = served.post("/tokenize", {"prompt": GREEDY["prompt"]}, headers={"x-api-key": "k"}).json()["count"]

        def ask() -> httpx.Response:
            while True:
                try:  # what the stopped one has accepted already waits for ever
                    return httpx.post(f"{served.url}/v1/completions", json=body, headers={"x-api-key": "k"}, timeout=20)
                except httpx.TimeoutException:
                    assert time.monotonic() < began + 90

        for stopped in fronts(served):  # the other one has to answer
            os.kill(stopped, signal.SIGSTOP)
            try:
                for _ in range(8):
                    answer = ask()
                    asked += 1
                    assert answer.status_code == 200
                    back = time.monotonic() - began
                    assert 30 - asked <= int(answer.headers["x-ratelimit-remaining-requests"]) <= 30 - asked + back * 0.5
                    spent = asked * prompt + (asked - 1) * 5
                    assert 600 - spent <= int(answer.headers["x-ratelimit-remaining-tokens"]) <= 600 - max(0, spent - back * 10)
            finally:
                os.kill(stopped, signal.SIGCONT)
        with ThreadPoolExecutor(8) as pool:
            made = [answer.status_code for answer in pool.map(lambda _: ask(), range(60))]
        back = time.monotonic() - began
        assert 14 <= made.count(200) <= 14 + back * 0.5 and set(made) == {200, 429}


def test_a_signal_ends_all_of_them(tmp_path: Path) -> None:
    with serving(None, "--front-processes", "2", TMPDIR=str(tmp_path)) as served:
        assert len(counts(tmp_path)) == 1
        pids = [*fronts(served), served.engine_pid()]
        done: list[int] = []
        asking = threading.Thread(target=lambda: done.append(served.post("/v1/completions", LONG).status_code))
        asking.start()
        time.sleep(0.2)
        assert served.end() == 0
        asking.join(20)
        assert done == [200]  # it was let end
        assert [line for line in served.lines if "503" in line] == [], "that the engine ends with the server is no news"
        assert all(gone(pid, 10) for pid in pids)
        assert not counts(tmp_path)


def test_no_process_outlives_a_killed_parent(served: Served, temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pids = [*fronts(served), served.engine_pid()]
    served.process.kill()
    served.process.wait(10)
    assert all(gone(pid, 15) for pid in pids)
    (left,) = counts(temporary)
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    with ScratchFolder("build"):
        assert not left.exists(), "it goes with the next that is made"
