"""The engine's newest snapshot, asked for when somebody looks.

Owns: how often and how long the engine is asked. Never touches: what is in a snapshot.

An engine in a long step answers late, one that hangs or has died never: whoever scrapes then gets the snapshot before, with its age.
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
    """Snapshots of an engine's processes."""

    def __init__(self, llm: AsyncFront) -> None:
        self._llm = llm
        self._asking: asyncio.Task[None] | None = None
        self._taken: dict[str, EngineMetrics] = {}
        self._at = float("-inf")

    async def newest(self) -> dict[str, Snapshot]:
        """By engine process; empty before the first one."""
        if time.monotonic() - self._at >= FRESH:
            if self._asking is None or self._asking.done():
                self._asking = asyncio.create_task(self._ask())
            # Everybody who comes meanwhile waits for the same answer, and nobody who leaves takes it from the others.
            await asyncio.wait({self._asking}, timeout=PATIENCE)
        age = time.monotonic() - self._at
        return {name: Snapshot(metrics, age) for name, metrics in self._taken.items()}

    async def _ask(self) -> None:
        with contextlib.suppress(DeepInferError):
            taken = await self._llm.metrics()
            self._taken, self._at = taken, time.monotonic()

    @property
    def asking(self) -> asyncio.Task[None] | None:
        """The newest question to the engine, if there was one."""
        return self._asking
