"""Several fronts of one engine process, without processes: who is told what, who may come in, what stays of who leaves."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import pytest

from deepinfer.engine.async_engine import wire
from deepinfer.engine.async_engine.connections import Connection, Connections
from deepinfer.engine.request import SequenceDelta

READY = wire.Ready(10, 20, 3)


class Front:
    """A front's end."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self._unpacker = wire.Unpacker()

    def heard(self) -> list[Any]:
        """What it was told since."""
        self.socket.setblocking(False)
        made: list[Any] = []
        try:
            while data := self.socket.recv(1 << 16):
                made += self._unpacker.feed(data)
        except BlockingIOError:
            pass
        return made

    def say(self, message: Any) -> None:
        self.socket.sendall(wire.pack(message))


class Process:
    """An engine process's ends, and those of everyone else."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self.door, inside = socket.socketpair()
        self.parent = Front(ours)
        self.sides = Connections(theirs, inside)
        self.sides.ready = READY

    def introduce(self) -> Front:
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self.door, [b"f"], [theirs.fileno()])
        return Front(ours)

    def side_of(self, front: Front) -> Connection:
        """The process's end of a front's connection."""
        front.say(wire.Close())
        ((side, message),) = self.sides.read()
        assert isinstance(message, wire.Close)
        return side


@pytest.fixture
def process() -> Iterator[Process]:
    made = Process()
    yield made
    for sock in (made.parent.socket, made.door, *made.sides.readable()):
        sock.close()


def delta(request_id: str, finish: Any = None, index: int = 0) -> SequenceDelta:
    return SequenceDelta(request_id, index, [1], finish)


def ids(front: Front) -> list[str]:
    return [d.request_id for message in front.heard() for d in message.deltas]


def test_each_front_hears_of_its_own_requests(process: Process) -> None:
    a, b = process.introduce(), process.introduce()
    assert process.sides.read() == []  # lets them in
    assert [type(m) for f in (a, b) for m in f.heard()] == [wire.Ready, wire.Ready]
    sides = {name: process.side_of(front) for name, front in (("a", a), ("b", b), ("p", process.parent))}
    for name, side in sides.items():
        process.sides.own(side, f"{name}1", 2)
    process.sides.tell([delta("a1"), delta("p1"), delta("b1"), delta("a1", "stop"), delta("b1", "stop", 1)])
    assert (ids(a), ids(b), ids(process.parent)) == (["a1", "a1"], ["b1", "b1"], ["p1"])
    process.sides.tell([delta("a1", "stop", 1), delta("b1", "length")])
    assert (ids(a), ids(b)) == (["a1"], ["b1"])
    assert list(process.sides._owners) == ["p1"]  # nothing is kept of what is over
    process.sides.broadcast(wire.Beat())
    assert [type(m) for f in (a, b, process.parent) for m in f.heard()] == [wire.Beat] * 3


def test_who_leaves_takes_its_own_requests_along(process: Process) -> None:
    a, b = process.introduce(), process.introduce()
    process.sides.read()
    sides = [process.side_of(front) for front in (a, b)]
    for number, side in enumerate(sides):
        process.sides.own(side, f"r{number}", 1)
        process.sides.own(side, f"s{number}", 1)
    process.sides.over("s0")  # it was aborted
    assert list(process.sides.leave()) == []
    a.socket.close()
    process.sides.read()
    assert list(process.sides.leave()) == ["r0"] and list(process.sides.leave()) == []
    assert sides[0].socket.fileno() == -1 and process.sides.parent.open
    b.heard()
    process.sides.tell([delta("r1", "stop")])
    assert ids(b) == ["r1"]


def test_the_end_of_the_parent_and_of_the_door_are_noticed(process: Process) -> None:
    waiting = len(process.sides.readable())
    process.door.close()
    process.sides.read()
    assert len(process.sides.readable()) == waiting - 1 and process.sides.parent.open
    process.parent.socket.close()
    process.sides.read()
    assert not process.sides.parent.open


def test_a_front_that_does_not_read_holds_up_nobody(process: Process) -> None:
    slow = process.introduce()
    process.sides.read()
    side = process.side_of(slow)
    for _ in range(200):
        side.send(wire.Died(wire.ErrorData("EngineDeadError", "x" * 10_000)))
    assert side.unsent and process.sides.unsent() == [side.socket]
    process.sides.broadcast(wire.Beat())
    assert [type(m) for m in process.parent.heard()] == [wire.Beat]
    heard: list[Any] = []
    while side.unsent:
        heard += slow.heard()
        process.sides.flush()
    heard += slow.heard()
    assert len(heard) == 202  # what made it ready, all of it, and the sign of life
