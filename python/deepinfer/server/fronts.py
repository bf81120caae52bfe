"""Several front processes on one port and one engine.

Owns: starting the engine and the fronts, the file in which they count what tenants use, starting a front again that has ended, passing
signals on. Never touches: requests (see `front_process`).

The parent binds the socket and starts the engine; every front inherits the socket and gets a connection to the engine of its own. A front
that ends takes its own requests with it and nobody else's; connections that wait for it are taken by the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import IO, Any

from prometheus_client.multiprocess import mark_process_dead

from deepinfer.engine.async_engine import wire
from deepinfer.engine.async_engine.child import EngineChild
from deepinfer.engine.async_engine.client import engine_start
from deepinfer.engine.async_engine.line import EngineLine
from deepinfer.engine.config import EngineConfig
from deepinfer.errors import EngineDeadError
from deepinfer.scratch import ScratchFolder
from deepinfer.server.http.listen import Bound
from deepinfer.server.metrics.exposition import SHARED
from deepinfer.server.run import Note, Signals, before, listening
from deepinfer.server.settings import ServerSettings

_QUICK = 5.0
"""Seconds of life below which a front that ends counts as one that cannot live, and is started again later and later."""

_POLL = 0.05
"""Seconds between two looks at a process."""


@dataclass(frozen=True, slots=True)
class FrontStart:
    """What a front process is told first."""

    engine: dict[str, Any]
    settings: ServerSettings
    engine_pid: int
    place: int
    generation: int


class _Front:
    """One place among the fronts, and the process that has it now."""

    def __init__(self, place: int, child: EngineChild, bound: Bound, ledger: IO[bytes], env: Mapping[str, str]) -> None:
        self.place = place
        self._child, self._bound, self._ledger, self.env = child, bound, ledger, env
        self.generation = -1
        self.started = 0.0
        self.process: subprocess.Popen[bytes]
        self._leash: socket.socket | None = None

    def start(self, engine: dict[str, Any], settings: ServerSettings) -> None:
        """Starts a process."""
        self.generation += 1
        self.started = time.monotonic()
        self.release()
        leash, theirs = socket.socketpair()
        connection = self._child.introduce()
        parent = os.getpid() if threading.current_thread() is threading.main_thread() else 0
        descriptors = (connection.fileno(), self._bound.socket.fileno(), theirs.fileno(), self._ledger.fileno())
        with theirs, connection:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "deepinfer.server.front_process", *map(str, (*descriptors, parent))],
                pass_fds=descriptors,
                stdin=subprocess.DEVNULL,
                process_group=0,  # the terminal's Ctrl-C is the parent's to handle
                env={**self.env, "PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path)},
            )
        start = FrontStart(engine, settings, self._child.pid, self.place, self.generation)
        packed = pickle.dumps(start)
        with contextlib.suppress(OSError):  # it has ended: who waits for it will see
            leash.sendall(wire.LENGTH.pack(len(packed)) + packed)
        self._leash = leash

    async def ready(self) -> bool:
        """Waits until it answers clients; False if it has ended."""
        assert self._leash is not None
        self._leash.setblocking(False)
        return await asyncio.get_running_loop().sock_recv(self._leash, 1) == b"r"

    async def wait(self) -> str:
        """Waits for its end; gives how that was."""
        while (status := self.process.poll()) is None:
            await asyncio.sleep(_POLL)
        return f"ended with status {status}" if status >= 0 else f"was killed by {signal.Signals(-status).name}"

    def signal(self, number: signal.Signals) -> None:
        """Passes a signal on."""
        with contextlib.suppress(OSError):
            self.process.send_signal(number)

    def release(self) -> None:
        """Lets go of its leash, which ends it if it still runs."""
        if self._leash is not None:
            self._leash.close()
            self._leash = None


async def supervise(engine: dict[str, Any], settings: ServerSettings, bound: Bound, note: Note) -> int:
    """Serves with several front processes until told to end; gives the exit status.

    Raises:
        DeepInferError: it cannot be started as asked.
    """
    signals = Signals()
    config = EngineConfig.from_args(**engine)
    folder = None if SHARED in os.environ else ScratchFolder("counts")
    env = {**os.environ, **({} if folder is None else {SHARED: folder.place})}
    ledger = tempfile.TemporaryFile(prefix="deepinfer-ledger-", buffering=0)  # noqa: SIM115
    child = EngineChild(door=True)
    line = EngineLine(engine_start(config), child=child)
    fronts = [_Front(place, child, bound, ledger, env) for place in range(settings.front_processes)]
    keepers: list[asyncio.Task[None]] = []
    closing = False
    try:
        loaded = asyncio.ensure_future(line.connect())
        if not await before(loaded, signals.first):
            note("stopped before the model was loaded")
            return 0
        model: wire.Ready = loaded.result()

        def died(error: Exception) -> None:
            if not closing:
                note(f"the engine has ended, every request is answered with status 503: {error}")

        line.listen(lambda _: None, died)
        for front in fronts:
            front.start(engine, settings)
        if not await before(_all_ready(fronts), signals.first):
            return 0
        note(listening(bound, settings.served_model_name or (config.model,), model.max_model_len))
        ending = asyncio.Event()
        keepers = [asyncio.create_task(_keep(front, lambda f: f.start(engine, settings), ending, note)) for front in fronts]
        await signals.first.wait()
        ending.set()
        note(f"draining: running requests have {settings.drain_timeout:g} s to end; a second signal ends them at once")
        for front in fronts:
            front.signal(signal.SIGTERM)
        if not await before(asyncio.wait(keepers), signals.second):
            for front in fronts:
                front.signal(signal.SIGTERM)
            await asyncio.wait(keepers, timeout=15)
        return 0 if line.alive else 1
    finally:
        closing = True
        for keeper in keepers:
            keeper.cancel()
        for front in fronts:
            front.release()
        await asyncio.to_thread(line.end)
        await line.close()
        ledger.close()
        if folder is not None:
            folder.remove()


async def _all_ready(fronts: list[_Front]) -> None:
    for front, good in zip(fronts, await asyncio.gather(*(f.ready() for f in fronts)), strict=True):
        if not good:
            raise EngineDeadError(f"front process {front.place} {await front.wait()} while it was starting")


async def _keep(front: _Front, start: Callable[[_Front], None], ending: asyncio.Event, note: Note) -> None:
    """Starts a front again whenever it ends, until all are to end."""
    failures = 0
    while True:
        how = await front.wait()
        with contextlib.suppress(OSError):  # its gauges are nobody's now
            mark_process_dead(front.process.pid, front.env[SHARED])
        if ending.is_set():
            return
        failures = failures + 1 if time.monotonic() - front.started < _QUICK else 0
        delay = 0.0 if not failures else min(10.0, 0.2 * 2**failures)
        note(f"front process {front.place} {how}; another one is started" + (f" in {delay:g} s" if delay else ""))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(ending.wait(), delay)
        if ending.is_set():
            return
        start(front)
