"""A real `deepinfer serve` for tests to talk to, and an application in this process whose engine does what a script says."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import httpx

import api_kit
import text_kit
from cli.running import COMMAND, environment
from deepinfer.engine.async_engine import AsyncLLM, wire
from deepinfer.engine.async_engine.front import AsyncFront
from deepinfer.engine.chat_template import load_chat_template
from deepinfer.engine.config import EngineConfig
from deepinfer.engine.request import EngineRequest, SequenceDelta, Timing
from deepinfer.engine.text_side import TextSide
from deepinfer.engine.tokenizer import Tokenizer
from deepinfer.errors import EngineDeadError
from deepinfer.server.app import build_app
from deepinfer.server.http.listen import Bound
from deepinfer.server.run import http_server
from deepinfer.server.settings import ServerSettings
from deepinfer.server.state import ServerState
from process_kit import Run, event_loop, in_use

TINY = ("--dtype", "float32", "--num-kv-blocks", "64", "--block-size", "16", "--max-num-seqs", "8", "--num-threads", "1", "--quiet")
"""Engine options of the tiny model, as `api_kit.SETTINGS`."""

READY = 120.0
"""Seconds for a server to load on a machine that is busy with others."""


@dataclass
class Served:
    """A running server."""

    process: subprocess.Popen[str]
    url: str
    lines: list[str]
    """What it wrote to stderr so far."""
    reader: threading.Thread

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def client(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=60, **options)

    def get(self, path: str, **options: Any) -> httpx.Response:
        return httpx.get(self.url + path, timeout=60, **options)

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=60, **options)

    def events(self, path: str, body: Any, **options: Any) -> list[Any]:
        """Every event of a streamed answer."""
        with httpx.stream("POST", self.url + path, json=body, timeout=60, **options) as answer:
            assert answer.status_code == 200, answer.read()
            return list(read_events(answer.iter_lines()))

    def engine_pid(self) -> int:
        """The engine process under it."""
        (pid,) = (int(p) for p in children(self.process.pid) if "async_engine.process" in command_of(int(p)))
        return pid

    def end(self, number: int = signal.SIGTERM, seconds: float = 30) -> int:
        """Sends a signal; gives the exit status."""
        self.process.send_signal(number)
        code = self.process.wait(seconds)
        self.reader.join(5)
        return code


def children(pid: int) -> list[str]:
    """Ids of a process's children."""
    found: list[str] = []
    with contextlib.suppress(FileNotFoundError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(FileNotFoundError), open(f"/proc/{pid}/task/{task}/children", encoding="ascii") as file:
                found += file.read().split()
    return found


def command_of(pid: int) -> str:
    """A process's command line; empty once it has ended."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read().replace(b"\0", b" ").decode()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def read_events(lines: Iterator[str]) -> Iterator[Any]:
    """Data of server-sent events: JSON values, ``(name, value)`` of named ones; ends at the connection's end. Comments are left out."""
    name: str | None = None
    for line in lines:
        if line.startswith("event: "):
            name = line[7:]
        elif line.startswith("data: "):
            value = line[6:] if line == "data: [DONE]" else json.loads(line[6:])
            yield value if name is None else (name, value)
            name = None
        else:
            assert line == "" or line.startswith(":"), line


def start(*options: str, **env: str) -> Served:
    """Starts `deepinfer serve` with these options on a free port; it is loading when this returns."""
    process = subprocess.Popen(
        [*COMMAND, "serve", "--port", "0", *options],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(**env),
    )
    lines: list[str] = []

    def read() -> None:
        assert process.stderr is not None
        for line in process.stderr:
            lines.append(line.rstrip("\n"))

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    return Served(process, "", lines, reader)


def wait_ready(served: Served) -> Served:
    """Waits until it says where it listens."""
    end = threading.Event()
    for _ in range(int(READY / 0.02)):
        for line in served.lines:
            if found := re.match(r"listening on (\S+)", line):
                served.url = found[1]
                return served
        if served.process.poll() is not None:
            served.reader.join(5)
            raise AssertionError(f"the server ended with status {served.process.returncode}: {served.lines}")
        end.wait(0.02)
    raise AssertionError(f"not ready: {served.lines}")


@contextmanager
def serving(model: str | None = None, *options: str, **env: str) -> Iterator[Served]:
    """A server of a tiny random model, or of ``model`` with ``options`` alone."""
    chosen = (api_kit.tiny_model(), *TINY) if model is None else (model, "--quiet")
    served = start(*chosen, *options, **env)
    try:
        yield wait_ready(served)
    finally:
        if served.process.poll() is None:
            served.process.send_signal(signal.SIGTERM)
            try:
                served.process.wait(30)
            except subprocess.TimeoutExpired:
                served.process.kill()
                served.process.wait(10)
                raise
        served.reader.join(5)


@dataclass
class Local:
    """A server in this process, on a real engine process, whose inside a test can look at; ``run`` runs a coroutine in its loop."""

    llm: AsyncLLM
    state: ServerState
    port: int
    run: Run[Any]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def held(self) -> int:
        """Blocks and slots that somebody holds."""
        return in_use(self.run(self.llm.core_counts()))

    def at_rest(self, seconds: float = 10) -> None:
        """Waits until nobody is served and the engine holds nothing."""
        end = time.monotonic() + seconds
        while self.state.calls or self.llm._boxes or self.state.admission.answers or self.held():
            assert time.monotonic() < end, (self.state.calls, self.llm, self.run(self.llm.core_counts()))
            time.sleep(0.01)


@contextmanager
def local(settings: ServerSettings | None = None, **engine: Any) -> Iterator[Local]:
    """Serves a tiny random model out of this process."""
    chosen = settings or ServerSettings(served_model_name=("tiny",), port=0)
    bound = Bound(chosen)
    with event_loop(READY) as run:

        async def begin() -> tuple[AsyncLLM, ServerState, Any, asyncio.Task[None]]:
            llm = AsyncLLM(api_kit.tiny_model(), **{**api_kit.SETTINGS, **engine})
            await llm.ready()
            app = build_app(llm, chosen)
            server = http_server(app, chosen)
            serving = asyncio.create_task(server.serve([bound.socket]))
            while not server.started:
                await asyncio.sleep(0.005)
            return llm, app.state.server, server, serving

        async def end() -> None:
            server.should_exit = True
            await serving
            await llm.aclose()

        llm, state, server, serving = run(begin())
        try:
            yield Local(llm, state, bound.socket.getsockname()[1], run)
        finally:
            run(end())
            bound.close()


class ScriptedFront(AsyncFront):
    """An engine front without an engine: a test says what comes when.

    ``submitted``: requests that reached the engine; ``cancelled``: ids that nobody wants any more; ``on_submit``: called with each.
    """

    def __init__(self, *, max_model_len: int = 512, max_num_seqs: int = 8, tokenizer: Tokenizer | None = None, **text: Any) -> None:
        super().__init__()
        tokenizer = tokenizer or text_kit.byte_level(320)
        self.config = EngineConfig(model="scripted")
        self._text = TextSide(
            tokenizer, load_chat_template(None, tokenizer), **{"eos_ids": (2,), "generation_config": {}, "seed": 0, **text}
        )
        self._ready_message = wire.Ready(max_model_len, tokenizer.vocab_size, max_num_seqs)
        self.submitted: dict[str, EngineRequest] = {}
        self.cancelled: list[str] = []
        self.stopped: list[tuple[str, int, int]] = []
        self.counted: dict[str, Any] = {}
        self.on_submit: Callable[[EngineRequest], None] | None = None

    @property
    def is_running(self) -> bool:
        return self._dead is None

    async def _connect(self) -> wire.Ready:
        return self._ready_message

    def _submit(self, request: EngineRequest) -> None:
        self.submitted[request.request_id] = request
        if self.on_submit is not None:
            self.on_submit(request)

    def _cancel(self, request_id: str) -> None:
        self.cancelled.append(request_id)

    def _stop_at(self, request_id: str, index: int, num_tokens: int) -> None:
        self.stopped.append((request_id, index, num_tokens))

    @property
    def engines(self) -> tuple[str, ...]:
        """Names that a test has put into ``counted``."""
        return tuple(self.counted)

    async def measure(self, engine: str) -> Any:
        """What it has put there."""
        return self.counted[engine]

    async def _shelve(self, grammar: Any) -> None:
        pass

    async def _drain(self) -> None:
        pass

    def _end_processes(self) -> None:
        pass

    async def _close_lines(self) -> None:
        pass

    # What a script says

    def feed(self, request_id: str, tokens: Sequence[int], finish: str | None = None, index: int = 0, **more: Any) -> None:
        """News of one answer."""
        self._take([SequenceDelta(request_id, index, list(tokens), finish, timing=Timing(1.0, 2.0, 3.0, 4.0), **more)])  # type: ignore[arg-type]

    def ids(self, text: str) -> list[int]:
        """Ids of a text."""
        return self._text.tokenizer.encode(text, add_special_tokens=False)  # type: ignore[union-attr]

    def die(self) -> None:
        """The engine ends."""
        self._die(EngineDeadError("the engine process was killed by SIGKILL"))

    async def only(self) -> str:
        """Waits for the one request that is with the engine; gives its id."""
        while len(self.submitted) != 1:
            await asyncio.sleep(0)
        return next(iter(self.submitted))


@dataclass
class Exchange:
    """One request to an application in this process. The client reads when it says so, and leaves when it likes."""

    task: asyncio.Task[None]
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    ended: bool = False
    left: asyncio.Event = field(default_factory=asyncio.Event)
    reading: asyncio.Event = field(default_factory=asyncio.Event)
    news: asyncio.Event = field(default_factory=asyncio.Event)

    def json(self) -> Any:
        return json.loads(self.body)

    def events(self) -> list[Any]:
        """Events so far."""
        return list(read_events(iter(self.body.decode().split("\n"))))

    async def done(self) -> Exchange:
        """Waits for the end of the answer."""
        await asyncio.wait_for(asyncio.shield(self.task), 20)
        return self

    async def until(self, said: bytes) -> None:
        """Waits until the body has these bytes."""

        async def wait() -> None:
            while said not in self.body:
                self.news.clear()
                await self.news.wait()

        await asyncio.wait_for(wait(), 20)

    def leave(self) -> None:
        """The client goes away."""
        self.left.set()


class App:
    """An application on a scripted front."""

    def __init__(self, front: ScriptedFront, settings: ServerSettings) -> None:
        self.front = front
        self.app = build_app(front, settings)  # type: ignore[arg-type]
        self.state: ServerState = self.app.state.server

    def send(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        headers: Mapping[str, str] | None = None,
        chunks: Sequence[bytes] | None = None,
        complete: bool = True,
        reading: bool = True,
    ) -> Exchange:
        """Sends a request.

        ``chunks``: its body as it comes, instead of JSON; ``complete``: whether that is all of it; ``reading``: whether the client reads
        the answer at once.
        """
        parts = [json.dumps(body).encode() if body is not None else b""] if chunks is None else list(chunks)
        pending = [{"type": "http.request", "body": part, "more_body": i + 1 < len(parts) or not complete} for i, part in enumerate(parts)]
        raw = [(k.lower().encode(), v.encode()) for k, v in {"content-type": "application/json", **(headers or {})}.items()]
        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "scheme": "http", "path": path,
            "raw_path": path.encode(), "query_string": b"", "root_path": "", "headers": raw, "client": ("test", 1), "server": ("test", 80),
        }  # fmt: skip

        async def receive() -> Any:
            if pending:
                return pending.pop(0)
            await exchange.left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            await exchange.reading.wait()
            if exchange.left.is_set():
                return
            if message["type"] == "http.response.start":
                exchange.status = message["status"]
                exchange.headers = {k.decode(): v.decode() for k, v in message["headers"]}
            else:
                exchange.body += message.get("body", b"")
                exchange.ended = not message.get("more_body", False)
            exchange.news.set()

        async def run() -> None:
            await self.app(scope, receive, send)

        exchange = Exchange(asyncio.ensure_future(run()))
        if reading:
            exchange.reading.set()
        return exchange


@contextlib.asynccontextmanager
async def scripted(settings: ServerSettings | None = None, **front: Any) -> AsyncIterator[App]:
    """An application whose engine does what the test says."""
    made = ScriptedFront(**front)
    await made.ready()
    app = App(made, settings or ServerSettings(served_model_name=("m",)))
    yield app
    assert not app.state.calls
    assert app.state.admission.answers == app.state.admission.tokens == 0
    assert not made._boxes
    await made.aclose()


def in_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Runs a test in an event loop of its own."""

    @wraps(test)
    def run(*args: Any, **values: Any) -> None:
        asyncio.run(asyncio.wait_for(test(*args, **values), 30))

    return run
