"""A server from its start to its end.

Owns: engine, event loop, signals, draining. Never touches: requests, argparse (see `deepinfer.cli.serve`).

A first SIGTERM or Ctrl-C drains: new requests are told to come again later, running ones have `drain_timeout` seconds. A second one ends
them at once. Before the model is loaded, one is enough.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import uvicorn
from starlette.applications import Starlette

from deepinfer.engine.async_engine import AsyncLLM
from deepinfer.errors import EngineDeadError
from deepinfer.server.app import build_app
from deepinfer.server.chat.backend import make_ready
from deepinfer.server.http.access_log import set_up
from deepinfer.server.http.hosts import is_loopback
from deepinfer.server.http.listen import Bound, http_protocol, many_descriptors
from deepinfer.server.keys import read_keys
from deepinfer.server.ledger import Ledger
from deepinfer.server.settings import ServerSettings
from deepinfer.server.state import ServerState

Note = Callable[[str], None]

_POLL = 0.05
"""Seconds between two looks at what is still running."""


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: signals are this module's."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def serve(engine: dict[str, Any], settings: ServerSettings, note: Note) -> int:
    """Serves until told to end; gives the exit status.

    Args:
        engine: arguments of `AsyncLLM`.
        note: writes one line for a person.

    Raises:
        DeepInferError: the server cannot be started as asked.
    """
    if settings.api_key_file is not None:
        read_keys(settings.api_key_file)  # before minutes of loading
    bound = Bound(settings)
    warn_of_strangers(settings, note)
    try:
        many_descriptors(settings.max_connections + 256)
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            if settings.front_processes > 1:
                from deepinfer.server.fronts import supervise

                return runner.run(supervise(engine, settings, bound, note))
            return runner.run(_serve(engine, settings, bound, note))
    finally:
        bound.close()


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """What makes the event loop; ``None``: Python's own."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


class Signals:
    """SIGTERM and SIGINT as they come: ``first`` and ``second`` are set by one each."""

    def __init__(self) -> None:
        self.first, self.second = asyncio.Event(), asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._came)

    def _came(self) -> None:
        (self.second if self.first.is_set() else self.first).set()


async def _serve(engine: dict[str, Any], settings: ServerSettings, bound: Bound, note: Note) -> int:
    signals = Signals()
    llm = AsyncLLM(hang_timeout=settings.hang_timeout, **engine)
    try:
        if not await before(llm.ready(), signals.first):
            note("stopped before the model was loaded")
            return 0
        await serve_ready(
            llm, settings, bound.socket, signals, note, lambda state: note(listening(bound, state.model_names, llm.max_model_len))
        )
        return 0 if llm.is_running else 1  # who watches the server is told that it did not end well
    finally:
        await llm.aclose()


def http_server(app: Starlette, settings: ServerSettings) -> uvicorn.Server:
    """What has the connections of an application."""
    return _Server(
        uvicorn.Config(
            app,
            http=http_protocol(settings),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=max(1, round(settings.keep_alive_timeout)),
            timeout_graceful_shutdown=5,
            backlog=2048,
        )
    )


async def serve_ready(
    llm: AsyncLLM,
    settings: ServerSettings,
    listener: socket.socket,
    signals: Signals,
    note: Note,
    ready: Callable[[ServerState], None],
    ledger: Ledger | None = None,
) -> None:
    """Serves an engine that is ready, until a signal ends it; ``ready`` is called once clients are answered. ``ledger``: see
    :func:`build_app`."""
    set_up(settings.log_format, settings.access_log)
    app = build_app(llm, settings, ledger)
    state: ServerState = app.state.server
    await make_ready(state)
    server = http_server(app, settings)
    serving = asyncio.create_task(server.serve([listener]))
    while not server.started and not serving.done():
        await asyncio.sleep(0.005)
    gc.collect()
    gc.freeze()  # what is loaded stays; collections have less to look at
    ready(state)
    watching = asyncio.create_task(_watch_engine(state, note))
    told = asyncio.create_task(signals.first.wait())
    try:
        await asyncio.wait({serving, told}, return_when=asyncio.FIRST_COMPLETED)
        if told.done():
            await _drain(state, signals, note)
        server.should_exit = True
        await serving
    finally:
        for task in (watching, told):
            task.cancel()
        for close in state.closers:
            await asyncio.to_thread(close)


def warn_of_strangers(settings: ServerSettings, note: Note) -> None:
    """Says so where others than this machine's users can ask, and nobody needs a key."""
    if settings.uds is None and not is_loopback(settings.host) and not settings.api_key and settings.api_key_file is None:
        note("warning: no keys are set, so that everyone who reaches this address can use the model; see --api-key-file")


def listening(bound: Bound, names: Sequence[str], tokens: int) -> str:
    """The line that says that clients are answered."""
    return f"listening on {bound.url} (model {', '.join(names)}, {tokens} tokens)"


async def before(work: Any, event: asyncio.Event) -> bool:
    """Whether ``work`` ends before ``event`` is set; raises what it raises."""
    task, waiting = asyncio.ensure_future(work), asyncio.create_task(event.wait())
    try:
        await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            return False
        await task
        return True
    finally:
        waiting.cancel()
        if not task.done():
            task.cancel()


async def _drain(state: ServerState, signals: Signals, note: Note) -> None:
    """Takes in nothing new; returns when nothing runs any more."""
    state.draining = True
    seconds = state.settings.drain_timeout
    if state.calls:
        note(f"draining: {len(state.calls)} requests have {seconds:g} s to end; a second signal ends them at once")
    end = time.monotonic() + seconds
    while state.calls and time.monotonic() < end and not signals.second.is_set():
        await asyncio.sleep(_POLL)
    for call in list(state.calls):
        call.cancel(state.shutting_down())
    end = time.monotonic() + 2.0  # for their last words
    while state.calls and time.monotonic() < end:
        await asyncio.sleep(_POLL)


async def _watch_engine(state: ServerState, note: Note) -> None:
    """Says once that the engine has ended. The server stays, so that its callers are told so."""
    while state.alive:
        await asyncio.sleep(0.5)
    why = ""
    try:
        await state.llm.ready()
    except EngineDeadError as e:
        why = f": {e}"
    if not state.draining:
        note(f"the engine has ended, every request is answered with status 503{why}")
