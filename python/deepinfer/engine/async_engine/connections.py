"""The engine process's ends of its connections to fronts.

Owns: bytes to and from each front without ever blocking a step, fronts that come later, and which of them a request belongs to. Never
touches: what messages mean.

The first front started the process and is its parent: the process ends with that connection. Further ones come through the door, a
socket over which the parent passes connections; what any of them asks for is its own, and ends with it.
"""

from __future__ import annotations

import contextlib
import socket
from collections import deque
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from deepinfer.engine.async_engine import wire

if TYPE_CHECKING:
    from deepinfer.engine.request import SequenceDelta


class Connection:
    """One end of a connection; ``open`` until the other end is closed."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.socket = sock
        self.open = True
        self._unpacker = wire.Unpacker()
        self.unsent: deque[memoryview] = deque()

    def send(self, message: Any) -> None:
        """Queues a message and sends what the socket takes now."""
        self.unsent.append(memoryview(wire.pack(message)))
        self.flush()

    def flush(self) -> None:
        """Sends what the socket takes now."""
        try:
            while self.unsent:
                sent = self.socket.send(self.unsent[0])
                if sent < len(self.unsent[0]):
                    self.unsent[0] = self.unsent[0][sent:]
                    return
                self.unsent.popleft()
        except BlockingIOError:
            return
        except OSError:
            self.open = False  # nobody reads any more

    def read(self) -> Iterator[Any]:
        """Messages that have come."""
        try:
            while data := self.socket.recv(1 << 18):
                yield from self._unpacker.feed(data)
        except BlockingIOError:
            return
        except OSError:
            pass
        self.open = False  # the other end is closed

    def drain(self, seconds: float) -> None:
        """Sends what is queued before the process ends, if anybody still reads."""
        with contextlib.suppress(OSError):
            self.socket.settimeout(seconds)
            while self.unsent:
                self.socket.sendall(self.unsent.popleft())


class Connections:
    """All fronts.

    Args:
        parent: the connection to whoever started the process.
        door: where further ones come in; ``None``: there are none.
    """

    def __init__(self, parent: socket.socket, door: socket.socket | None = None) -> None:
        self.parent = Connection(parent)
        self._all = [self.parent]
        self._door = door
        if door is not None:
            door.setblocking(False)
        self._owners: dict[str, tuple[Connection, list[int]]] = {}  # with a door: requests → whose, answers not over
        self.ready: Any = None
        """What a front is told when it comes in."""

    def readable(self) -> list[Any]:
        """What to wait for."""
        return [c.socket for c in self._all] + ([] if self._door is None else [self._door])

    def unsent(self) -> list[Any]:
        """Sockets that something waits for."""
        return [c.socket for c in self._all if c.unsent]

    def flush(self) -> None:
        """Sends what the sockets take now."""
        for connection in self._all:
            if connection.unsent:
                connection.flush()

    def read(self) -> list[tuple[Connection, Any]]:
        """Messages that have come, with who sent them; takes in who stands at the door."""
        if self._door is not None:
            self._open_door(self._door)
        return [(c, message) for c in self._all for message in c.read()]

    def _open_door(self, door: socket.socket) -> None:
        with contextlib.suppress(BlockingIOError, OSError):
            while True:
                said, descriptors, _, _ = socket.recv_fds(door, 1, 1)
                if not said:
                    door.close()
                    self._door = None
                    return
                for descriptor in descriptors:
                    connection = Connection(socket.socket(fileno=descriptor))
                    self._all.append(connection)
                    connection.send(self.ready)

    def own(self, connection: Connection, request_id: str, answers: int) -> None:
        """A request came from there."""
        if self._door is not None:
            self._owners[request_id] = (connection, [answers])

    def over(self, request_id: str) -> None:
        """Nobody wants to hear of a request any more."""
        self._owners.pop(request_id, None)

    def broadcast(self, message: Any) -> None:
        """Tells everyone."""
        for connection in self._all:
            connection.send(message)

    def tell(self, deltas: list[SequenceDelta]) -> None:
        """Tells everyone the news of their own requests."""
        if not self._owners:
            self.parent.send(wire.Deltas(deltas))
            return
        news: dict[Connection, list[SequenceDelta]] = {}
        for delta in deltas:
            connection, left = self._owners.get(delta.request_id, (self.parent, [0]))
            news.setdefault(connection, []).append(delta)
            if delta.finish_reason is not None:
                left[0] -= 1
                if left[0] == 0:
                    del self._owners[delta.request_id]
        for connection, its in news.items():
            connection.send(wire.Deltas(its))

    def leave(self) -> Iterable[str]:
        """Lets go of fronts that have gone, the parent apart; gives the requests that they leave behind."""
        gone = [c for c in self._all if not c.open and c is not self.parent]
        if not gone:
            return ()
        left = [request_id for request_id, (connection, _) in self._owners.items() if connection in gone]
        for request_id in left:
            del self._owners[request_id]
        for connection in gone:
            self._all.remove(connection)
            connection.socket.close()
        return left

    def drain(self, seconds: float = 5.0) -> None:
        """Sends what is queued before the process ends."""
        for connection in self._all:
            connection.drain(seconds)
