"""A further front of an engine process that another process started.

Owns: how it joins. Never touches: the process itself, beyond ending one that hangs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from deepinfer.engine.async_engine import wire
from deepinfer.engine.async_engine.child import SharedEngine
from deepinfer.engine.async_engine.client import AsyncLLM
from deepinfer.engine.async_engine.front import HANG_TIMEOUT
from deepinfer.engine.async_engine.line import EngineLine
from deepinfer.sampling import derive_seed


class SharedLLM(AsyncLLM):
    """A model whose engine is shared with other fronts.

    Args:
        engine: the process, and this front's connection to it (`EngineChild.introduce`).
        place: of this front among all of them, from 0; what is drawn without a seed differs between them.
        generation: how many fronts this place has had before.
        settings: those that the engine was started with.
    """

    def __init__(
        self, model: str, engine: SharedEngine, place: int, generation: int = 0, *, hang_timeout: float = HANG_TIMEOUT, **settings: Any
    ) -> None:
        self._engine = engine
        self._mark = f"{place}.{generation}."
        super().__init__(model, hang_timeout=hang_timeout, **settings)
        if place or generation:
            self._text = replace(self._text, seed=derive_seed(self._text.seed, (generation << 16) + place))

    def _make_line(self, start: wire.Start, hang_timeout: float) -> EngineLine:
        return EngineLine(start, hang_timeout=hang_timeout, has_work=lambda: len(self._outputs) > 0, child=self._engine)
