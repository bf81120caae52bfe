"""Which drafts run when not all may: those the confidences of the step before call most likely, by the temperature of each draft."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from deepinfer.engine.engine import Engine
from deepinfer.models.base import Drafts
from deepinfer.sampling import SamplingParams
from deepseek_v41.draft_kit import DRAFTS, Told, answers, deepseek, engine_of
from deepseek_v41.weights_kit import plan, random_ids

BUDGET, COUNT = 6, 16
KINDS = [
    SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=3, max_tokens=COUNT, ignore_eos=True),
    SamplingParams(temperature=1.0, top_k=40, seed=5, max_tokens=COUNT, ignore_eos=True),
]


def prompts() -> list[list[int]]:
    return [random_ids(plan("tiny"), n, n).tolist() for n in (21, 13, 30)]


class Lengths:
    """Of each step of decoding sequences alone: the confidences its drafts came with ``[n, k]``, and how many of each sequence ran."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, engine: Engine) -> None:
        assert engine._loop.drafting is not None
        self._draft, self._completed = deepseek(engine).draft, engine._loop.drafting.completed
        self._used = self._newest = torch.empty(0, DRAFTS)
        self.steps: list[tuple[torch.Tensor, list[int]]] = []
        monkeypatch.setattr(deepseek(engine), "draft", self._drafting)
        monkeypatch.setattr(engine._loop.drafting, "completed", self._noting)

    def _drafting(self, *values: Any) -> Drafts:
        made: Drafts = self._draft(*values)
        self._used, self._newest = self._newest, made.confidence.clone()
        return made

    def _noting(self, rows: np.ndarray, *rest: Any) -> None:
        self.steps.append((self._used.cpu(), (rows - 1).tolist()))
        self._completed(rows, *rest)


def most_likely(confidence: torch.Tensor, temperatures: Sequence[float]) -> list[int]:
    """How many drafts of each sequence are among the ``BUDGET`` with the largest probability that they and all before them hold."""
    survival = torch.sigmoid(confidence / torch.tensor(temperatures)).cumprod(1)
    order = sorted((-float(value), place, i) for i, row in enumerate(survival) for place, value in enumerate(row))
    return [sum(i == number for _, _, i in order[:BUDGET]) for number in range(len(survival))]


def test_temperatures_choose_lengths_and_no_token(tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with engine_of(monkeypatch, tmp_path, "tiny", device, zero_overhead=False) as engine:
        wanted = answers(engine, prompts(), KINDS)
    found: dict[tuple[float, ...], list[list[int]]] = {}
    for temperatures in ((), (0.2, 3.0, 0.5, 8.0, 1.0), (50.0,) * DRAFTS):
        monkeypatch.setenv("DFLASH_CONFIDENCE_HEAD_TEMPERATURE", ",".join(map(str, temperatures)))
        settings: dict[str, Any] = {"speculative": "dspark", "draft_budget": BUDGET, "zero_overhead": False}
        with engine_of(monkeypatch, tmp_path, "tiny", device, **settings) as engine:
            assert engine.speculative is not None and engine.speculative.temperatures == temperatures
            Told(monkeypatch, engine, [p + a.tokens for p, a in zip(prompts(), wanted, strict=True)], lambda position: position % 2)
            lengths = Lengths(monkeypatch, engine)
            made = answers(engine, prompts(), KINDS)
            assert [a.tokens for a in made] == [a.tokens for a in wanted]
            assert engine.core_stats()["accepted"] > 0
        first = lengths.steps[:4]  # later ones are cut by the end of answers
        for confidence, ran in first:
            assert ran == most_likely(confidence, temperatures or (1.0,) * DRAFTS)
        found[temperatures] = [ran for _, ran in first]
    assert found[(50.0,) * DRAFTS][0] == [2, 2, 2], "drafts that are all about as likely are cut evenly"
    assert len({str(rows) for rows in found.values()}) == 3, found
