"""A process that compiles grammars, to be killed when one of them takes too long.

Owns: its loop, its limits, and ending with its parent. Never touches: what becomes of the results. Started by `pool` as
``python -m deepinfer.structured.compile_process SOCKET_FD LIFELINE_FD PARENT_PID MEMORY_BYTES SECONDS``.

The interpreter's lock may be held for long by native code, so nothing here relies on Python to end the process: the parent kills it, an
alarm does if the parent cannot, and the kernel does when the parent's end of a pipe closes, whichever way the parent ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import pickle
import resource
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

LENGTHS = struct.Struct("<II")
_PR_SET_PDEATHSIG = 1
_F_SETSIG = 10
_LEAST_ALARM = 5
_NICE = 19
_NICE_AT_START = 10
"""Starting costs most of a second of processor time: beside running streams it must be polite, and the first grammar waits for it."""
_TRIES = 20


def send(sock: socket.socket, said: Mapping[str, Any], data: bytes = b"") -> None:
    """Sends one message: a JSON object, and bytes."""
    head = json.dumps(said).encode()
    sock.sendall(LENGTHS.pack(len(head), len(data)) + head + data)


def receive(sock: socket.socket, most: int = 1 << 31) -> tuple[dict[str, Any], bytes] | None:
    """The next message; ``None`` at the end. Raises OverflowError for one of more than ``most`` bytes, and leaves it unread."""
    lengths = _exactly(sock, LENGTHS.size)
    if lengths is None:
        return None
    head, data = LENGTHS.unpack(lengths)
    if head + data > most:
        raise OverflowError(head + data)
    body = _exactly(sock, head + data)
    return None if body is None else (json.loads(body[:head]), bytes(body[head:]))


def _exactly(sock: socket.socket, count: int) -> bytearray | None:
    found = bytearray()
    while len(found) < count:
        piece = sock.recv(min(count - len(found), 1 << 20))
        if not piece:
            return None
        found += piece
    return found


def follow_parent(lifeline: int, parent: int) -> None:
    """Has the kernel kill this process when nobody holds the other end of the pipe any more."""
    if sys.platform != "linux":
        return
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(lifeline, _F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC | os.O_NONBLOCK)
    if parent:  # the thread that started this process lasts as long as its process
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if select.select([lifeline], [], [], 0)[0]:  # it closed before the kernel was told
        os._exit(1)


def be_nice(value: int) -> None:
    """Lowers this process's priority to at most that, among its session's processes and among everybody's.

    Where the kernel shares processors out by session (autogroup), nice values count within one only. In its parent's session this process
    would use up what the waiting server has saved, so it has one of its own, whose priority is lowered alike.
    """
    with contextlib.suppress(OSError):
        if (now := os.nice(0)) < value:
            os.nice(value - now)
    if os.getsid(0) != os.getpid():
        return
    for _ in range(_TRIES):
        try:
            Path("/proc/self/autogroup").write_text(str(value), encoding="ascii")
        except BlockingIOError:  # all processes of the machine together may do so ten times a second
            time.sleep(0.1)
        except OSError:
            return
        else:
            return


def limit(memory: int) -> None:
    """Gives what is to come ``memory`` bytes beyond what this process has now, and the lowest priority."""
    be_nice(_NICE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if memory and sys.platform == "linux":
        with open("/proc/self/statm", encoding="ascii") as f:
            now = int(f.read().split()[0]) * resource.getpagesize()
        most = now + memory
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        resource.setrlimit(resource.RLIMIT_AS, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def serve(sock: socket.socket, memory: int, seconds: float) -> int:
    """Reads the vocabulary, then compiles what comes; gives the exit status."""
    from deepinfer import errors
    from deepinfer.structured.compiler import Compiler

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's Ctrl-C is the parent's to handle
    first = receive(sock)
    if first is None:
        return 0
    try:
        compiler = Compiler(pickle.loads(first[1]))
    except Exception as e:
        send(sock, {"error": asdict(errors.ErrorData.of(e))})
        return 1
    limit(memory)
    send(sock, {"ready": True, "pid": os.getpid()})
    while (message := receive(sock)) is not None:
        said, source = message
        # Of the kernel, in case that the parent is stopped or its thread is held up.
        signal.setitimer(signal.ITIMER_REAL, max(2 * seconds, _LEAST_ALARM))
        answer: dict[str, Any] = {}
        data, failed = b"", None
        try:
            made = compiler.compile(said["kind"], source.decode(), dict(said["options"]))
            answer, data = {"reports": made.reports, "seconds": made.seconds}, made.data
        except MemoryError:
            failed = errors.ErrorData.of(errors.GrammarTimeoutError("compiling it takes too much memory; make it smaller"))
        except errors.GrammarError as e:
            failed = errors.ErrorData.of(e)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        send(sock, answer if failed is None else {"error": asdict(failed)}, data)
        if failed is not None and failed.kind == errors.GrammarTimeoutError.__name__:
            return 0  # its memory is in pieces: another process goes on
        del data, answer
    return 0


def main(arguments: list[str]) -> int:
    """Entry point; ``arguments`` are those named at the head of this file."""
    fd, lifeline, parent, memory = map(int, arguments[:4])
    be_nice(_NICE_AT_START)
    follow_parent(lifeline, parent)
    return serve(socket.socket(fileno=fd), memory, float(arguments[4]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
