"""DeepSeek-V4 behind the engine: the same bits in every arrangement of batch, chunks, memory, drafts and hits; text through ``LLM``."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch

from deepinfer import LLM
from deepinfer.engine.engine import Engine
from deepinfer.errors import ConfigError
from deepinfer.sampling import SamplingParams
from deepseek_v41 import v4_kit
from deepseek_v41.v4 import SequentialV4
from engine_kit import Answer, collect, generate, make_engine, random_prompts, request, same_bits
from scripted_kit import Scripted
from text_kit import byte_level

K = 5
PROMPTS = random_prompts([70, 23, 5], seed=2, vocab=500)
KINDS = [
    SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, logprobs=2),
    SamplingParams(temperature=0.9, max_tokens=10, ignore_eos=True, logprobs=1),
    SamplingParams(temperature=1.1, top_p=0.9, max_tokens=10, ignore_eos=True, logprobs=0),
]


@cache
def weights() -> dict[str, torch.Tensor]:
    return v4_kit.weights(v4_kit.read_plan(v4_kit.config()), 3)


@cache
def checkpoint() -> str:
    """Directory of a checkpoint under the release's names, with a tokenizer."""
    where = v4_kit.write_checkpoint(Path(mkdtemp(prefix="tiny-v4-")), v4_kit.config(), weights())
    byte_level(512).backend.save(str(where / "tokenizer.json"))
    return str(where)


def engine_of(device: str, **settings: Any) -> Engine:
    values = {"max_num_seqs": 8, "block_size": 32, "max_model_len": 256, "num_kv_blocks": 40, **settings}
    return make_engine(checkpoint(), device, **values)


@cache
def plain(device: str) -> list[Answer]:
    """Every request by itself, one step at a time."""
    with engine_of(device, zero_overhead=False, enable_prefix_caching=False) as engine:
        return [generate(engine, [prompt], kind)[0] for prompt, kind in zip(PROMPTS, KINDS, strict=True)]


@pytest.mark.parametrize("settings", [{}, {"max_num_batched_tokens": 24, "zero_overhead": False}, {"block_size": 64}], ids=str)
def test_every_arrangement_gives_the_same_bits(settings: dict[str, Any], device: str) -> None:
    with engine_of(device, **settings) as engine:
        answers = generate(engine, PROMPTS, KINDS)
        assert engine.last_failure is None and engine._core.check() is None
    for kind, a, b in zip(KINDS, answers, plain(device), strict=True):
        assert same_bits(a, b), kind


def test_preemption_leaves_no_trace(device: str) -> None:
    prompts, kinds = random_prompts([29, 28, 31], seed=6, vocab=500), [replace(kind, max_tokens=20) for kind in KINDS]
    with engine_of(device) as engine:
        want = generate(engine, prompts, kinds, max_new=20)
    for swapped, more in ((False, {"swap_space_gib": 0, "enable_prefix_caching": False}), (True, {"swap_space_gib": 0.05})):
        with engine_of(device, num_kv_blocks=5, max_model_len=96, **more) as engine:
            if swapped:
                engine._core.set_rates(1e15, 1.0)  # a copy is always the cheaper way back
            answers, stats = generate(engine, prompts, kinds, max_new=20), engine.core_stats()
            assert stats["preemptions"] > 0 and (stats["swapped_out"] > 0) is swapped, stats
            assert engine.last_failure is None and engine._core.check() is None
        for kind, a, b in zip(kinds, answers, want, strict=True):
            assert same_bits(a, b), (swapped, kind)


def test_drafts_leave_no_trace(device: str) -> None:
    patterns = list(product([True, False], repeat=K))
    with engine_of(device, speculative="ngram", num_draft_tokens=K) as engine:
        truth = {str(i): answer.tokens for i, answer in enumerate(plain(device))}
        engine._loop.drafting = Scripted(engine, truth, lambda name, turn: patterns[(turn * 11 + int(name) * 5) % len(patterns)])
        answers = generate(engine, PROMPTS, KINDS)
        assert engine.core_stats()["accepted"] > 0
    for kind, a, b in zip(KINDS, answers, plain(device), strict=True):
        assert same_bits(a, b), kind


@pytest.mark.parametrize(
    ("settings", "reached"),
    [({}, ("start_snapshot", "snapshots_taken")), ({"state_snapshot_gib": 0, "zero_overhead": False}, ("start_rerun", "rerun_tokens"))],
    ids=["snapshots", "reruns"],
)
def test_hits_give_the_bits_of_the_whole_prompt(settings: dict[str, Any], reached: tuple[str, ...], device: str) -> None:
    """Windows of 16 tokens in 5 layers, and what overlaps: 6 · 15 + 1 = 91 tokens are computed again without a snapshot."""
    params = SamplingParams(temperature=0, max_tokens=5, logprobs=-1, ignore_eos=True)
    first, second = random_prompts([180, 200], seed=7, vocab=500)
    second = first[:140] + second[140:]

    def turns(engine: Engine) -> list[Answer]:
        made = generate(engine, [first, second], [params] * 2)
        longer = [[*p, *a.tokens, *p[:20]] for p, a in zip((first, second), made, strict=True)]
        return [*made, *generate(engine, [first, second], [params] * 2), *generate(engine, longer, [params] * 2)]

    with engine_of(device, enable_prefix_caching=False) as engine:
        want = turns(engine)
    with engine_of(device, **settings) as engine:
        found, stats = turns(engine), engine.core_stats()
        assert all(stats[name] > 0 for name in reached), stats
        assert engine._core.check() is None
    assert all(map(same_bits, want, found))


def test_forks_are_answers_of_their_own(device: str) -> None:
    params = SamplingParams(temperature=0.8, n=3, max_tokens=6, ignore_eos=True)
    with engine_of(device) as engine:
        engine.add_request(request("forks", PROMPTS[0], params, seeds=[5, 6, 7]))
        engine.add_request(request("beside", PROMPTS[1], KINDS[1]))
        forks = collect(engine)
        for i in range(3):
            engine.add_request(request(f"alone {i}", PROMPTS[0], params.clone(n=1), seeds=[5 + i]))
        alone = collect(engine)
        assert engine._core.check() is None
    assert all(forks["forks", i].tokens == alone[f"alone {i}", 0].tokens for i in range(3))


def llm(**settings: Any) -> LLM:
    return LLM(model=checkpoint(), device="cpu", dtype="float32", quiet=True, max_model_len=512, max_num_seqs=2, num_threads=1, **settings)


def test_text_comes_out_of_a_checkpoint() -> None:
    """On pages that the model chooses by itself; the tokens are the reference's."""
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    with llm() as made:
        (answer,) = made.generate(["the quick brown fox jumps over the lazy dog. stop"], params)
        logits = made.logits(answer.prompt_token_ids)
    tokens = list(answer.prompt_token_ids)
    reference = SequentialV4(v4_kit.read_plan(v4_kit.config()), weights())
    wanted = reference.forward(torch.tensor(tokens)).logits
    assert float((torch.as_tensor(logits) - wanted).abs().max()) <= 1e-5
    for token in answer.outputs[0].token_ids:
        row = reference.forward(torch.tensor(tokens)).logits[-1]
        assert float(row[token]) >= float(row.max()) - 1e-5
        tokens.append(token)
    assert answer.outputs[0].text


def test_random_weights_answer_too() -> None:
    with llm(load_format="dummy", seed=4) as made:
        (answer,) = made.generate([{"prompt_token_ids": PROMPTS[1]}], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    assert len(set(answer.outputs[0].token_ids)) > 1


def test_settings_of_other_families_are_refused() -> None:
    for setting, message in (
        ({"yoco_prefill_truncation": "compact"}, "yoco_prefill_truncation='compact' .* leave it 'off'"),
        ({"kv_cache_dtype": "packed"}, "kv_cache_dtype='packed' is not implemented for DeepSeek-V4"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype='fp8' is for models of the Llama family"),
        ({"block_size": 16}, "pages of 16 tokens cut the entries of layer 3"),
        ({"speculative": "dspark"}, "dspark"),
    ):
        with pytest.raises(ConfigError, match=message):
            llm(**setting)
