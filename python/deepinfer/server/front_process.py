"""One of several front processes.

Owns: joining the engine and serving the socket that all of them share. Never touches: the engine's process. Started by `fronts` as
``python -m deepinfer.server.front_process ENGINE_FD LISTEN_FD LEASH_FD LEDGER_FD PARENT_PID``; it ends with its parent, whose end of the
leash closes then.
"""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import signal
import socket
import sys
from typing import TYPE_CHECKING

from deepinfer.engine.async_engine.child import SharedEngine
from deepinfer.engine.async_engine.process import follow_parent
from deepinfer.engine.async_engine.shared import SharedLLM
from deepinfer.engine.async_engine.wire import LENGTH
from deepinfer.server.http.listen import many_descriptors
from deepinfer.server.ledger import Ledger
from deepinfer.server.run import Signals, loop_factory, serve_ready

if TYPE_CHECKING:
    from deepinfer.server.fronts import FrontStart


def _receive(leash: socket.socket) -> bytes:
    """The one message of the parent."""

    def exactly(count: int) -> bytes:
        data = b""
        while len(data) < count:
            part = leash.recv(count - len(data))
            if not part:
                raise SystemExit(1)  # the parent has gone
            data += part
        return data

    return exactly(LENGTH.unpack(exactly(LENGTH.size))[0])


async def _serve(start: FrontStart, engine: socket.socket, listener: socket.socket, leash: socket.socket, ledger: Ledger) -> None:
    signals = Signals()
    shared = SharedEngine(engine, start.engine_pid)
    llm = SharedLLM(engine=shared, place=start.place, generation=start.generation, hang_timeout=start.settings.hang_timeout, **start.engine)

    def ready(_: object) -> None:
        with contextlib.suppress(OSError):
            leash.send(b"r")

    try:
        await llm.ready()
        await serve_ready(llm, start.settings, listener, signals, lambda _: None, ready, ledger)
    finally:
        await llm.aclose()


def main(arguments: list[str]) -> int:
    """Entry point; ``arguments`` are the numbers named at the head of this file."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    engine, listener, leash, ledger, parent = map(int, arguments)
    leashed = socket.socket(fileno=leash)
    start: FrontStart = pickle.loads(_receive(leashed))
    follow_parent(leash, parent)
    many_descriptors(start.settings.max_connections + 256)
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(_serve(start, socket.socket(fileno=engine), socket.socket(fileno=listener), leashed, Ledger(ledger)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
