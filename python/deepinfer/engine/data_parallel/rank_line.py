"""One rank's process as the thread that spreads requests sees it.

Owns: the conversation over its socket, which never blocks, and how the process ended. Never touches: which rank gets what.
"""

from __future__ import annotations

import contextlib
import subprocess
from collections import deque
from typing import Any

from deepinfer.engine.async_engine import wire
from deepinfer.engine.async_engine.child import EngineChild
from deepinfer.errors import EngineDeadError


class RankLine:
    """A started rank process.

    Args:
        name: what messages call it.
        start: what it is to build.
    """

    def __init__(self, name: str, start: wire.Start) -> None:
        self.name = name
        self.child = EngineChild()
        self.child.socket.setblocking(False)
        self._unsent: deque[memoryview] = deque()
        self._unpacker = wire.Unpacker()
        self.send(start)

    def fileno(self) -> int:
        """Its end of the socket."""
        return self.child.socket.fileno()

    @property
    def lags(self) -> bool:
        """Whether something could not be sent yet."""
        return bool(self._unsent)

    def was_killed(self, seconds: float) -> bool:
        """Whether the process is ended by a signal within so many seconds."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.child.process.wait(seconds) < 0
        return False

    def send(self, message: Any) -> None:
        """Sends what the socket takes now; the rest with the next :meth:`flush`."""
        self._unsent.append(memoryview(wire.pack(message)))
        self.flush()

    def flush(self) -> None:
        """Sends on. A process that has ended is noticed when it is read from."""
        with contextlib.suppress(OSError):  # BlockingIOError among them
            while self._unsent:
                sent = self.child.socket.send(self._unsent[0])
                if sent < len(self._unsent[0]):
                    self._unsent[0] = self._unsent[0][sent:]
                else:
                    self._unsent.popleft()

    def receive(self) -> list[Any]:
        """Messages that have come.

        Raises:
            EngineDeadError, or what it failed with: the process has ended.
        """
        found: list[Any] = []
        ended = False
        try:
            while data := self.child.socket.recv(1 << 18):
                found += self._unpacker.feed(data)
            ended = True
        except BlockingIOError:
            pass
        except OSError:
            ended = True
        for message in found:
            if isinstance(message, wire.Died):
                raise type(message.error.exception())(f"{self.name}: {message.error.message}")
        if ended:
            raise EngineDeadError(f"the process of {self.name} {self.child.how_it_ended()}")
        return found
