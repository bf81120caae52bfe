"""The front's hold on the engine process.

Owns: starting it, ending it for certain, and saying how it ended. Never touches: messages, requests.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import socket
import subprocess
import sys
import threading
import weakref

_F_SETSIG = 10


class EngineChild:
    """A started engine process and the front's end of its socket.

    The process does not outlive this object, nor the interpreter, nor a killed front (see `process.follow_parent`). It is a
    new interpreter, not a fork, and does not import the caller's main module, so scripts need no guard against that.
    """

    def __init__(self, *, door: bool = False) -> None:
        self.socket, theirs = socket.socketpair()
        self._door: socket.socket | None = None
        inside: socket.socket | None = None
        if door:
            self._door, inside = socket.socketpair()
        self._parent = os.getpid()
        lifeline, ours = os.pipe()
        # The kernel's signal follows the thread that starts a process; only the main thread is known to last.
        parent = os.getpid() if threading.current_thread() is threading.main_thread() else 0
        doors = [] if inside is None else [inside.fileno()]
        numbers = [theirs.fileno(), lifeline, parent, *doors]
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "deepinfer.engine.async_engine.process", *map(str, numbers)],
                pass_fds=[theirs.fileno(), lifeline, *doors],
                stdin=subprocess.DEVNULL,
                process_group=0,  # the terminal's Ctrl-C is the front's to handle
                env={**os.environ, "PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path)},
            )
            _tie(lifeline, self.process.pid)
        except BaseException:
            self.socket.close()
            os.close(ours)
            raise
        finally:
            theirs.close()
            os.close(lifeline)
            if inside is not None:
                inside.close()
        self._end = weakref.finalize(self, _end, self.process, self.socket, ours, self._parent)

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self.process.poll() is None

    def introduce(self) -> socket.socket:
        """A connection for a further front, made with ``door=True``; the engine has the other end."""
        assert self._door is not None
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self._door, [b"f"], [theirs.fileno()])
        return ours

    @property
    def pid(self) -> int:
        """Process id."""
        return self.process.pid

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        """Sends the process a signal that ends it, without waiting."""
        if os.getpid() == self._parent:
            self.process.send_signal(number)

    def give_up(self) -> None:
        """Nobody here can follow it any more."""
        self.kill()

    def hang_up(self) -> None:
        """Tells the process to end after the step in work."""
        if os.getpid() != self._parent:
            return  # a fork shares the connection, which is not its to end
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_WR)

    def wait(self, seconds: float) -> bool:
        """Whether the process ends within so many seconds."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(max(0.0, seconds))
            return True
        return False

    def end(self, seconds: float = 5.0) -> None:
        """Waits for the process to end by itself, then makes it end; idempotent. Call :meth:`hang_up` first."""
        if os.getpid() != self._parent:
            return
        self.wait(seconds)
        self._end()

    def how_it_ended(self, seconds: float = 0.5) -> str:
        """In words, for an error message."""
        try:
            status = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return "closed its connection"
        if status >= 0:
            return f"ended with status {status}"
        with contextlib.suppress(ValueError):
            return f"was killed by {signal.Signals(-status).name}"
        return f"was killed by signal {-status}"


class SharedEngine:
    """An engine process that another process has started, and the socket of one front to it."""

    def __init__(self, sock: socket.socket, pid: int) -> None:
        self.socket = sock
        self.pid = pid
        self._open = True

    @property
    def alive(self) -> bool:
        """Whether the process runs: it does as long as this front's connection is good, which is noticed at once."""
        if not self._open:
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            pass
        return True

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        """Ends it for everyone: it hangs."""
        with contextlib.suppress(OSError):
            os.kill(self.pid, number)

    def give_up(self) -> None:
        """This front cannot follow it any more; others may."""
        self.hang_up()

    def hang_up(self) -> None:
        """Leaves it, which ends this front's requests."""
        self._open = False
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def end(self, seconds: float = 5.0) -> None:
        """Leaves it."""
        self.hang_up()
        self.socket.close()

    def how_it_ended(self, seconds: float = 0.5) -> str:
        """In words, for an error message."""
        return "closed its connection" if self.alive else "has ended"


def _tie(lifeline: int, pid: int) -> None:
    """Has the kernel kill a process when nobody holds the other end of its lifeline any more. It looks itself, too, but not before it has
    imported what it needs, which takes seconds."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            fcntl.fcntl(lifeline, fcntl.F_SETOWN, pid)
            fcntl.fcntl(lifeline, _F_SETSIG, signal.SIGKILL)
            fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)


def _end(process: subprocess.Popen[bytes], sock: socket.socket, lifeline: int, parent: int) -> None:
    if os.getpid() != parent:
        return
    sock.close()
    os.close(lifeline)
    for end in (process.terminate, process.kill):
        if process.poll() is not None:
            return
        end()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(2.0)
