"""One rank's process as the thread that spreads requests sees it.

Owns: the process and how it ended. Never touches: which rank gets what, how bytes travel (see `deepinfer.engine.async_engine.connections`).
"""

from __future__ import annotations

from typing import Any

from deepinfer.engine.async_engine import wire
from deepinfer.engine.async_engine.child import EngineChild
from deepinfer.engine.async_engine.connections import Connection
from deepinfer.errors import EngineDeadError


class RankLine(Connection):
    """A started rank process.

    Args:
        name: what messages call it.
        start: what it is to build.

    Attributes:
        silent: seconds that it has had work and said nothing, as who reads counts them.
        told: whether it has told what it failed with.
    """

    def __init__(self, name: str, start: wire.Start) -> None:
        self.name = name
        self.silent = 0.0
        self.told = False
        self.child = EngineChild()
        super().__init__(self.child.socket)
        self.send(start)

    def receive(self) -> list[Any]:
        """Sends on, and gives the messages that have come.

        Raises:
            EngineDeadError, or what it failed with: the process has ended.
        """
        self.flush()
        found = list(self.read())
        for message in found:
            if isinstance(message, wire.Died):
                self.told = True
                raise message.error.told_by(self.name).exception()
        if not self.open:
            raise EngineDeadError(f"the process of {self.name} {self.child.how_it_ended()}")
        return found
