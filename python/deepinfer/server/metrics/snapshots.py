"""The engine's newest snapshot, asked for when somebody looks.

Owns: how often and how long the engine is asked. Never touches: what is in a snapshot.

An engine in a long step answers late, one that hangs or has died never: whoever scrapes then gets the snapshot before, with its age and the
word that it did not answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING

from deepinfer.errors import DeepInferError
from deepinfer.server.metrics.engine import Snapshot

if TYPE_CHECKING:
    from deepinfer.engine.async_engine.front import AsyncFront
    from deepinfer.engine.step_log import EngineMetrics

FRESH = 0.5
"""Seconds for which a snapshot is good enough: pages and scrapers together ask the engine no more often."""
PATIENCE = 1.0
"""Seconds that a scrape waits for the engine."""


class Snapshots:
    """Snapshots of all engines behind a front, each asked by itself: one that is late keeps back nobody else's."""

    def __init__(self, llm: AsyncFront) -> None:
        self._llm = llm
        self._asking: dict[str, asyncio.Task[None]] = {}
        self._taken: dict[str, tuple[EngineMetrics, float]] = {}

    async def newest(self) -> dict[str, Snapshot]:
        """By engine."""
        names, now = self._llm.engines, time.monotonic()
        wanted = [name for name in names if now - self._at(name) >= FRESH]
        for name in wanted:
            if name not in self._asking:
                # Everybody who comes meanwhile waits for the same answer, and nobody who leaves takes it from the others.
                task = self._asking[name] = asyncio.create_task(self._ask(name))
                task.add_done_callback(lambda _, name=name: self._asking.pop(name))  # type: ignore[misc]
        if waiting := [self._asking[name] for name in wanted]:
            await asyncio.wait(waiting, timeout=PATIENCE)
        then = time.monotonic()
        return {
            name: Snapshot(self._taken[name][0] if name in self._taken else None, then - self._at(name), now - self._at(name) < FRESH)
            for name in names
        }

    def _at(self, name: str) -> float:
        return self._taken[name][1] if name in self._taken else float("-inf")

    async def _ask(self, name: str) -> None:
        with contextlib.suppress(DeepInferError):
            taken = await self._llm.measure(name)
            self._taken[name] = taken, time.monotonic()

    @property
    def asking(self) -> list[asyncio.Task[None]]:
        """Questions that are not answered."""
        return list(self._asking.values())
