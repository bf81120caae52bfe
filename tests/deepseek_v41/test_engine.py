"""DeepSeek-V4.1 behind the engine: the same bits in every arrangement of batch, chunks, memory and drafts."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch

from deepinfer.engine.engine import Engine
from deepinfer.errors import ConfigError, InvalidRequestError
from deepinfer.models.deepseek_v41.forward import DeepseekV41Model
from deepinfer.models.deepseek_v41.make_checkpoint import make_checkpoint
from deepinfer.sampling import SamplingParams
from deepseek_v41.weights_kit import config
from engine_kit import Answer, collect, generate, make_engine, random_prompts, request, same_bits, tiny_checkpoint
from roles_kit import Pair
from scripted_kit import Scripted

K = 5
PROMPTS = random_prompts([40, 23, 5, 30], seed=2, vocab=2000)
LONG = random_prompts([101, 23], seed=3, vocab=2000)
KINDS = [
    SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=2),
    SamplingParams(temperature=0.9, max_tokens=12, ignore_eos=True, logprobs=1),
    SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=1),
    SamplingParams(temperature=1.1, top_p=0.9, max_tokens=12, ignore_eos=True, logprobs=0),
]


@cache
def checkpoint(name: str = "tiny") -> str:
    """Directory of a random checkpoint in the released form."""
    where = Path(mkdtemp(prefix=f"{name}-")) / "model"
    make_checkpoint(config(name), where, seed=3)
    return str(where)


def engine_of(name: str, device: str, **settings: Any) -> Engine:
    values = {"max_num_seqs": 8, "block_size": 16, "max_model_len": 128, "num_kv_blocks": 60, **settings}
    return make_engine(checkpoint(name), device, **values)


@cache
def plain(device: str) -> list[Answer]:
    """Every request by itself, one step at a time."""
    with engine_of("tiny", device, zero_overhead=False) as engine:
        return [generate(engine, [prompt], kind)[0] for prompt, kind in zip(PROMPTS, KINDS, strict=True)]


ARRANGEMENTS: dict[str, dict[str, Any]] = {
    "together": {},
    "chunks": {"max_num_batched_tokens": 24, "zero_overhead": False},
    "bfloat16 rows": {"kv_cache_dtype": "bfloat16", "block_size": 32},
}


@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
def test_every_arrangement_gives_the_same_bits(arrangement: str, device: str) -> None:
    with engine_of("tiny", device, **ARRANGEMENTS[arrangement]) as engine:
        answers = generate(engine, PROMPTS, KINDS)
        assert engine.last_failure is None and engine._core.check() is None
    for kind, a, b in zip(KINDS, answers, plain(device), strict=True):
        assert same_bits(a, b), kind


def test_preemption_leaves_no_trace(device: str) -> None:
    prompts, kinds = random_prompts([6, 9, 7], seed=6, vocab=2000), [replace(kind, max_tokens=32) for kind in KINDS[:3]]
    with engine_of("tiny", device) as engine:
        want = generate(engine, prompts, kinds, max_new=32)
    for swapped, more in ((False, {"swap_space_gib": 0, "enable_prefix_caching": False}), (True, {"swap_space_gib": 0.02})):
        with engine_of("tiny", device, num_kv_blocks=8, **more) as engine:
            if swapped:
                engine._core.set_rates(1e15, 1.0)  # a copy is always the cheaper way back
            answers, stats = generate(engine, prompts, kinds, max_new=32), engine.core_stats()
            assert stats["preemptions"] > 0 and (stats["swapped_out"] > 0) is swapped, stats
            assert engine.last_failure is None and engine._core.check() is None
        for kind, a, b in zip(kinds, answers, want, strict=True):
            assert same_bits(a, b), (swapped, kind)


@pytest.mark.parametrize("overlap", [False, True], ids=["serial", "overlapped"])
def test_drafts_leave_no_trace(overlap: bool, device: str) -> None:
    patterns = list(product([True, False], repeat=K))
    with engine_of("tiny", device, zero_overhead=overlap, speculative="ngram", num_draft_tokens=K) as engine:
        truth = {str(i): answer.tokens for i, answer in enumerate(plain(device))}
        script = Scripted(engine, truth, lambda name, turn: patterns[(turn * 11 + int(name) * 5) % len(patterns)])
        engine._loop.drafting = script
        answers = generate(engine, PROMPTS, KINDS)
        assert engine.core_stats()["accepted"] > 0
    for kind, a, b in zip(KINDS, answers, plain(device), strict=True):
        assert same_bits(a, b), kind


def states(engine: Engine, names: list[str]) -> dict[str, dict[str, torch.Tensor]]:
    """The replica of each request's state, as bytes."""
    model = engine.model
    assert isinstance(model, DeepseekV41Model)
    fields = model.caches.views(engine._runner.kv.tensors["state0"], replica=True)
    found = {}
    for name in names:
        (handle,) = engine._answers.requests[name]
        info = engine._core.info(handle)
        assert info is not None
        slot = info["state_slot"]
        found[name] = {field: rows[slot].contiguous().view(torch.uint8).cpu().clone() for field, rows in fields.items()}
    return found


def settle(engine: Engine) -> None:
    """Returns when the device has done what it was given."""
    engine._runner.in_order(lambda: None)()


def run_until(engine: Engine, names: list[str], tokens: int) -> None:
    """Steps until all have made so many tokens at least; they go on."""
    for _ in range(200):
        engine.step()
        made = [engine._core.info(engine._answers.requests[name][0]) for name in names]
        if all(info is not None and info["output_tokens"] >= tokens for info in made):
            settle(engine)
            return
    raise AssertionError("the sequences do not move")


def test_copies_at_boundaries_do_not_know_of_drafts(device: str) -> None:
    """Requests that differ in how many drafts are right, in one batch, with a step in flight: the boundary at 32 is passed in many ways."""
    prompt, params = PROMPTS[1], SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    names = [str(right) for right in range(K + 1)]
    with engine_of("tiny", device, block_size=32) as engine:
        engine.add_request(request("whole", prompt, params, max_new=30))
        truth = collect(engine)["whole", 0].tokens
        engine.add_request(request("0", prompt, params, max_new=30))
        run_until(engine, ["0"], 11)
        wanted = states(engine, ["0"])["0"]
    with engine_of("tiny", device, block_size=32, speculative="ngram", num_draft_tokens=K) as engine:
        engine._loop.drafting = Scripted(
            engine, dict.fromkeys(names, truth), lambda name, turn: [True] * int(name) + [False] * (K - int(name))
        )
        for right in names:
            engine.add_request(request(right, prompt, params, max_new=30))
        seen: set[str] = set()
        for _ in range(20):
            engine.step()
            settle(engine)
            for name in set(names) - seen:
                info = engine._core.info(engine._answers.requests[name][0])
                assert info is not None
                if info["computed_tokens"] >= 32:  # the next boundary is more than two steps away
                    replica = states(engine, [name])[name]
                    assert [field for field, rows in wanted.items() if not torch.equal(replica[field], rows)] == [], (name, info)
                    seen.add(name)
            if seen == set(names):
                break
        assert seen == set(names)


def test_forks_are_answers_of_their_own(device: str) -> None:
    params = SamplingParams(temperature=0.8, n=3, max_tokens=10, ignore_eos=True)
    with engine_of("tiny", device) as engine:
        engine.add_request(request("forks", PROMPTS[0], params, seeds=[5, 6, 7]))
        engine.add_request(request("beside", PROMPTS[1], KINDS[1]))
        forks = collect(engine)
        single = SamplingParams(temperature=0.8, max_tokens=10, ignore_eos=True)
        for i in range(3):
            engine.add_request(request(f"alone {i}", PROMPTS[0], single, seeds=[5 + i]))
        alone = collect(engine)
        assert engine._core.check() is None
    for i in range(3):
        assert forks["forks", i].tokens == alone[f"alone {i}", 0].tokens
    assert len({tuple(forks["forks", i].tokens) for i in range(3)}) == 3


@pytest.mark.parametrize("truncation", ["off", "compact"])
def test_states_are_handed_over(truncation: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts in one engine, what follows in another: windows, raw compressor rows and ids go along."""
    prompts = [LONG[0], PROMPTS[1]]
    settings: dict[str, Any] = {"max_model_len": 128, "yoco_prefill_truncation": truncation, "yoco_prefill_keep_tokens": 30}
    with engine_of("tiny", device, yoco_prefill_truncation=truncation, yoco_prefill_keep_tokens=30) as engine:
        want = generate(engine, prompts, KINDS[:2])
    pair = Pair(monkeypatch, device, model=checkpoint(), **settings)
    for i, (prompt, kind) in enumerate(zip(prompts, KINDS, strict=False)):
        pair.prompt.add_request(request(str(i), prompt, kind))
    pair.run(seconds=200)
    assert not pair.refused
    for i, answer in enumerate(want):
        assert same_bits(pair.answers[str(i)], answer), i
    pair.check_rest()
    pair.close()


def test_long_prompts_in_blocks_of_a_window(device: str) -> None:
    prompts = random_prompts([300, 517], seed=5, vocab=2000)
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, logprobs=1)
    settings: dict[str, Any] = {"block_size": None, "max_model_len": 1024, "num_kv_blocks": 12}
    answers = []
    for more in ({"max_num_batched_tokens": 1024}, {"max_num_batched_tokens": 190, "zero_overhead": False}, {"num_kv_blocks": 6}):
        with engine_of("tiny128", device, **{**settings, **more}) as engine:
            assert engine.plan.block_tokens == 128
            answers.append(generate(engine, prompts, params))
    for others in answers[1:]:
        assert all(same_bits(a, b) for a, b in zip(others, answers[0], strict=True))


def test_truncated_prefills(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = [KINDS[1], KINDS[0]]
    with engine_of("tiny", device) as engine:
        whole = generate(engine, LONG, kinds)
    answers = []
    for mode, more in (
        ("mask", {}),
        ("compact", {"num_kv_blocks": 9, "swap_space_gib": 0, "max_num_batched_tokens": 40, "enable_prefix_caching": False}),
    ):
        with engine_of("tiny", device, yoco_prefill_truncation=mode, yoco_prefill_keep_tokens=30, **more) as engine:
            answers.append(generate(engine, LONG, kinds))
            with pytest.raises(InvalidRequestError, match=r"prompt_logprobs need every row .*='off'"):
                engine.add_request(request("x", LONG[0], SamplingParams(prompt_logprobs=1, max_tokens=1)))
    assert all(same_bits(a, b) for a, b in zip(*answers, strict=True))
    assert [same_bits(a, b) for a, b in zip(answers[0], whole, strict=True)] == [False, True]  # the second is no longer than what is kept
    monkeypatch.setenv("YOCO_PREFILL_TRUNCATION_MODE", "compact")
    monkeypatch.setenv("YOCO_PREFILL_KEEP_TOKENS", "76")  # the exact bound: 5 decoder layers, windows of 16
    with engine_of("tiny", device) as engine:
        assert engine.options.truncation == "compact" and engine.options.keep_tokens == 76
        assert all(same_bits(a, b) for a, b in zip(generate(engine, LONG, kinds), whole, strict=True))


def test_settings_of_compressed_caches(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="yoco_prefill_truncation is a setting of models with compressed caches"):
        make_engine(tiny_checkpoint("llama"), device, yoco_prefill_truncation="mask")
    monkeypatch.setenv("YOCO_PREFILL_TRUNCATION_MODE", "mask")
    make_engine(tiny_checkpoint("llama"), device).close()  # a variable speaks of the models it is for
    with pytest.raises(ConfigError, match=r"yoco_prefill_keep_tokens 20 .* at least 22"):
        engine_of("tiny", device, yoco_prefill_keep_tokens=20)
    monkeypatch.setenv("YOCO_PREFILL_TRUNCATION_MODE", "some")
    for name in ("YOCO_PREFILL_KEEP_TOKENS", "MAX_BACKTRACKING_TOKENS"):
        with monkeypatch.context() as patch, pytest.raises(ConfigError, match=rf"{name}='1180591620717411303424' .* at most"):
            patch.setenv("YOCO_PREFILL_TRUNCATION_MODE", "mask")
            patch.setenv(name, str(2**70))
            engine_of("tiny", device)
    with pytest.raises(ConfigError, match="yoco_prefill_keep_tokens must be at most 1073741823"):
        engine_of("tiny", device, yoco_prefill_keep_tokens=2**70)
    with pytest.raises(ConfigError, match=r"YOCO_PREFILL_TRUNCATION_MODE='some' .* off, mask, compact"):
        engine_of("tiny", device)
    with pytest.raises(ConfigError, match="kv_cache_dtype must be one of"):
        engine_of("tiny", device, kv_cache_dtype="int4")
    with pytest.raises(ConfigError, match="kv_cache_dtype='fp8' is for models of the Llama family"):
        engine_of("tiny", device, kv_cache_dtype="fp8")
