"""Drafting in a running engine: the same answers, bit for bit, in fewer steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

from deepinfer.engine.engine import Engine
from deepinfer.errors import ConfigError
from deepinfer.sampling import SamplingParams
from deepinfer.speculative import SpeculativeSettings
from deepinfer.speculative.drafting import longer_than
from engine_kit import Answer, collect, generate, has_smollm2, make_engine, random_prompts, request, same_bits, tiny_checkpoint
from scripted_kit import Scripted

K = 3
KINDS = [
    SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=2),
    SamplingParams(temperature=0.9, max_tokens=24, logprobs=0),
    SamplingParams(temperature=0.7, top_k=12, max_tokens=24, frequency_penalty=1.2, ignore_eos=True),
    SamplingParams(temperature=1.1, top_p=0.9, max_tokens=24, min_tokens=12, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=24, repetition_penalty=1.4, presence_penalty=0.6, logprobs=1),
]


def drafting_engine(device: str, overlap: bool, **settings: Any) -> Engine:
    values = {"max_num_seqs": 8, "block_size": 16, "max_num_batched_tokens": 64, "max_model_len": 128, **settings}
    return make_engine(tiny_checkpoint("llama"), device, zero_overhead=overlap, speculative="ngram", num_draft_tokens=K, **values)


@pytest.fixture(scope="module")
def plain(device: str) -> list[Answer]:
    """The answers without drafts, one step at a time."""
    with make_engine(tiny_checkpoint("llama"), device, zero_overhead=False, max_num_seqs=8, block_size=16, max_model_len=128) as engine:
        return generate(engine, PROMPTS, KINDS)


PROMPTS = random_prompts([9, 20, 5, 33, 12], seed=4)
PATTERNS = list(product([True, False], repeat=K))


def scripted(engine: Engine, plain: list[Answer], pattern: Callable[[str, int], Sequence[bool]]) -> tuple[list[Answer], Scripted]:
    script = Scripted(engine, {str(i): a.tokens for i, a in enumerate(plain)}, pattern)
    engine._loop.drafting = script
    return generate(engine, PROMPTS, KINDS), script


@pytest.mark.parametrize("overlap", [False, True], ids=["serial", "overlapped"])
def test_every_pattern_of_accepted_drafts_gives_the_undrafted_answer(device: str, plain: list[Answer], overlap: bool) -> None:
    with drafting_engine(device, overlap) as engine:
        for pattern in PATTERNS:
            answers, script = scripted(engine, plain, lambda name, turn, p=pattern: p)
            for kind, a, b in zip(KINDS, answers, plain, strict=True):
                assert same_bits(a, b), (pattern, kind)
            right = next((i for i, ok in enumerate(pattern) if not ok), K)
            assert script.accepted[K] == {right}, "exactly the leading right ones"
            assert script.steps_in_flight == (1 if overlap else 0)
        mixed, _ = scripted(engine, plain, lambda name, turn: PATTERNS[(turn * 5 + int(name) * 3) % len(PATTERNS)][: turn % (K + 1)])
        for a, b in zip(mixed, plain, strict=True):
            assert same_bits(a, b)
        assert engine._core.check() is None


@pytest.mark.parametrize("overlap", [False, True], ids=["serial", "overlapped"])
@pytest.mark.parametrize("host_memory", [0.0, 0.01], ids=["recomputed", "swapped"])
def test_preemption_in_the_middle_leaves_no_trace(device: str, overlap: bool, host_memory: float) -> None:
    prompts = random_prompts([6, 9, 7, 8, 5], seed=6)
    params = [replace(p, max_tokens=56) for p in KINDS]
    with make_engine(tiny_checkpoint("llama"), device, zero_overhead=False, max_num_seqs=8, block_size=16, max_model_len=80) as engine:
        want = generate(engine, prompts, params)
    with drafting_engine(device, overlap, num_kv_blocks=11, max_model_len=80, swap_space_gib=host_memory) as engine:
        truth = {str(i): a.tokens for i, a in enumerate(want)}
        engine._loop.drafting = Scripted(engine, truth, lambda name, turn: PATTERNS[(turn * 3 + int(name)) % len(PATTERNS)])
        answers = generate(engine, prompts, params)
        stats = engine.core_stats()
        assert stats["preemptions"] > 0
        assert stats["accepted"] > 0
        for kind, a, b in zip(KINDS, answers, want, strict=True):
            assert same_bits(a, b), kind
        assert engine._core.check() is None
        assert engine.core_counts()["groups"][0]["held"] == 0


@pytest.mark.parametrize("overlap", [False, True], ids=["serial", "overlapped"])
def test_stop_ids_aborts_and_forks_with_drafts(device: str, overlap: bool) -> None:
    params = SamplingParams(temperature=0.8, n=3, max_tokens=40, seed=3)
    stop = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    texts: dict[bool, list[Answer]] = {}
    for drafts in (False, True):
        speculative = {"speculative": "ngram", "num_draft_tokens": K, "ngram_min": 1} if drafts else {}
        engine = make_engine(tiny_checkpoint("llama"), device, zero_overhead=overlap, max_num_seqs=8, block_size=16, **speculative)
        with engine:
            first = generate(engine, [PROMPTS[0]], [stop])[0]
            ending = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, stop_token_ids=[first.tokens[10]])
            engine.add_request(request("forks", PROMPTS[1], params, seeds=params.seeds(3)))
            engine.add_request(request("stop", PROMPTS[0], ending))
            engine.add_request(request("gone", PROMPTS[2], stop))
            for _ in range(6):
                engine.step()
            engine.abort("gone")
            answers = collect(engine)
            texts[drafts] = [answers["forks", i] for i in range(3)] + [answers["stop", 0]]
            assert answers["stop", 0].finish == "stop"
            assert answers["stop", 0].tokens == first.tokens[: len(answers["stop", 0].tokens)]
            assert engine._core.check() is None
    assert all(same_bits(a, b) for a, b in zip(texts[False], texts[True], strict=True))


@pytest.mark.parametrize("overlap", [False, True], ids=["serial", "overlapped"])
def test_prompt_lookup_gives_the_same_answers(device: str, overlap: bool) -> None:
    """A tiny model repeats words of one token at least, so that some of the many drafts are right."""
    params = [
        SamplingParams(temperature=0, max_tokens=50, ignore_eos=True, logprobs=1),
        SamplingParams(temperature=0, max_tokens=50, ignore_eos=True),
        SamplingParams(temperature=0.4, max_tokens=50, ignore_eos=True, logprobs=2),
        SamplingParams(temperature=0.6, top_k=5, max_tokens=50, ignore_eos=True, repetition_penalty=1.05),
    ]
    prompts = random_prompts([12, 30, 7, 18], seed=8)
    settings: dict[str, Any] = {"zero_overhead": overlap, "max_num_seqs": 8, "block_size": 16}
    with make_engine(tiny_checkpoint("llama"), device, **settings) as engine:
        want = generate(engine, prompts, params)
    with make_engine(tiny_checkpoint("llama"), device, speculative="ngram", ngram_min=1, **settings) as engine:
        got = generate(engine, prompts, params)
        stats = engine.core_stats()
        assert stats["accepted"] > 0
        assert engine.counters.draft_rows == stats["drafted"]
    assert all(same_bits(a, b) for a, b in zip(got, want, strict=True))


def test_drafts_follow_their_budget(device: str) -> None:
    prompt = [*range(10, 20)] * 3
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    want, got = [], []
    with make_engine(tiny_checkpoint("llama"), device, max_num_seqs=8, block_size=16) as engine:
        want = generate(engine, [prompt] * 4, params)
    with make_engine(
        tiny_checkpoint("llama"), device, max_num_seqs=8, block_size=16, speculative="ngram", num_draft_tokens=4, draft_budget=3
    ) as engine:
        most = 0
        for i in range(4):
            engine.add_request(request(str(i), prompt, params))
        answers: dict[str, list[int]] = {str(i): [] for i in range(4)}
        before = 0
        while engine.has_unfinished():
            for d in engine.step():
                answers[d.request_id] += d.new_token_ids
            drafted = engine.core_stats()["drafted"]
            most, before = max(most, drafted - before), drafted
        got = [answers[str(i)] for i in range(4)]
        assert 0 < most <= 3
    assert got == [a.tokens for a in want]


def test_settings_out_of_range_are_named(device: str) -> None:
    for bad in (
        {"speculative": "medusa"},
        {"speculative": "ngram", "num_draft_tokens": 0},
        {"speculative": "ngram", "num_draft_tokens": 65},
        {"speculative": "ngram", "ngram_min": 3, "ngram_max": 2},
        {"speculative": "ngram", "ngram_min": 0},
        {"speculative": "ngram", "draft_budget": -1},
        {"speculative": "ngram", "num_draft_tokens": True},
    ):
        with pytest.raises(ConfigError, match=r"speculative|num_draft_tokens|ngram_m|draft_budget"):
            make_engine("nowhere", device, **bad)
    assert SpeculativeSettings("ngram").resolved("toy", 0).num_draft_tokens == 4


def test_drafts_of_a_model_need_its_stages(device: str) -> None:
    assert SpeculativeSettings("dspark").resolved("toy", 5).num_draft_tokens == 5
    assert SpeculativeSettings("dspark", 2, temperatures=(1.0, 2.0)).resolved("toy", 5).num_draft_tokens == 2
    for settings, can, match in (
        (SpeculativeSettings("dspark"), 0, "toy has none"),
        (SpeculativeSettings("dspark", 6), 5, "above the 5 drafts"),
        (SpeculativeSettings("dspark", temperatures=(1.0, 2.0)), 5, "2 temperatures for 5 drafts"),
    ):
        with pytest.raises(ConfigError, match=match):
            settings.resolved("toy", can)


def test_lengths_are_counted_by_place() -> None:
    assert longer_than(np.array([0, 1, 3, 3, 9], np.int32), 4) == [4, 3, 3, 1]
    assert longer_than(np.array([], np.int32), 2) == [0, 0]


@pytest.mark.skipif(not has_smollm2(), reason="needs the demo model's package")
@pytest.mark.parametrize("overlap", [pytest.param(False, marks=pytest.mark.nightly, id="serial"), pytest.param(True, id="overlapped")])
def test_a_real_model_copies_in_fewer_steps(device: str, overlap: bool) -> None:
    from deepinfer import LLM

    text = "The red fox met the grey owl near the old mill. The grey owl asked the red fox for bread. " * 2
    prompts = [text + "The red fox met", "List the numbers: 1, 2, 3, 4, 5, 6, 7, 8, 9, 10. Again: 1, 2, 3,"]
    params = [SamplingParams(temperature=0, max_tokens=24, logprobs=1), SamplingParams(temperature=0.3, seed=5, max_tokens=24)]
    found, steps = [], []
    for speculative in (None, "ngram"):
        llm = LLM(
            "smollm2", device=device, dtype="float32", max_model_len=256, num_threads=1, speculative=speculative, zero_overhead=overlap
        )
        with llm:
            outputs = llm.generate(prompts, params)
            found.append([(o.outputs[0].token_ids, o.outputs[0].text, o.outputs[0].finish_reason) for o in outputs])
            steps.append(llm.engine.counters.steps)
    assert found[0] == found[1]
    assert steps[1] < 0.7 * steps[0]
