"""Whole engines that draft: the same answers, bit for bit, and the same caches as without drafts, whatever share of the drafts is right."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from deepinfer.engine.engine import Engine
from deepinfer.errors import ConfigError
from deepinfer.sampling import SamplingParams
from deepseek_v41.draft_kit import DRAFTS, Told, answers, deepseek, engine_of
from deepseek_v41.weights_kit import plan, random_ids
from engine_kit import request


def mixed(count: int) -> list[SamplingParams]:
    """Greedy, drawn from everything, and drawn under filters and a penalty."""
    length = {"max_tokens": count, "ignore_eos": True}
    return [
        SamplingParams(temperature=0, **length),
        SamplingParams(temperature=0.8, seed=3, **length),
        SamplingParams(temperature=1.0, top_p=0.9, top_k=40, seed=5, repetition_penalty=1.3, logprobs=1, **length),
    ]


def prompts(name: str, *lengths: int) -> list[list[int]]:
    return [random_ids(plan(name), n, n).tolist() for n in lengths]


@pytest.fixture(scope="module")
def plainly(tmp_path_factory: pytest.TempPathFactory, device: str) -> Callable[..., Any]:
    """Answers without drafts, one step at a time."""

    @cache
    def once(name: str, lengths: tuple[int, ...], count: int) -> Any:
        asked, params = prompts(name, *lengths), mixed(count)
        with pytest.MonkeyPatch.context() as patch:
            engine = engine_of(patch, tmp_path_factory.mktemp("plain"), name, device, zero_overhead=False)
            try:
                return answers(engine, asked, params)
            finally:
                engine.close()

    return once


def some(position: int) -> int:
    """Every number of right drafts, in no order."""
    return position * 7 % (DRAFTS + 1)


@pytest.mark.parametrize(
    ("overlap", "settings"),
    [
        pytest.param(False, {}, id="serial"),
        pytest.param(True, {}, id="overlapped"),
        pytest.param(True, {"draft_budget": 4}, id="chosen"),
        pytest.param(True, {"draft_budget": 0}, id="none-run"),
        pytest.param(False, {"num_kv_blocks": 6, "block_size": 16, "max_model_len": 64}, id="preempted"),
    ],
)
def test_answers_are_those_without_drafts(
    overlap: bool, settings: dict[str, Any], plainly: Callable[..., Any], tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy and sampled, mates of one batch, log-probabilities included."""
    lengths, count = ((14, 13, 15), 24) if "num_kv_blocks" in settings else ((21, 13, 30), 9)
    asked, params, base = prompts("tiny", *lengths), mixed(count), plainly("tiny", lengths, count)
    engine = engine_of(monkeypatch, tmp_path, "tiny", device, speculative="dspark", zero_overhead=overlap, **settings)
    Told(monkeypatch, engine, [p + a.tokens for p, a in zip(asked, base, strict=True)], some)
    found = answers(engine, asked, params)
    stats, metrics = engine.core_stats(), engine.metrics()
    assert engine.counters.draft_rows == stats["drafted"]
    engine.close()
    for a, b in zip(base, found, strict=True):
        assert a.tokens == b.tokens
        for mine, theirs in zip(a.logprobs, b.logprobs, strict=True):
            assert (mine.ids == theirs.ids).all() and (mine.values == theirs.values).all()
    if settings.get("draft_budget") == 0:
        assert stats["drafted"] == stats["accepted"] == 0
        return
    assert 0 < stats["accepted"] < stats["drafted"]
    asked_at, taken_at = metrics.drafts_asked, metrics.drafts_taken
    assert asked_at[0] >= asked_at[1] > 0 and all(a >= b for a, b in zip(asked_at, taken_at, strict=True))
    assert sum(asked_at) <= stats["drafted"] and sum(taken_at) >= stats["accepted"] > 0
    if "num_kv_blocks" in settings:
        assert stats["preemptions"] > 0


def slot_of(engine: Engine, handle: int) -> int:
    """State slot of a sequence, also after its end as long as nobody else has come."""
    return int((engine._answers.handle_of_slot == handle).nonzero()[0][-1])


def kept(engine: Engine, slot: int, upto: int) -> dict[str, torch.Tensor]:
    """Everything a running sequence has in caches of its first ``upto`` positions, by name; what may hold later rows is left out."""
    model = deepseek(engine)
    caches, kv = model.caches, engine._runner.kv.tensors
    found: dict[str, torch.Tensor] = {}
    table = engine._runner.inputs.table[slot].long()
    for layer, per_page in caches.sources:
        for name in (f"layers.{layer}.kv", f"layers.{layer}.index"):
            rows = kv[name][table].flatten(0, 1)[: upto * per_page // caches.page_tokens]
            found[name] = rows.contiguous().view(torch.uint8).clone()
    reach = {"window": model.topology.attention.window, "pending": 1, "token_ids": caches.id_reach}
    for name, ring in caches.views(kv["state0"]).items():
        last = torch.arange(max(0, upto - reach[name.rsplit(".", 1)[-1]]), upto)
        if not name.endswith("pending") or upto % 2:  # an open group has one row
            found[name] = ring[slot, last % ring.shape[1]].contiguous().view(torch.uint8).clone()
    for name, ring in caches.views(kv["state0"], replica=True).items():
        found[f"replica {name}"] = ring[slot].contiguous().view(torch.uint8).clone()
    return found


def start(engine: Engine, prompt: list[int], length: int = 70) -> int:
    """Adds one request; its handle."""
    engine.add_request(request("r", prompt, SamplingParams(temperature=0, max_tokens=length, ignore_eos=True), stream=True))
    return engine._answers.requests["r"][0]


def computed(engine: Engine, handle: int) -> int:
    """Positions that count, with the device at rest; 0 before the first step."""
    engine._runner.in_order(lambda: None)()
    info = engine._core.info(handle)
    return 0 if info is None else info["computed_tokens"]


def made(engine: Engine, handle: int) -> list[int]:
    tokens = engine._core.output_tokens(handle)
    return [] if tokens is None else tokens.tolist()


TURNS = 54


@pytest.fixture(scope="module")
def undrafted(tmp_path_factory: pytest.TempPathFactory, device: str) -> tuple[list[int], list[int], dict[int, dict[str, torch.Tensor]]]:
    """A prompt, its answer, and the caches behind each of its tokens when no draft ever runs (the stages keep their rows all the same)."""
    prompt, after = prompts("tiny128", 117)[0], {}
    with pytest.MonkeyPatch.context() as patch:
        settings = {"speculative": "dspark", "draft_budget": 0, "zero_overhead": False}
        engine = engine_of(patch, tmp_path_factory.mktemp("undrafted"), "tiny128", device, **settings)
        handle = start(engine, prompt)
        for _ in range(TURNS):
            engine.step()
            after[computed(engine, handle)] = kept(engine, slot_of(engine, handle), computed(engine, handle))
        tokens = made(engine, handle)
        engine.close()
    return prompt, tokens, after


def same(engine: Engine, slot: int, upto: int, after: dict[int, dict[str, torch.Tensor]]) -> None:
    found = kept(engine, slot, upto)
    for name, rows in after[upto].items():
        assert torch.equal(found[name], rows), (upto, name)


class Everything:
    """Right drafts of each step, so that from even and from odd positions every number of 0 to ``most`` comes up; ``left`` are those that
    have not."""

    def __init__(self, most: int) -> None:
        self.left = {(parity, count) for parity in (0, 1) for count in range(most + 1)}
        self._due = set(self.left)

    def __call__(self, position: int) -> int:
        """For drafts behind the newest token at ``position``: a number that is due, else none, which leads to the other parity."""
        count = max((count for parity, count in self._due if parity == position % 2), default=0)
        self._due.discard((position % 2, count))
        return count

    def note(self, position: int, accepted: int) -> None:
        """A step began at ``position``."""
        self.left.discard((position % 2, accepted))


@pytest.mark.parametrize("most", [1, *(pytest.param(n, marks=pytest.mark.nightly) for n in (2, 3, 4)), 5])
def test_caches_are_those_of_never_having_drafted(
    most: int, undrafted: Any, tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After every step, of which some accept each number of 1 to 5 drafts, from within and from the end of a group of two, past a 128
    boundary: pages, rings, raw rows and the copy of them."""
    prompt, tokens, after = undrafted
    settings: dict[str, Any] = {"speculative": "dspark", "num_draft_tokens": most, "draft_budget": most, "zero_overhead": False}
    engine = engine_of(monkeypatch, tmp_path, "tiny128", device, **settings)
    due = Everything(most)
    Told(monkeypatch, engine, [prompt + tokens], due)
    handle, upto, steps = start(engine, prompt), 0, 0
    while due.left or upto < 128:
        before = upto
        engine.step()
        upto, steps = computed(engine, handle), steps + 1
        if before >= len(prompt):
            due.note(before, upto - before - 1)
        if upto >= len(prompt):
            same(engine, slot_of(engine, handle), upto, after)
        assert steps < 40, due.left
    assert made(engine, handle) == tokens[: len(made(engine, handle))]
    engine.close()


@pytest.mark.parametrize("length", [17, 20])
def test_caches_behind_steps_that_overlap(
    length: int, undrafted: Any, tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the end of an answer, since the device is ahead of what the host knows before."""
    prompt, tokens, after = undrafted
    engine = engine_of(monkeypatch, tmp_path, "tiny128", device, speculative="dspark", zero_overhead=True)
    Told(monkeypatch, engine, [prompt + tokens], some)
    handle = start(engine, prompt, length)
    told: list[int] = []
    while engine.has_unfinished():
        told += [token for delta in engine.step() for token in delta.new_token_ids]
    assert told == tokens[:length] and engine.core_stats()["accepted"] > 5
    same(engine, slot_of(engine, handle), len(prompt) + length - 1, after)
    engine.close()


# Settings


def test_drafting_is_asked_for_and_turned_off(tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def drafts(**settings: Any) -> int:
        engine = engine_of(monkeypatch, tmp_path, "tiny", device, **settings)
        engine.close()
        return 0 if engine.speculative is None else engine.speculative.num_draft_tokens or 0

    assert (drafts(), drafts(speculative="dspark"), drafts(speculative="dspark", num_draft_tokens=2)) == (0, 5, 2)
    monkeypatch.setenv("USE_NEXTN_DECODE", "1")
    assert (drafts(), drafts(speculative="off"), drafts(speculative="ngram")) == (5, 0, 4)
    monkeypatch.setenv("DFLASH_CONFIDENCE_HEAD_TEMPERATURE", "1,2,0.5,1,1")
    assert drafts() == 5
    for text, match in (("1,2", "2 temperatures for 5 drafts"), ("1,0,1,1,1", "positive numbers"), ("a", "DFLASH_CONFIDENCE")):
        monkeypatch.setenv("DFLASH_CONFIDENCE_HEAD_TEMPERATURE", text)
        with pytest.raises(ConfigError, match=match):
            drafts()
