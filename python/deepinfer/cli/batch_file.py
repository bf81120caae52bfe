"""The two files of ``deepinfer batch``: request lines coming in, answer lines going out, and how a run is taken up again.

Input is read line by line and never held as a whole. The answer file is the only record of progress: a request whose
``custom_id`` has an answer is done; an input line whose number is in an error object is done; everything else is not.
Lines are appended whole and flushed one by one, so an interruption can cost at most the end of the last line.
"""

from __future__ import annotations

import fcntl
import json
import os
import stat
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

from deepinfer.cli.console import UserError

URLS = ("/v1/chat/completions", "/v1/completions")


class LineError(Exception):
    """One input line cannot be served. ``code`` names the kind of mistake for programs."""

    def __init__(self, code: str, message: str, custom_id: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.custom_id = custom_id


@dataclass(frozen=True)
class Line:
    """One well-formed request line; ``number`` counts from 1."""

    number: int
    custom_id: str
    url: str
    body: dict[str, Any]


def parse_line(number: int, raw: bytes) -> Line:
    """Checks the envelope of one input line.

    Raises:
        LineError: not UTF-8, not a JSON object, a field missing or of the wrong type, an unknown method or url.
    """
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise LineError("invalid_utf8", f"the line is not UTF-8 (byte {error.start})") from None
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise LineError("invalid_json", "the line's JSON is nested too deeply") from None
    except ValueError as error:
        raise LineError("invalid_json", f"the line is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise LineError("invalid_line", "the line must be a JSON object with custom_id, method, url and body")
    custom_id = value.get("custom_id")
    if not isinstance(custom_id, str) or not custom_id:
        raise LineError("invalid_line", "custom_id must be a non-empty string")
    if value.get("method", "POST") != "POST":
        raise LineError("invalid_line", f"method must be POST, got {value.get('method')!r}", custom_id)
    url = value.get("url")
    if url not in URLS:
        raise LineError("invalid_url", f"url must be one of {', '.join(URLS)}, got {url!r}", custom_id)
    body = value.get("body")
    if not isinstance(body, dict):
        raise LineError("invalid_line", "body must be a JSON object", custom_id)
    return Line(number, custom_id, url, body)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


class RequestFile:
    """The input: numbered raw lines, blank ones left out. ``-`` is stdin."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._file: BinaryIO
        if path == "-":
            self._file = sys.stdin.buffer
            return
        try:
            self._file = open(path, "rb")  # noqa: SIM115 (closed by close)
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror}") from None

    def lines(self) -> Iterator[tuple[int, bytes]]:
        """(number, bytes) of every line that is not blank."""
        for number, raw in enumerate(self._file, start=1):
            if number == 1:
                raw = raw.removeprefix(b"\xef\xbb\xbf")
            if raw.strip():
                yield number, raw

    def count(self) -> int | None:
        """Lines that are not blank; ``None`` when the input cannot be read twice (a pipe)."""
        if not self._file.seekable():
            return None
        start = self._file.tell()
        total = sum(1 for raw in self._file if raw.strip())
        self._file.seek(start)
        return total

    def close(self) -> None:
        """Closes the file; stdin stays open."""
        if self.path != "-":
            self._file.close()


@dataclass
class Done:
    """What an answer file already holds."""

    custom_ids: set[str] = field(default_factory=set)
    error_lines: set[int] = field(default_factory=set)


class AnswerFile:
    """The output: appends whole lines, flushed; repairs a cut last line; one writer at a time. ``-`` is stdout."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.done = Done()
        self._file: BinaryIO
        if path == "-":
            self._file = sys.stdout.buffer
            return
        try:
            # Not truncated, readable (for what is done) and writable at the end.
            self._file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o644), "r+b")
        except OSError as error:
            raise UserError(f"cannot write {path}: {error.strerror}") from None
        if not stat.S_ISREG(os.fstat(self._file.fileno()).st_mode):
            self._file.close()
            raise UserError(f"cannot write {path}: it is no regular file, and answers are read back to resume; name another output file")
        try:
            self._lock()
            self._read_done()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.path != "-":
            self._file.close()

    def append(self, answer: dict[str, Any]) -> None:
        """Writes one answer line and hands it to the operating system."""
        try:
            line = json.dumps(answer, ensure_ascii=False, allow_nan=False).encode("utf-8")
        except UnicodeEncodeError:  # a lone surrogate, for example in a custom_id: only an escape can carry it
            line = json.dumps(answer, allow_nan=False).encode("ascii")
        self._file.write(line + b"\n")
        self._file.flush()

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{self.path} is being written by another run; wait for it or name another output") from None
        except OSError:
            pass  # a file system without locks

    def _read_done(self) -> None:
        """Reads finished lines; cuts off a last line that an interruption left half-written."""
        good_end = 0
        number = 0
        for raw in self._file:
            number += 1
            answer = _parse_answer(raw)
            if answer is None:
                if raw.endswith(b"\n"):
                    raise UserError(f"line {number} of {self.path} is not an answer of deepinfer batch; name another output file")
                break  # half a line at the end
            good_end += len(raw)
            if answer.get("error") is None:
                self.done.custom_ids.add(answer["custom_id"])
            elif isinstance(answer["error"].get("line"), int):
                self.done.error_lines.add(answer["error"]["line"])
            if not raw.endswith(b"\n"):
                self._file.seek(good_end)
                self._file.write(b"\n")
                good_end += 1
                break
        if number == 1 and good_end == 0 and not _looks_like_half_answer(raw):
            raise UserError(f"{self.path} exists and is not an answer file of deepinfer batch; name another output file")
        self._file.truncate(good_end)
        self._file.seek(good_end)


def _parse_answer(raw: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict) or not {"id", "custom_id", "response", "error"} <= value.keys():
        return None
    if value["error"] is None:
        return value if isinstance(value["custom_id"], str) and isinstance(value["response"], dict) else None
    return value if isinstance(value["error"], dict) else None


def _looks_like_half_answer(raw: bytes) -> bool:
    """Whether a lone cut line began as one of ours: it may be thrown away only then."""
    start = b'{"id": "batch_req_'
    return start.startswith(raw[: len(start)]) or raw.startswith(start)


def same_file(source: str, target: str) -> bool:
    """Whether two arguments name one existing file."""
    if "-" in (source, target) or not (Path(source).exists() and Path(target).exists()):
        return False
    return os.path.samefile(source, target)
