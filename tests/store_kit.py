"""A tier of KV between engines of one process that a test can slow down, hold, break and count, and what an engine finds there."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from deepinfer.engine.engine import Engine
from deepinfer.kvcache.block_tier import MemoryTier
from deepinfer.kvcache.objects import GRAIN
from engine_kit import Answer, collect, request


class Tier(MemoryTier):
    """One in memory.

    Attributes:
        delay: seconds that each get takes; ``gate``: while it is not set, gets do not return.
        broken: by name of a call, what is raised there, or what is made of its result.
        gets: moments at which gets began and ended, with the kind.
    """

    def __init__(self, capacity: int = 1 << 28, **settings: Any) -> None:
        super().__init__(capacity, **settings)
        self.delay = 0.0
        self.gate = threading.Event()
        self.gate.set()
        self.broken: dict[str, BaseException | Callable[[Any], Any]] = {}
        self.gets: list[tuple[str, float, float]] = []

    def _made(self, name: str, call: Callable[[], Any]) -> Any:
        wrong = self.broken.get(name)
        if isinstance(wrong, BaseException):
            raise wrong
        return call() if wrong is None else wrong(call())

    def check(self, *given: Any) -> Any:
        return self._made("check", lambda: super(Tier, self).check(*given))

    def get(self, kind: Any, *given: Any) -> Any:
        begin = time.monotonic()
        if self.delay:
            time.sleep(self.delay)
        self.gate.wait(30)
        result = self._made("get", lambda: super(Tier, self).get(kind, *given))
        self.gets.append((kind, begin, time.monotonic()))
        return result

    def put(self, *given: Any) -> Any:
        return self._made("put", lambda: super(Tier, self).put(*given))


def ask(engine: Engine, prompt: Sequence[int], params: Any, name: str = "r", **values: Any) -> Answer:
    """The answer to one prompt, once everything about it is stored."""
    engine.add_request(request(name, prompt, params, **values))
    answer = collect(engine)[name, 0]
    assert engine._store is None or engine._store.settle(20)
    return answer


def hit(length: int, stored: int, block: int) -> int:
    """Tokens of a prompt that come out of a store which has its first ``stored`` tokens, of a model without windows."""
    return min(stored // GRAIN * GRAIN, length // GRAIN * GRAIN, (length - 1) // block * block)


def at_rest(engine: Engine) -> bool:
    """Whether nothing is held, once what is on its way has ended."""
    assert engine._store is None or engine._store.settle(20)
    for _ in range(3):  # opens the fences of the last real step
        engine.step()
    counts, stats = engine.core_counts(), engine.core_stats()
    held = any(c["held"] or c["parked"] for c in [*counts["groups"], counts["slots"]])
    return not held and not stats["running"] and not stats["waiting"] and engine._core.check() is None
