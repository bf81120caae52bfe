"""Structured outputs through HTTP: what is wrong with one is that request's 400, in time, and nobody else's matter."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import grammar_kit
from server_kit import Served, children, command_of, serving

BODY = {"model": "tiny", "prompt": "the quick", "temperature": 1.0, "seed": 1, "max_tokens": 60}
GOOD = {"response_format": {"type": "regex", "pattern": "(ab|[0-9]{2}){3}"}}
MALFORMED = {"structured_outputs": {"grammar": "root ::= missing"}}
SECONDS = 4.0


@pytest.fixture(scope="module")
def limited() -> Iterator[Served]:
    with serving(None, "--served-model-name", "tiny", "--grammar-timeout", str(SECONDS)) as made:
        yield made


def counted(server: Served, *names: str) -> list[float]:
    """What the server has counted of compilations."""
    page = server.get("/metrics").text
    return [float(page.partition(f'deepinfer:grammar_{name}_total{{model_name="tiny"}} ')[2].split()[0]) for name in names]


def post(server: Served, **fields: Any) -> Any:
    return server.post("/v1/completions", {**BODY, **fields})


@grammar_kit.despite_load
def test_valid_malformed_hostile_valid_while_somebody_reads(limited: Served) -> None:
    """One process for all; a stream beside them goes on, token by token, while the hostile one is being compiled."""
    names = ("compiles", "failures", "timeouts", "cache_hits", "workers_killed", "starved")
    before = counted(limited, *names)
    number = f"{int(before[0])}{int(before[-1])}"  # what was tried before is remembered
    good = {"response_format": {"type": "regex", "pattern": f"(ab|[0-9]{{2}}){{3}}({number})?"}}
    first = post(limited, **good)
    assert first.status_code == 200 and len(first.json()["choices"][0]["text"]) >= 6
    wrong = post(limited, **MALFORMED)
    assert wrong.status_code == 400 and '"missing" is not defined' in wrong.json()["error"]["message"]
    assert wrong.json()["error"]["param"] is None, "it is not the prompt's fault"
    times: list[float] = []
    stop = threading.Event()

    def read() -> None:
        free = {**BODY, "max_tokens": 400, "ignore_eos": True, "stream": True}
        while not stop.is_set():
            times.extend(time.monotonic() for _ in limited.events("/v1/completions", free))

    reader = threading.Thread(target=read)
    reader.start()
    try:
        begin = time.monotonic()
        hostile = post(limited, structured_outputs={"grammar": f'{grammar_kit.ENDLESS["grammar"]} "{number}"'})
        end = time.monotonic()
    finally:
        stop.set()
        reader.join(60)
    if hostile.status_code == 503:  # a compiling process has the lowest priority, and a model on the processors is one of the others
        assert hostile.headers["retry-after"] and "processor" in hostile.json()["error"]["message"]
        pytest.skip(f"the processors are busy: {hostile.json()['error']['message']}")
    assert hostile.status_code == 400 and f" {SECONDS:g} s" in hostile.json()["error"]["message"]
    assert SECONDS <= end - begin < SECONDS + 30
    inside = [t for t in times if begin < t < end]
    assert len(inside) > 100, "a stream stood still while a grammar was compiled"
    assert max(b - a for a, b in pairwise(inside)) < SECONDS / 2
    again = post(limited, **good)
    assert again.status_code == 200 and again.json()["choices"] == first.json()["choices"]
    assert [now - then for now, then in zip(counted(limited, *names), before, strict=True)] == [1, 1, 1, 1, 1, 0]


@pytest.mark.nightly
@grammar_kit.despite_load
def test_streams_beside_a_timed_device_do_not_notice_compilation() -> None:
    script = Path(__file__).parents[2] / "benches" / "grammars.py"
    made = subprocess.run([sys.executable, str(script), "--json"], stdout=subprocess.PIPE, timeout=900, check=False)
    figures = json.loads(made.stdout)
    assert figures["right"], figures["statuses"]
    assert figures["p99_ratio"] <= 1.2 and made.returncode == 0, figures


def test_a_compilation_without_a_processor_is_told_from_a_bad_grammar(limited: Served) -> None:
    assert post(limited, **GOOD).status_code == 200
    (pid,) = (int(p) for p in children(limited.process.pid) if "compile_process" in command_of(int(p)))
    os.kill(pid, signal.SIGSTOP)
    late = {"response_format": {"type": "regex", "pattern": "late[0-9]"}}
    before = counted(limited, "starved", "timeouts")
    answer = post(limited, **late)
    assert answer.status_code == 503 and answer.headers["retry-after"] == "5"
    error = answer.json()["error"]
    assert (error["type"], error["code"]) == ("overloaded_error", "grammars_busy") and "try again later" in error["message"]
    again = post(limited, **late)
    assert again.status_code == 200 and again.json()["choices"][0]["text"][:4] == "late"
    assert counted(limited, "starved", "timeouts") == [before[0] + 1, before[1]]


def test_absurd_and_strict_ones_are_refused_before_a_stream_begins(limited: Served) -> None:
    for fields in (
        {"structured_outputs": {"json": grammar_kit.nested("[", "", "]", 5000)}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"not": {}}, "strict": True}}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"$ref": "http://127.0.0.1/x"}}}},
        MALFORMED,
    ):
        answer = post(limited, stream=True, **fields)
        assert answer.status_code == 400 and answer.headers["content-type"].startswith("application/json"), answer.text
        assert answer.json()["error"]["message"]


def test_forms_hold_in_streams_and_in_several_answers(limited: Served) -> None:
    events = limited.events("/v1/completions", {**BODY, **GOOD, "stream": True, "n": 3})
    texts = ["".join(c["text"] for e in events[:-1] for c in e["choices"] if c["index"] == i) for i in range(3)]
    whole = post(limited, n=3, **GOOD).json()["choices"]
    assert texts == [c["text"] for c in whole] and all(len(t) == 6 for t in texts)
    assert {c["finish_reason"] for c in whole} == {"stop"}
