"""Drafts by script, in place of a drafter."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from deepinfer.engine.engine import Engine


class Scripted:
    """Drafts made from the answers of a run without drafts, right or wrong as a pattern says."""

    def __init__(self, engine: Engine, truth: dict[str, list[int]], pattern: Callable[[str, int], Sequence[bool]]) -> None:
        self._engine, self._truth, self._pattern = engine, truth, pattern
        self.accepted: dict[int, set[int]] = {}  # by number of drafts
        self._asked: dict[int, tuple[bool, ...]] = {}
        self.turn = 0
        self.steps_in_flight = 0

    def propose(self) -> None:
        self.turn += 1
        core, loop = self._engine._core, self._engine._loop
        self.steps_in_flight = max(self.steps_in_flight, loop.in_flight)
        for handle, answer in self._engine._answers.by_handle.items():
            info = core.info(handle)
            if info is None or info["status"] != "running":
                continue
            name = answer.request.request_id
            pattern = tuple(self._pattern(name, self.turn))
            truth = self._truth[name]
            # What is in flight will make: its right drafts and one more.
            done = info["output_tokens"] + (1 + self._leading(handle) if loop.in_flight else 0)
            drafts = [
                (t + (0 if right else 1 + (self.turn % 7))) % self._engine.vocab_size
                for t, right in zip(truth[done:], pattern, strict=False)
            ]
            self._asked[handle] = pattern[: len(drafts)] if core.propose(handle, drafts) else ()

    def _leading(self, handle: int) -> int:
        asked = self._asked.get(handle, ())
        return next((i for i, right in enumerate(asked) if not right), len(asked))

    def completed(self, rows: np.ndarray, accepted: np.ndarray, step_rows: int, forward_ms: float, sampler_ms: float) -> None:
        assert np.all(accepted >= 1)
        assert np.all(accepted <= rows)
        for asked, got in zip(rows.tolist(), accepted.tolist(), strict=True):
            self.accepted.setdefault(asked - 1, set()).add(got - 1)
