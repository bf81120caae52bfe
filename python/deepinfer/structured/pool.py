"""The processes that compile, seen from outside: a queue in front of them, and a limit on the time of each compilation.

Owns: starting, killing and replacing `compile_process`es, and what a caller is told when one ends. Never touches: caches, matchers.

A thread for each process waits for its answer, for the limit, or to be told that nobody wants it any more; the process is killed in the
last two cases, and another one takes its place at once.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

from deepinfer.errors import DeepInferError, EngineDeadError, ErrorData, GrammarBusyError, GrammarError, GrammarTimeoutError
from deepinfer.structured import bindings
from deepinfer.structured.compile_process import receive, send
from deepinfer.structured.compiler import Compiled
from deepinfer.structured.vocabulary import Vocabulary

MEMORY = 4 << 30
MOST_RESULT = 32 << 20
"""Bytes of a compiled grammar: engines read it, and keep it as long as an answer runs."""
_START_SECONDS = 120.0
_FROM_OUTSIDE = ("SIGKILL", "SIGTERM")
"""What a process dies of that somebody else ended, such as a system without memory, perhaps while it had nothing to do."""


def worker_count(wanted: int) -> int:
    """Processes to use: as many as wanted, but one core is left to everybody else."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(wanted, cores - 1))


class Task:
    """One compilation on its way. ``future`` gives a :class:`Compiled`, or raises GrammarError; ``begun``: a process works on it."""

    def __init__(self, kind: str, source: str, options: Mapping[str, Any]) -> None:
        self.kind, self.source, self.options = kind, source, dict(options)
        self.future: Future[Compiled] = Future()
        self.cancelled = self.begun = False
        self.worker: _Worker | None = None


class _KilledError(Exception):
    """A process was ended from outside, so many seconds ``after`` it was given a task: once, that is not the task's fault."""

    def __init__(self, how: str, after: float) -> None:
        super().__init__(how)
        self.how, self.after = how, after


class _Shared:
    """What the threads know; they do not keep the pool alive."""

    def __init__(self, vocabulary: Vocabulary, seconds: float, memory: int) -> None:
        self.vocabulary = pickle.dumps(vocabulary, protocol=pickle.HIGHEST_PROTOCOL)
        self.seconds, self.memory = seconds, memory
        self.queue: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self.lock = threading.RLock()  # a pool that nobody closed is closed when it is collected, on whatever thread that happens
        self.workers: list[_Worker] = []
        self.waiting = 0  # tasks that no thread has taken
        self.idle = 0
        self.closed = False
        self.pid = os.getpid()
        self.started = 0
        self.killed = 0


class CompilerPool:
    """Compiles grammars of one vocabulary in processes of their own, which start with the first compilations.

    Args:
        vocabulary: of the model.
        workers: most processes, see :func:`worker_count`.
        seconds: that a compilation may take.
        memory: bytes that one may take beyond those a process needs to begin.
    """

    def __init__(self, vocabulary: Vocabulary, workers: int, seconds: float, memory: int = MEMORY) -> None:
        bindings.check_available()
        self._workers = workers
        self._shared = _Shared(vocabulary, seconds, memory)
        self._end = weakref.finalize(self, _close, self._shared)

    def submit(self, kind: str, source: str, options: Mapping[str, Any]) -> Task:
        """Queues a compilation."""
        s, task = self._shared, Task(kind, source, options)
        with s.lock:
            if s.closed or os.getpid() != s.pid:
                task.future.set_exception(EngineDeadError("grammars are compiled no more: what they are for is closed"))
                return task
            s.waiting += 1
            if s.waiting > s.idle and len(s.workers) < self._workers:
                s.workers.append(_Worker(s))
        s.queue.put(task)
        return task

    def cancel(self, task: Task) -> None:
        """Nobody wants a compilation any more: it is taken out of the queue, or its process killed."""
        with self._shared.lock:
            task.cancelled = True
            if task.worker is not None:
                task.worker.wake()

    def pids(self) -> list[int]:
        """Ids of the processes that run now."""
        with self._shared.lock:
            return [w.process.pid for w in self._shared.workers if w.process is not None and w.process.poll() is None]

    def counts(self) -> dict[str, int]:
        """``workers`` that may run now, ``queued`` compilations, and since the beginning processes ``started`` and ``killed``."""
        s = self._shared
        with s.lock:
            return {"workers": len(s.workers), "queued": s.waiting, "started": s.started, "killed": s.killed}

    def close(self) -> None:
        """Kills the processes and fails what waits; idempotent."""
        self._end()


def _close(s: _Shared) -> None:
    if os.getpid() != s.pid:
        return
    with s.lock:
        s.closed = True
        workers = list(s.workers)
        for worker in workers:
            s.queue.put(None)
            worker.wake()
    for worker in workers:
        if worker.thread is not threading.current_thread():
            worker.thread.join(10.0)


class _Worker:
    """A thread and its process."""

    def __init__(self, shared: _Shared) -> None:
        self._shared = shared
        self.process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._lifeline = -1
        self._ready = False
        self._wake_read, self._wake_write = os.pipe()
        self.thread = threading.Thread(target=self._loop, name="grammar-compiler", daemon=True)
        self.thread.start()

    def wake(self) -> None:
        """Has the thread look at what has changed; the pool's lock is held."""
        if self._wake_write >= 0:
            os.write(self._wake_write, b"w")

    def _loop(self) -> None:
        s = self._shared
        try:
            while True:
                with s.lock:
                    s.idle += 1
                task = s.queue.get()
                with s.lock:
                    s.idle -= 1
                    if task is None:
                        break
                    s.waiting -= 1
                    task.worker = None if task.cancelled or s.closed else self
                if task.worker is None:
                    task.future.set_exception(GrammarError("the compilation was cancelled"))
                    continue
                try:
                    made = self._run(task)
                except BaseException as e:
                    failure: BaseException | None = e
                else:
                    failure = None
                with s.lock:
                    task.worker = None
                    while select.select([self._wake_read], [], [], 0)[0]:
                        os.read(self._wake_read, 64)
                if failure is None:
                    task.future.set_result(made)
                else:
                    task.future.set_exception(failure)
                del task
                if self.process is None and not s.closed:
                    with contextlib.suppress(Exception):  # the next task says why
                        self._start()
        finally:
            self._kill()
            with s.lock:
                os.close(self._wake_read)
                os.close(self._wake_write)
                self._wake_write = -1

    def _run(self, task: Task) -> Compiled:
        try:
            return self._try(task, self._shared.seconds)
        except _KilledError as e:
            left = self._shared.seconds - e.after
            task.begun = False
        try:
            return self._try(task, max(1.0, left))
        except _KilledError as e:
            raise GrammarTimeoutError(_ended_by(e.how)) from None

    def _try(self, task: Task, seconds: float) -> Compiled:
        s = self._shared
        if self.process is None or self.process.poll() is not None:
            self._kill()
            self._start()
        self._await_ready(task)
        task.begun = True
        start, worked = time.monotonic(), self._worked()
        message = None
        with contextlib.suppress(OSError):  # a process that has ended meanwhile: said below
            assert self._socket is not None
            send(self._socket, {"kind": task.kind, "options": task.options}, task.source.encode())
            message = self._answer(task, start + seconds, lambda: _late(s.seconds, self._worked() - worked))
        if message is None:
            how = self._how_it_ended()
            if how in _FROM_OUTSIDE:
                raise _KilledError(how, time.monotonic() - start)
            raise GrammarTimeoutError(_ended_by(how))
        said, data = message
        if "error" in said:
            error = ErrorData(**said["error"]).exception()
            if isinstance(error, GrammarTimeoutError):
                self._kill()
            raise error
        return Compiled(data, tuple(said["reports"]), time.monotonic() - start)

    def _await_ready(self, task: Task) -> None:
        if self._ready:
            return
        late = GrammarBusyError(
            f"no process that compiles grammars started within {_START_SECONDS:g} s, since this machine is busy; try again"
        )
        message = self._answer(task, time.monotonic() + _START_SECONDS, lambda: late)
        if message is None:
            how = self._how_it_ended()
            if how in _FROM_OUTSIDE:
                raise GrammarBusyError(f"the process that compiles grammars was ended while it started ({how}); try again")
            raise EngineDeadError(f"the process that compiles grammars ended at its start ({how})")
        if "error" in message[0]:
            self._kill()
            raise ErrorData(**message[0]["error"]).told_by("the process that compiles grammars cannot start").exception()
        self._ready = True

    def _answer(self, task: Task, deadline: float, late: Callable[[], DeepInferError]) -> tuple[dict[str, Any], bytes] | None:
        """The process's next message; ``None`` if it has ended. Kills it when the time is up, or the task that it works on is cancelled."""
        assert self._socket is not None
        while True:
            both: list[Any] = [self._socket, self._wake_read]
            ready = select.select(both, [], [], max(0.0, deadline - time.monotonic()))[0]
            if self._wake_read in ready:
                os.read(self._wake_read, 64)
                if task.cancelled or self._shared.closed:
                    if task.begun:  # a process that starts is of use for the next one
                        self._kill()
                    raise GrammarError("the compilation was cancelled")
            if self._socket in ready:
                self._socket.settimeout(max(1.0, deadline - time.monotonic()))
                try:
                    return receive(self._socket, MOST_RESULT)
                except OverflowError as e:
                    self._kill()
                    raise GrammarTimeoutError(f"compiled it has {e} bytes, above {MOST_RESULT}; make it smaller") from None
                except TimeoutError:
                    pass
                except ConnectionError:  # it ended with something unread
                    return None
            if time.monotonic() >= deadline:
                error = late()
                self._kill()
                raise error

    # The process

    def _worked(self) -> float:
        """Seconds of processor time that the process has had; 0 where the system does not say."""
        with contextlib.suppress(OSError, AttributeError, IndexError, ValueError):
            assert self.process is not None
            with open(f"/proc/{self.process.pid}/stat", encoding="ascii") as f:
                cells = f.read().rsplit(")", 1)[1].split()
            return (int(cells[11]) + int(cells[12])) / os.sysconf("SC_CLK_TCK")
        return 0.0

    def _start(self) -> None:
        s = self._shared
        self._socket, theirs = socket.socketpair()
        lifeline, self._lifeline = os.pipe()
        numbers = (theirs.fileno(), lifeline, 0, s.memory, s.seconds)
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "deepinfer.structured.compile_process", *map(str, numbers)],
                pass_fds=numbers[:2],
                stdin=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # what the native code says there is collected, see `compiler`
                start_new_session=True,  # the terminal's Ctrl-C is the parent's to handle; see also `compile_process.be_nice`
                env={**os.environ, "PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path), "OMP_NUM_THREADS": "1"},
            )
        except BaseException:
            self._kill()
            raise
        finally:
            theirs.close()
            os.close(lifeline)
        with s.lock:
            s.started += 1
        with contextlib.suppress(OSError):
            send(self._socket, {}, s.vocabulary)

    def _kill(self) -> None:
        """Ends the process for certain."""
        process, self.process, self._ready = self.process, None, False
        if process is not None:
            if process.poll() is None:
                process.kill()
                with self._shared.lock:
                    self._shared.killed += 1
            process.wait()
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1

    def _how_it_ended(self) -> str:
        process = self.process
        status = None
        if process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = process.wait(5.0)
        self._kill()
        if status is None:
            return "it closed its connection"
        if status >= 0:
            return f"status {status}"
        with contextlib.suppress(ValueError):
            return signal.Signals(-status).name
        return f"signal {-status}"


def _ended_by(how: str) -> str:
    return f"compiling it ended its process ({how}); make it smaller or less nested"


def _late(seconds: float, worked: float) -> GrammarTimeoutError:
    """What is said when a compilation has had its time. One whose process waited for a processor more than it ran may be a good one."""
    if sys.platform == "linux" and worked < seconds / 2:
        return GrammarBusyError(
            f"compiling it got {worked:.1f} s of a processor in {seconds:g} s, since this machine is busy; "
            "try again later, raise grammar_timeout, or make it smaller"
        )
    return GrammarTimeoutError(f"compiling it takes more than {seconds:g} s; make it smaller or less nested")
