"""Terminals, pipes and exit codes: what every command shares when it talks to its caller."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from typing import Any, Protocol

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells report it
EXIT_BROKEN_PIPE = 141  # 128 + SIGPIPE
EXIT_TERMINATED = 143  # 128 + SIGTERM


_ended = True  # whether stdout stands at the beginning of a line


class UserError(Exception):
    """A mistake in how a command was called; printed on one line, exit code 2."""


class RunError(Exception):
    """A command failed while running for a reason it can name; printed on one line, exit code 1."""


def gigabytes(option: str, value: float) -> int:
    """Bytes of an option in 10^9 bytes.

    Raises:
        UserError: it is not above 0, or no number of bytes at all.
    """
    if not 0 < value < 1e15:
        raise UserError(f"{option} {value:g} must be above 0 and a size")
    return max(1, int(value * 1e9))


def note(text: str) -> None:
    """Writes one line for a person to stderr; stdout carries answers only."""
    print(text, file=sys.stderr, flush=True)


def one_line(text: object) -> str:
    """``text`` with its line breaks folded, so that an error stays one line in a log."""
    return " ".join(str(text).split())


def shortened(text: str, most: int = 40) -> str:
    """``text`` in quotes for an error, cut where it is long."""
    return repr(text if len(text) <= most else text[: most - 1] + "…")


def error_line(text: object) -> None:
    """Writes the one line a failed command leaves behind."""
    note(f"deepinfer: error: {one_line(text)}")


def print_json(value: Any) -> None:
    """Prints one JSON value on one line of stdout."""
    write_out(json.dumps(value, ensure_ascii=False, allow_nan=False) + "\n")


def write_out(text: str) -> None:
    """Writes to stdout and flushes, so that a pipe sees each piece when it is made.

    A lone surrogate cannot be encoded; it is replaced rather than ending the command.
    """
    global _ended
    stream = sys.stdout
    if text:
        _ended = text.endswith("\n")
    try:
        stream.write(text)
    except UnicodeEncodeError:
        encoding = stream.encoding or "utf-8"
        stream.write(text.encode(encoding, "replace").decode(encoding))
    stream.flush()


def line_open() -> bool:
    """Whether the last line written to stdout has no end yet and what goes to stderr would land in it, both being terminals."""
    return not _ended and sys.stdout.isatty() and sys.stderr.isatty()


def read_stdin() -> str:
    """The whole of stdin as text.

    Raises:
        UserError: the input is not UTF-8.
    """
    return decode_utf8(sys.stdin.buffer.read(), "standard input")


def decode_utf8(data: bytes, name: str) -> str:
    """``data`` as text; ``name`` says in the error where it came from.

    Raises:
        UserError: ``data`` is not UTF-8.
    """
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{name} is not UTF-8 (byte {error.start}); convert it, for example with iconv") from None


def open_missing_streams() -> None:
    """Points standard streams that the caller has closed at nothing: reading finds the end, writing goes nowhere.

    The lowest free descriptor is taken, in order, so that no later file becomes somebody's stdout.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 (as long as the process)


def silence_broken_pipe() -> None:
    """Points stdout at nothing, so that the interpreter's own flush at exit does not complain a second time."""
    with contextlib.suppress(OSError, ValueError):
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, sys.stdout.fileno())
        os.close(devnull)


class Progress(Protocol):
    """The part of a progress bar the commands use."""

    def update(self, n: int = 1) -> Any:
        """``n`` more units are done."""

    def set_postfix_str(self, s: str = "") -> Any:
        """Shows ``s`` behind the bar."""


class _NoProgress:
    def update(self, n: int = 1) -> None:
        pass

    def set_postfix_str(self, s: str = "") -> None:
        pass


@contextlib.contextmanager
def progress(total: int | None, what: str, unit: str) -> Iterator[Progress]:
    """A progress bar on stderr when that is a terminal, else nothing at all."""
    if not sys.stderr.isatty():
        yield _NoProgress()
        return
    from tqdm import tqdm

    with tqdm(total=total, desc=what, unit=unit, dynamic_ncols=True, leave=True) as bar:
        yield bar
