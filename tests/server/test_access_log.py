"""Lines about calls: one each, with its id, and nothing that a client has said."""

from __future__ import annotations

import io
import json
import logging
import re
from collections.abc import Iterator

import pytest

from deepinfer.server.http.access_log import log_call, set_up
from deepinfer.server.records import CallRecord
from server_kit import Served, serving


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with serving(None, "--served-model-name", "tiny", "--log-format", "json", "--api-key", "the-key") as made:
        yield made


def test_one_json_line_a_request_without_its_text(server: Served) -> None:
    key = {"authorization": "Bearer the-key"}
    body = {
        "model": "tiny",
        "prompt": "a secret prompt",
        "stop": ["a secret stop"],
        "max_tokens": 6,
        "user": "secret-user",
        "ignore_eos": True,
    }
    made = server.post("/v1/completions?q=secret", body, headers={**key, "x-request-id": "mine-1"})
    text = made.json()["choices"][0]["text"]
    server.events("/v1/completions", {**body, "stream": True}, headers={**key, "x-request-id": "mine-2"})
    server.post("/v1/completions", {**body, "temperature": "hot"}, headers={**key, "x-request-id": "mine-3"})
    server.post("/v1/completions", body, headers={"authorization": "Bearer another-secret", "x-request-id": "mine-4"})
    server.get("/health")
    server.get("/metrics")
    server.get("/v1/models", headers={**key, "x-request-id": "last"})
    lines = [json.loads(line) for line in until(server, "last")]
    by_id = {line["request_id"]: line for line in lines}
    assert len(lines) == len(by_id) == 5, "one a request; probes and scrapers have none"
    assert by_id["mine-1"] | {"time": "", "seconds": 0, "first_token_seconds": 0} == {
        "time": "", "level": "INFO", "logger": "deepinfer.access", "request_id": "mine-1", "method": "POST", "route": "/v1/completions",
        "status": 200, "seconds": 0, "tenant": "default", "prompt_tokens": made.json()["usage"]["prompt_tokens"], "cached_tokens": 0,
        "completion_tokens": 6, "finish_reasons": ["length"], "first_token_seconds": 0,
    }  # fmt: skip
    assert by_id["mine-1"]["seconds"] >= by_id["mine-1"]["first_token_seconds"] > 0
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", by_id["mine-1"]["time"])
    assert by_id["mine-2"]["stream"] is True and by_id["mine-2"]["completion_tokens"] == 6
    assert (by_id["mine-3"]["status"], by_id["mine-4"]["status"]) == (400, 401) and "prompt_tokens" not in by_id["mine-3"]
    everything = "\n".join(server.lines)
    assert "secret" not in everything and "the-key" not in everything and (not text.strip() or text not in everything)


def until(server: Served, request_id: str) -> list[str]:
    """Access lines up to that of a request."""
    for _ in range(500):
        lines = [line for line in server.lines if '"request_id"' in line]
        if any(request_id in line for line in lines):
            return lines
        server.reader.join(0.02)
    raise AssertionError(server.lines)


@pytest.fixture
def written() -> Iterator[io.StringIO]:
    """What is logged in this process."""
    loggers = [logging.getLogger(name) for name in ("deepinfer", "uvicorn.error", "deepinfer.access")]
    before = [(logger.handlers[:], logger.level, logger.propagate, logger.disabled) for logger in loggers]
    yield io.StringIO()
    for logger, (handlers, level, propagate, disabled) in zip(loggers, before, strict=True):
        logger.handlers[:], logger.propagate, logger.disabled = handlers, propagate, disabled
        logger.setLevel(level)


def test_lines_for_a_person_and_no_line_where_none_is_wanted(written: io.StringIO) -> None:
    record = CallRecord("GET", "/v1/models", "abc", status=200, started=1.0, ended=1.25)
    set_up("text", True, written)
    log_call(record)
    assert written.getvalue().endswith("Z INFO GET /v1/models 200 request_id=abc seconds=0.25\n")
    set_up("text", False, written)
    log_call(record)
    assert written.getvalue().count("\n") == 1
    set_up("json", True, written)
    try:
        raise ValueError("inside")
    except ValueError:
        logging.getLogger("deepinfer.server").exception("request %s failed", "abc")
    line = json.loads(written.getvalue().splitlines()[-1])
    assert line["message"] == "request abc failed" and line["level"] == "ERROR" and "ValueError: inside" in line["exception"]


def test_a_method_or_id_does_not_break_a_line(written: io.StringIO) -> None:
    set_up("text", True, written)
    log_call(CallRecord("GET\nINFO forged", "/v1/models", "abc", status=405))
    assert written.getvalue().count("\n") == 1 and "forged" not in written.getvalue()
