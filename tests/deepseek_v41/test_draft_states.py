"""What drafts need goes where a sequence's state goes: to host memory, to forks, to other engines, and out of snapshots.

Answers are bit for bit those without drafts everywhere. Where the state came along, the stages' own drafts are those of a sequence that
never moved, bit for bit, from the first one on; where it did not, they are again once a window has passed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from deepinfer.engine.engine import Engine
from deepinfer.sampling import SamplingParams
from deepseek_v41.draft_kit import DRAFTS, Noted, Place, Told, engine_of, loaded, write_config
from deepseek_v41.weights_kit import plan, random_ids
from engine_kit import Answer, collect, request, same_bits
from roles_kit import Pair

LENGTHS, COUNT = (14, 13, 15), 24
WINDOW = 16


def prompts() -> list[list[int]]:
    return [random_ids(plan("tiny"), n, n).tolist() for n in LENGTHS]


def kinds(count: int = COUNT, n: int = 1) -> list[SamplingParams]:
    length = {"max_tokens": count, "ignore_eos": True, "logprobs": 1}
    return [
        SamplingParams(temperature=0, **length) if n == 1 else SamplingParams(temperature=1.1, seed=7, n=n, **length),
        SamplingParams(temperature=0.9, seed=3, n=n, **length),
        SamplingParams(temperature=1.0, top_p=0.9, top_k=40, seed=5, repetition_penalty=1.3, **length),
    ]


Answers = dict[tuple[str, int], Answer]


def run(engine: Engine, asked: list[list[int]], params: list[SamplingParams]) -> Answers:
    for index, (prompt, values) in enumerate(zip(asked, params, strict=True)):
        engine.add_request(request(f"r{index}", prompt, values))
    found = collect(engine)
    assert all(answer.finish == "length" for answer in found.values()), found
    return found


def agree(found: Answers, wanted: Answers) -> None:
    assert found.keys() == wanted.keys()
    for place, answer in wanted.items():
        assert same_bits(found[place], answer), place


def streams(asked: list[list[int]], answers: Answers) -> list[list[int]]:
    """Prompt and tokens of every answer."""
    return [asked[int(name[1:])] + answer.tokens for (name, _), answer in answers.items()]


def some(position: int) -> int:
    """Every number of right drafts, in no order."""
    return position * 7 % (DRAFTS + 1)


def nothing_is_held(engine: Engine) -> None:
    for _ in range(3):
        engine.step()
    counts = engine.core_counts()
    for pool in (*counts["groups"], counts["slots"], counts["host_blocks"], counts["host_slots"]):
        assert not pool["held"] and not pool["parked"], counts
        assert pool["free"] + pool["cached"] + pool["reserved"] == pool["total"], counts
    assert engine._core.check() is None


@dataclass
class Undisturbed:
    """Answers without drafts, and what the stages draft behind each of their tokens."""

    answers: Answers
    noted: Noted


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, device: str) -> Callable[[int], Undisturbed]:
    """By answers to a prompt; nothing moves, no draft runs."""

    @cache
    def once(n: int) -> Undisturbed:
        with pytest.MonkeyPatch.context() as patch:
            where = tmp_path_factory.mktemp("undisturbed")
            with engine_of(patch, where, "tiny", device, zero_overhead=False, block_size=16, max_model_len=64) as engine:
                plain = run(engine, prompts(), kinds(n=n))
            settings = {"speculative": "dspark", "draft_budget": 0, "zero_overhead": False, "block_size": 16, "max_model_len": 64}
            with engine_of(patch, where, "tiny", device, **settings) as engine:
                noted = Noted(patch, engine)
                agree(run(engine, prompts(), kinds(n=n)), plain)
            return Undisturbed(plain, noted)

    return once


@pytest.mark.parametrize(
    ("overlap", "swapped", "n", "blocks"),
    [
        pytest.param(False, True, 3, 11, id="forks, swapped"),
        pytest.param(False, False, 3, 11, id="forks, computed again", marks=pytest.mark.nightly),
        pytest.param(True, True, 1, 6, id="overlapped, swapped"),
        pytest.param(True, False, 1, 6, id="overlapped, computed again", marks=pytest.mark.nightly),
        pytest.param(False, True, 1, 6, id="swapped", marks=pytest.mark.nightly),
        pytest.param(False, False, 1, 6, id="computed again", marks=pytest.mark.nightly),
    ],
)
def test_victims_draft_as_if_they_had_stayed(
    overlap: bool,
    swapped: bool,
    n: int,
    blocks: int,
    undisturbed: Callable[[int], Undisturbed],
    tmp_path: Path,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Out to host memory and back, or computed again; some have three answers, so that forks are among the victims."""
    base = undisturbed(n)
    settings: dict[str, Any] = {"num_kv_blocks": blocks, "block_size": 16, "max_model_len": 64, "swap_space_gib": 0.02 * swapped}
    with engine_of(monkeypatch, tmp_path, "tiny", device, speculative="dspark", zero_overhead=overlap, **settings) as engine:
        noted = None if overlap else Noted(monkeypatch, engine)
        Told(monkeypatch, engine, streams(prompts(), base.answers), some)
        if swapped:
            monkeypatch.setattr(engine._rates, "note", lambda *_: None)
            engine._core.set_rates(1e15, 1.0)  # a copy is always the cheaper way back
        agree(run(engine, prompts(), kinds(n=n)), base.answers)
        stats = engine.core_stats()
        assert 0 < stats["accepted"] < stats["drafted"] and stats["preemptions"] > 0, stats
        assert (stats["swapped_in"] > 0) is swapped and (stats["forks"] > 0) is (n > 1), stats
        nothing_is_held(engine)
    if noted is not None:
        both, otherwise = noted.same_as(base.noted)
        assert both > 20 * n and not otherwise


@pytest.mark.parametrize("drafts", [True, False], ids=["both draft", "prompts draft not"])
def test_a_pair_hands_over_what_drafts_need(
    drafts: bool, undisturbed: Callable[[int], Undisturbed], tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt engine that does not draft keeps no rows for the stages, so that the other engine's drafts are poor for a window."""
    base = undisturbed(1)
    monkeypatch.setattr("deepinfer.engine.assembly.load_model", lambda *_: copy.copy(loaded("tiny", device)))  # each sets its own up
    settings: dict[str, Any] = {"load_format": "dummy", "max_model_len": 64, "zero_overhead": False}
    if drafts:
        settings["speculative"] = "dspark"
    pair = Pair(monkeypatch, device, model=write_config(tmp_path, "tiny"), completion={"speculative": "dspark"}, **settings)
    noted, idle = Noted(monkeypatch, pair.completion), Noted(monkeypatch, pair.prompt)
    Told(monkeypatch, pair.completion, streams(prompts(), base.answers), some)
    for index, (prompt, values) in enumerate(zip(prompts(), kinds(), strict=True)):
        pair.prompt.add_request(request(f"r{index}", prompt, values))
    pair.run(seconds=200)
    assert not pair.refused
    agree({(name, 0): answer for name, answer in pair.answers.items()}, base.answers)
    assert pair.completion.core_stats()["accepted"] > 0 and not pair.prompt.core_stats()["drafted"] and not idle.made
    pair.check_rest()
    pair.close()
    both, otherwise = noted.same_as(base.noted)
    early = {place for place in noted.made if place[2] < len(prompts()[int(place[0][1:])]) + WINDOW}
    assert both == len(noted.made) > len(early) > 0
    assert set(otherwise) == (set() if drafts else early)


@pytest.mark.parametrize("kind", ["snapshot", "rerun"])
def test_drafts_behind_hits_are_those_of_the_whole_prompt(kind: str, tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stages read windows of decoder inputs, so that where the last token is right behind a rerun, so are they."""
    prompt, values = random_ids(plan("tiny"), 201, 4).tolist(), kinds(16)[1]
    settings: dict[str, Any] = {"block_size": 16, "max_model_len": 256, "num_kv_blocks": 60, "zero_overhead": False}
    with engine_of(monkeypatch, tmp_path, "tiny", device, **settings) as engine:
        plain = run(engine, [prompt], [values])
    if kind == "rerun":
        settings["state_snapshot_gib"] = 0
    with engine_of(monkeypatch, tmp_path, "tiny", device, speculative="dspark", **settings) as engine:
        noted = Noted(monkeypatch, engine)
        Told(monkeypatch, engine, streams([prompt], plain), some)
        made: list[dict[Place, tuple[list[int], bytes]]] = []
        for _ in range(2):
            agree(run(engine, [prompt], [values]), plain)
            made.append(noted.made)
            noted.made = {}
        metrics = engine.metrics()
        assert metrics.starts["nothing"] == metrics.starts[kind] == 1 and metrics.hit_tokens >= 192
        nothing_is_held(engine)
    assert made[0] == made[1] and len(made[0]) > 3
