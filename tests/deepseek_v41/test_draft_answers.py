"""Windows of 128 tokens, prompts of 300 to 3,000: answers with drafts are those without, however prompts are cut, wherever they begin."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from deepinfer.engine.engine import Engine
from deepinfer.sampling import SamplingParams
from deepseek_v41.draft_kit import DRAFTS, Told, answers, engine_of
from deepseek_v41.weights_kit import plan, random_ids
from engine_kit import Answer, same_bits

COUNT = 12


def prompts(lengths: tuple[int, ...]) -> list[list[int]]:
    return [random_ids(plan("tiny128"), n, n).tolist() for n in lengths]


def kinds(count: int) -> list[SamplingParams]:
    """Greedy, drawn from everything, and drawn under filters and a penalty, in turn."""
    length = {"max_tokens": COUNT, "ignore_eos": True, "logprobs": 1}
    every = [
        SamplingParams(temperature=0, **length),
        SamplingParams(temperature=0.8, seed=3, **length),
        SamplingParams(temperature=1.0, top_p=0.9, top_k=40, seed=5, repetition_penalty=1.3, **length),
    ]
    return [every[number % 3] for number in range(count)]


def settings(**more: Any) -> dict[str, Any]:
    return {"max_model_len": 4096, "num_kv_blocks": 100, "max_num_batched_tokens": 512, "state_snapshot_gib": 0.1, **more}


@pytest.fixture(scope="module")
def plainly(tmp_path_factory: pytest.TempPathFactory, device: str) -> Callable[[tuple[int, ...]], list[Answer]]:
    """Answers without drafts and hits, one step at a time."""

    @cache
    def once(lengths: tuple[int, ...]) -> list[Answer]:
        with pytest.MonkeyPatch.context() as patch:
            values = settings(zero_overhead=False, enable_prefix_caching=False)
            with engine_of(patch, tmp_path_factory.mktemp("plain"), "tiny128", device, **values) as engine:
                return answers(engine, prompts(lengths), kinds(len(lengths)))

    return once


def compare(engine: Engine, lengths: tuple[int, ...], base: list[Answer], rounds: int) -> None:
    """The same prompts ``rounds`` times: later ones begin behind what is found of earlier ones."""
    for _ in range(rounds):
        for found, wanted in zip(answers(engine, prompts(lengths), kinds(len(lengths))), base, strict=True):
            assert same_bits(found, wanted)
    stats = engine.core_stats()
    assert 0 < stats["accepted"] < stats["drafted"], stats
    assert engine._core.check() is None


def some(position: int) -> int:
    """Every number of right drafts, in no order."""
    return position * 7 % (DRAFTS + 1)


SHORT, LONG = (300, 430), (1500, 700, 3000)


@pytest.mark.parametrize(
    ("lengths", "more", "start"),
    [
        pytest.param(SHORT, {"max_num_batched_tokens": 190, "draft_budget": 4}, "snapshot", id="overlapped and chosen"),
        pytest.param(SHORT, {"zero_overhead": False, "draft_budget": 3}, "snapshot", id="serial", marks=pytest.mark.nightly),
        pytest.param(LONG, {"draft_budget": 5}, "snapshot", id="long", marks=pytest.mark.nightly),
        pytest.param(LONG, {"state_snapshot_gib": 0, "draft_budget": 7}, "rerun", id="long and rerun", marks=pytest.mark.nightly),
        pytest.param(
            LONG, {"state_snapshot_gib": 0, "max_num_batched_tokens": 190, "zero_overhead": False}, "rerun", id="long, in small chunks",
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            LONG, {"max_num_batched_tokens": 4096, "num_draft_tokens": 3}, "snapshot", id="long, at once", marks=pytest.mark.nightly
        ),
    ],
)  # fmt: skip
def test_answers_are_those_without_drafts(
    lengths: tuple[int, ...],
    more: dict[str, Any],
    start: str,
    plainly: Callable[[tuple[int, ...]], list[Answer]],
    tmp_path: Path,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    base = plainly(lengths)
    with engine_of(monkeypatch, tmp_path, "tiny128", device, speculative="dspark", **settings(**more)) as engine:
        Told(monkeypatch, engine, [p + a.tokens for p, a in zip(prompts(lengths), base, strict=True)], some)
        compare(engine, lengths, base, 2)
        metrics = engine.metrics()
        assert metrics.starts["nothing"] == len(lengths) and metrics.starts[start] > 0, metrics.starts
