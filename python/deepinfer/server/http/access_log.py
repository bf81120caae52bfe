"""Logs: one line for each call, and the program's own lines, for a person or as JSON.

Owns: the form of a line. Never touches: what is logged where. Of a request there are its id, its route and its numbers, never its text,
its keys or its query.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any, Literal, TextIO

from deepinfer.server.records import CallRecord

LogFormat = Literal["text", "json"]

access = logging.getLogger("deepinfer.access")

_QUIET = frozenset({"/health", "/ready", "/metrics", "/page/{name}"})
"""Routes that probes, scrapers and the page ask for again and again; logged only when they fail."""


def log_call(record: CallRecord) -> None:
    """Writes the line of a call that is over."""
    if record.route in _QUIET and record.status < 400:
        return
    access.info("", extra={"call": _fields(record)})


def _fields(record: CallRecord) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "request_id": record.request_id,
        "method": record.method if record.method.isalpha() and len(record.method) <= 10 else "?",
        "route": record.route,
        "status": record.status,
        "seconds": round(max(0.0, record.ended - record.started), 4),
    }
    if record.tenant:
        fields["tenant"] = record.tenant
    if record.stream:
        fields["stream"] = True
    if record.code is not None:
        fields["code"] = record.code
    if record.prompts:
        fields["prompt_tokens"] = sum(p.prompt_tokens for p in record.prompts)
        fields["cached_tokens"] = sum(p.cached_tokens for p in record.prompts)
        fields["completion_tokens"] = sum(p.completion_tokens for p in record.prompts)
        fields["finish_reasons"] = sorted({reason for p in record.prompts for reason in p.finish_reasons})
        firsts = [p.metrics.first_token_time for p in record.prompts if p.metrics.first_token_time]
        if firsts:
            fields["first_token_seconds"] = round(max(0.0, min(firsts) - record.started), 4)
    return fields


class TextFormatter(logging.Formatter):
    """``2026-11-30T12:00:00.123Z INFO text``, and of a call its fields."""

    def format(self, record: logging.LogRecord) -> str:
        call: dict[str, Any] | None = getattr(record, "call", None)
        if call is None:
            text = record.getMessage()
        else:
            rest = " ".join(f"{k}={_plain(v)}" for k, v in call.items() if k not in ("method", "route", "status"))
            text = f"{call['method']} {call['route']} {call['status']} {rest}"
        line = f"{_moment(record.created)} {record.levelname} {text}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class JsonFormatter(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        call: dict[str, Any] | None = getattr(record, "call", None)
        line: dict[str, Any] = {"time": _moment(record.created), "level": record.levelname, "logger": record.name}
        line |= {"message": record.getMessage()} if call is None else call
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=True)


def _plain(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def _moment(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds)) + f".{int(seconds * 1000) % 1000:03d}Z"


def set_up(form: LogFormat, calls: bool, stream: TextIO | None = None) -> None:
    """Has the program's lines, and those of calls, written to a stream (stderr) in this form."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    for name in ("deepinfer", "uvicorn.error"):
        logger = logging.getLogger(name)
        logger.handlers[:] = [handler]
        logger.setLevel(logging.WARNING if name == "uvicorn.error" else logging.INFO)
        logger.propagate = False
    access.disabled = not calls
