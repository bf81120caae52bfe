"""The engine's process: one thread that reads commands, steps, and sends what there is to tell.

Owns: the loop, and ending with its parent. Never touches: text. Started by `client` as
``python -m deepinfer.engine.async_engine.process SOCKET_FD LIFELINE_FD PARENT_PID [DOOR_FD]``, where PARENT_PID is 0 if the
kernel is not to end this process with the thread that started it, and further fronts come through the door.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import queue
import select
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from deepinfer.engine.async_engine import wire
from deepinfer.engine.async_engine.connections import Connection, Connections
from deepinfer.errors import DeepInferError, ErrorData, RankGroupError
from deepinfer.structured.matcher import SHELF

if TYPE_CHECKING:
    from deepinfer.engine.request import EngineLike

_PR_SET_PDEATHSIG = 1


def follow_parent(lifeline: int, parent: int) -> None:
    """Ends this process when the parent does, whatever this one is doing.

    A thread waits for the end of a pipe that only the parent holds open: it is blocked in the system call, so it never
    competes with the step loop. On Linux the kernel also sends SIGKILL, which works even while another child of the parent
    holds a copy of the pipe; it does so when the *thread* that started us ends, so ``parent`` is 0 unless that was the main one.
    """

    def wait() -> None:
        while os.read(lifeline, 1):
            pass
        os._exit(1)

    threading.Thread(target=wait, name="parent-lifeline", daemon=True).start()
    if sys.platform == "linux" and parent:
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it died before the kernel was told
            os._exit(1)


class EngineLoop:
    """Commands in, steps, news out, over sockets that never block a step."""

    def __init__(self, sock: socket.socket, door: socket.socket | None = None) -> None:
        self.beat = 1.0
        self.fronts = Connections(sock, door)
        self._commands: deque[tuple[Connection, Any]] = deque()
        self._open = True
        self._beside = _Beside()
        self._asked = 0  # questions that the engine has not answered yet

    def stop(self, *_: object) -> None:
        """Ends the loop after the step in work; also the SIGTERM handler."""
        self._open = False

    def is_left(self) -> bool:
        """Whether the front has gone or told the process to end."""
        self._read()
        return not self._open

    def first(self) -> Any:
        """Waits for the first message; ``None`` if the front has gone."""
        while self._open and not self._commands:
            self._wait()
        return self._commands.popleft()[1] if self._commands else None

    def run(self, engine: EngineLike) -> None:
        """Serves until told to close or the front has gone."""
        told = time.monotonic()
        while self._open:
            self._read()
            for front, message in self._beside.done():
                front.send(message)
            while self._commands and self._open:
                front, command = self._commands.popleft()
                self._obey(engine, command, front)
            for request_id in self.fronts.leave():
                engine.abort(request_id)
            if not self._open:
                break
            if engine.has_unfinished():
                deltas = engine.step()
                if deltas:
                    self.fronts.tell(deltas)
                elif (rest := engine.rest()) is not None:
                    self._wait(rest[0], min(rest[1], self.beat))
                if (now := time.monotonic()) - told >= self.beat:
                    told = now
                    self.fronts.broadcast(wire.Beat())
                self.fronts.flush()
            else:
                tend = getattr(engine, "tend", None)  # of an engine that keeps something beyond itself
                fd, seconds = (tend() if tend is not None else None) or (None, 1.0)
                if self._beside.busy or self._asked:
                    seconds = min(seconds, self.beat)
                    self.fronts.broadcast(wire.Beat())
                self._wait(fd, seconds)

    def _obey(self, engine: EngineLike, command: Any, front: Connection | None = None) -> None:
        front = front or self.fronts.parent
        match command:
            case wire.Add() as added:
                try:
                    engine.add_request(added.opened())
                    self.fronts.own(front, added.request.request_id, added.request.params.n)
                except Exception as e:
                    front.send(wire.Rejected(added.request.request_id, ErrorData.of(e)))
            case wire.TakeOver(request_id, record, grammar):
                try:
                    engine.take_over(record, wire.open_grammar(grammar))
                except Exception as e:
                    front.send(wire.Rejected(request_id, ErrorData.of(e)))
            case wire.Learn(vocabulary):
                SHELF.expect(vocabulary.fingerprint)
                self._beside.do(front, lambda: SHELF.learn(vocabulary))
                if (learn := getattr(engine, "learn", None)) is not None:  # of an engine whose matchers are in other processes
                    learn(vocabulary)
            case wire.Warm() as warm:
                self._beside.do(front, lambda: _answer(warm, lambda: SHELF.warm(warm.grammar)))
            case wire.Abort(request_id):
                self.fronts.over(request_id)
                engine.abort(request_id)
            case wire.StopAt(request_id, index, num_tokens):
                engine.stop_at(request_id, index, num_tokens)
            case wire.Logits() | wire.Count() | wire.Measure():
                self._ask(engine, command, front)
            case wire.Wake():
                engine.wake()
            case wire.Close():
                self.stop()

    def _ask(self, engine: EngineLike, question: wire.Question, front: Connection) -> None:
        ask = getattr(engine, "ask", None)  # of an engine whose answers come from other processes, while this loop goes on
        if ask is None:
            front.send(_answer(question, lambda: _found(engine, question)))
            return

        def answered(answer: wire.Answer) -> None:
            self._asked -= 1
            front.send(answer)

        self._asked += 1
        ask(question, answered)

    def send(self, message: Any) -> None:
        """Tells every front."""
        self.fronts.broadcast(message)

    def _read(self) -> None:
        self._commands.extend(self.fronts.read())
        if not self.fronts.parent.open:
            self._open = False

    def _wait(self, wake_fd: int | None = None, seconds: float = 1.0) -> None:
        """Sleeps until there is something to read (here or on ``wake_fd``), or room for what is unsent, but no longer than so."""
        readable = [*self.fronts.readable(), self._beside.fd, *([] if wake_fd is None else [wake_fd])]
        select.select(readable, self.fronts.unsent(), [], seconds)
        self.fronts.flush()
        self._read()


def _answer(question: wire.Question | wire.Warm, find: Callable[[], Any]) -> wire.Answer:
    """What ``find`` gives, or raises: whatever it is, also what cannot be sent, only who asked is told."""
    try:
        answer = wire.Answer(question.call, find())
        wire.pack(answer)
        return answer
    except Exception as e:
        return wire.Answer(question.call, error=ErrorData.of(e))


def _found(engine: EngineLike, question: wire.Question) -> Any:
    match question:
        case wire.Logits():
            return engine.logits(question.token_ids)
        case wire.Count():
            return engine.core_counts()
        case wire.Measure():
            return engine.metrics()


class _Beside:
    """What takes longer than a step may wait, done in order on a thread of its own, which the first of it starts."""

    def __init__(self) -> None:
        self.fd, self._bell = os.pipe()
        self._todo: queue.SimpleQueue[tuple[Connection, Callable[[], Any]]] = queue.SimpleQueue()
        self._done: deque[tuple[Connection, Any]] = deque()
        self._thread: threading.Thread | None = None
        self._left = 0

    @property
    def busy(self) -> bool:
        """Whether something is not done yet."""
        return self._left > 0

    def do(self, front: Connection, work: Callable[[], Any]) -> None:
        """Queues work; what it gives is a message for ``front``, or ``None``."""
        self._left += 1
        self._todo.put((front, work))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="beside-steps", daemon=True)
            self._thread.start()

    def done(self) -> list[tuple[Connection, Any]]:
        """Messages of what has been done since, and whom they are for."""
        if not self._left:
            return []
        messages = []
        while self._done:
            os.read(self.fd, 1)
            self._left -= 1
            messages.append(self._done.popleft())
        return [(front, m) for front, m in messages if m is not None]

    def _run(self) -> None:
        while True:
            front, work = self._todo.get()
            message = None
            with contextlib.suppress(Exception):  # a vocabulary that cannot be read: who needs it says so
                message = work()
            self._done.append((front, message))
            os.write(self._bell, b"b")


def build(start: wire.Start) -> EngineLike:
    """The engine that a front asked for."""
    if start.models:
        from deepinfer.models import register_model

        for architecture, target in start.models.items():
            register_model(architecture, target)
    module, _, name = start.factory.partition(":")
    engine: EngineLike = getattr(importlib.import_module(module), name)(start.config)
    return engine


def serve(sock: socket.socket, door: socket.socket | None = None) -> int:
    """Builds the engine and serves; gives the exit status."""
    loop = EngineLoop(sock, door)
    # The terminal's Ctrl-C is the front's to handle; it aborts requests or closes us.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    start = loop.first()
    if start is None:
        return 0
    engine: EngineLike | None = None
    loop.beat = start.beat
    try:
        engine = build(start)
        signal.signal(signal.SIGTERM, loop.stop)  # until here it ends us at once
        images, plan = getattr(engine, "images", None), getattr(engine, "plan", None)
        sizes = (engine.max_model_len, engine.vocab_size, getattr(engine, "max_num_seqs", 0))
        loop.fronts.ready = wire.Ready(*sizes, images, 0 if plan is None else plan.tokens)
        loop.send(loop.fronts.ready)
        loop.run(engine)
        return 0
    except BaseException as e:
        if engine is not None and loop.is_left():
            return 0  # the ranks of a group do not end in one moment, and whoever started them wants nothing any more
        loop.send(wire.Died(ErrorData.of(e)))
        if engine is not None and not _is_named(e):
            raise  # a fault in a running engine: the trace belongs on stderr
        return 1
    finally:
        loop.fronts.drain()
        if engine is not None:
            with contextlib.suppress(Exception):
                engine.close()


def _is_named(error: BaseException | None) -> bool:
    """Whether nothing but errors with a name of their own led to this one, such as the end of a rank's process: whoever is told of it
    knows all there is, and a trace of this process would add nothing."""
    while isinstance(error, DeepInferError) and not isinstance(error, RankGroupError):  # what that is made of is another process's end
        error = error.__cause__
    return error is None or isinstance(error, RankGroupError)


def main(arguments: list[str]) -> int:
    """Entry point; ``arguments`` are the numbers named at the head of this file."""
    fd, lifeline, parent, *door = map(int, arguments)
    follow_parent(lifeline, parent)
    return serve(socket.socket(fileno=fd), socket.socket(fileno=door[0]) if door else None)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
