"""What goes wrong in one request or one step stays there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from deepinfer.engine.engine import Engine
from deepinfer.errors import (
    CapacityError,
    EmptyPromptError,
    EngineDeadError,
    InvalidRequestError,
    PromptTooLongError,
    TokenOutOfRangeError,
)
from deepinfer.sampling import SamplingParams
from engine_kit import VOCAB, collect, generate, make_engine, random_prompts, request, same_bits, tiny_checkpoint

P = SamplingParams(temperature=0, max_tokens=12, logprobs=-1, ignore_eos=True)


@pytest.fixture
def engine(device: str) -> Iterator[Engine]:
    with make_engine(tiny_checkpoint("llama"), device) as made:
        yield made


def at_rest(engine: Engine) -> bool:
    """Nothing held, parked or running: every block is free or cached, every state slot free."""
    for _ in range(3):  # completes what is in flight, and opens the fences of the last real step
        engine.step()
    counts = engine.core_counts()
    stats = engine.core_stats()
    return (
        not any(c["held"] or c["parked"] for c in [*counts["groups"], counts["slots"]])
        and all(c["free"] + c["cached"] + c["reserved"] == c["total"] for c in [*counts["groups"], counts["slots"]])
        and not stats["running"]
        and not stats["waiting"]
    )


def fail_once(engine: Engine, monkeypatch: pytest.MonkeyPatch, error: BaseException, at: int) -> None:
    """Makes the forward of the ``at``-th step from now raise."""
    forward, left = engine.model.forward, [at]

    def broken(*args: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            raise error
        return forward(*args)

    monkeypatch.setattr(engine.model, "forward", broken)


def test_a_failed_step_fails_its_requests_and_no_others(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = random_prompts((70, 20))
    want = generate(engine, prompts, P)
    for i, prompt in enumerate(prompts):
        engine.add_request(request(f"in {i}", prompt, P, stream=i == 0))
    fail_once(engine, monkeypatch, RuntimeError("out of luck"), at=4)
    seen: dict[str, list[int]] = {"in 0": [], "in 1": []}
    ends = {}
    while engine.has_unfinished():
        for d in engine.step():
            seen[d.request_id] += d.new_token_ids
            if d.finish_reason:
                ends[d.request_id] = d
        if len(ends) == 2 and not engine.has_unfinished():
            break
    assert {d.finish_reason for d in ends.values()} == {"error"}
    assert all("RuntimeError: out of luck" in (d.error or "") for d in ends.values())
    assert seen["in 0"] == want[0].tokens[:3] and seen["in 1"] == want[1].tokens[:3]  # what was made before stays made
    assert engine.last_failure is not None and isinstance(engine.last_failure.__cause__, RuntimeError)
    assert at_rest(engine)
    assert all(map(same_bits, want, generate(engine, prompts, P)))


def test_a_waiting_request_outlives_a_failed_step(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = random_prompts((30, 30))
    with make_engine(tiny_checkpoint("llama"), device, max_num_seqs=1) as engine:
        want = generate(engine, prompts, P)
        fail_once(engine, monkeypatch, RuntimeError("once"), at=2)
        got = generate(engine, prompts, P)
    assert got[0].finish == "error" and same_bits(want[1], got[1])


def test_a_failed_prefill_leaves_nothing_to_hit(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """KV of a step that did not complete must never be matched."""
    prompt = random_prompts([200], seed=3)
    clean = generate(engine, random_prompts([200], seed=3), P.clone(max_tokens=1))
    del clean
    other = random_prompts([200], seed=4)
    fail_once(engine, monkeypatch, RuntimeError("once"), at=1)
    assert generate(engine, other, P)[0].finish == "error"
    after = generate(engine, other, P)[0]
    assert after.cached_tokens == 0
    assert generate(engine, prompt, P)[0].cached_tokens == 192


@pytest.mark.parametrize("at", [1, 2, 5])
def test_an_interrupt_leaves_an_empty_working_engine(engine: Engine, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    prompts = random_prompts((70, 20, 5))
    want = generate(engine, prompts, P)
    fail_once(engine, monkeypatch, KeyboardInterrupt(), at)
    with pytest.raises(KeyboardInterrupt):
        generate(engine, prompts, P)
    assert not engine.has_unfinished() and at_rest(engine)
    assert all(map(same_bits, want, generate(engine, prompts, P)))


@pytest.mark.parametrize("steps", [0, 1, 2, 4])
def test_abort_in_any_phase_returns_all_blocks(device: str, steps: int) -> None:
    prompts = random_prompts((90, 20), seed=steps)
    with make_engine(tiny_checkpoint("llama"), device, max_num_batched_tokens=32) as engine:
        want = generate(engine, prompts[1:], P)[0]
        engine.add_request(request("gone", prompts[0], P, stream=True))
        engine.add_request(request("stays", prompts[1], P))
        for _ in range(steps):
            engine.step()
        engine.abort("gone")
        engine.abort("gone")
        engine.abort("never was")
        answers = collect(engine)
        assert set(answers) == {("stays", 0)} and same_bits(answers["stays", 0], want)
        engine.step()
        assert at_rest(engine)


def test_aborted_prefill_then_the_same_prompt_gives_the_uncached_result(device: str) -> None:
    prompt = random_prompts([200], seed=11)[0]
    with make_engine(tiny_checkpoint("llama"), device, enable_prefix_caching=False) as engine:
        want = generate(engine, [prompt], P)[0]
    for steps in range(1, 6):
        with make_engine(tiny_checkpoint("llama"), device, max_num_batched_tokens=48, max_num_seqs=4) as engine:
            engine.add_request(request("gone", prompt, P))
            for _ in range(steps):
                engine.step()
            engine.abort("gone")
            assert same_bits(want, generate(engine, [prompt], P)[0])


def test_stop_at_drops_what_was_made_beyond(engine: Engine) -> None:
    prompts = random_prompts((40, 40))
    want = generate(engine, prompts, P)
    engine.add_request(request("cut", prompts[0], P, stream=True))
    engine.add_request(request("whole", prompts[1], P))
    tokens: list[int] = []
    answers = {}
    while engine.has_unfinished():
        for d in engine.step():
            if d.request_id == "cut":
                tokens += d.new_token_ids
                assert d.finish_reason is None
                if len(tokens) == 5:
                    engine.stop_at("cut", 0, 4)
            else:
                answers[d.request_id] = d
    assert tokens == want[0].tokens[:5] and answers["whole"].new_token_ids == want[1].tokens
    engine.step()
    assert at_rest(engine)


def test_eos_and_stop_ids_end_with_the_token_that_ended(engine: Engine) -> None:
    prompt = random_prompts([30])
    free = generate(engine, prompt, P)[0].tokens
    stop = next(t for i, t in enumerate(free) if i >= 3 and t not in free[:i])
    cut = free[: free.index(stop) + 1]
    p = P.clone(ignore_eos=False)
    for answer in (
        generate(engine, prompt, p, eos_ids=(stop,))[0],
        generate(engine, prompt, p.clone(stop_token_ids=[stop]))[0],
        generate(engine, prompt, P.clone(stop_token_ids=[stop]), eos_ids=(free[0],))[0],
    ):
        assert answer.tokens == cut and answer.finish == "stop" and len(answer.logprobs) == len(cut)
    assert generate(engine, prompt, P, eos_ids=(stop,))[0].finish == "length"
    masked = generate(engine, prompt, p.clone(min_tokens=8), eos_ids=(stop,))[0]
    assert stop not in masked.tokens[:8] and masked.tokens[: len(cut) - 1] == cut[:-1]


def test_streamed_and_unstreamed_answers_are_the_same(engine: Engine) -> None:
    prompts = random_prompts((30, 80))
    whole = generate(engine, prompts, P)
    streamed = generate(engine, prompts, P, stream=True)
    assert all(map(same_bits, whole, streamed))
    assert [a.deltas for a in whole] == [1, 1] and [a.deltas for a in streamed] == [12, 12]


@pytest.mark.parametrize(
    ("prompt", "error"),
    [([], EmptyPromptError), ([3, VOCAB], TokenOutOfRangeError), ([3, -1], TokenOutOfRangeError), ([3] * 600, PromptTooLongError)],
)
def test_bad_prompts_are_refused_and_disturb_nobody(engine: Engine, prompt: list[int], error: type[Exception]) -> None:
    good = random_prompts([20])
    want = generate(engine, good, P)[0]
    engine.add_request(request("good", good[0], P))
    engine.step()
    with pytest.raises(error):
        engine.add_request(request("bad", prompt, P))
    with pytest.raises(error):
        engine.logits(prompt)
    answers = collect(engine)
    assert set(answers) == {("good", 0)} and same_bits(answers["good", 0], want)


def test_a_request_that_could_never_fit_is_refused_at_once(device: str) -> None:
    with make_engine(tiny_checkpoint("llama"), device, block_size=16, num_kv_blocks=4) as engine:
        with pytest.raises(PromptTooLongError):
            engine.add_request(request("big", random_prompts([100])[0], P))
        assert generate(engine, random_prompts([20]), P)[0].finish == "length"


def test_a_request_id_is_used_once_at_a_time(engine: Engine) -> None:
    prompt = random_prompts([20])[0]
    engine.add_request(request("a", prompt, P))
    with pytest.raises(InvalidRequestError, match="'a'"):
        engine.add_request(request("a", prompt, P))
    assert collect(engine)["a", 0].finish == "length"
    engine.add_request(request("a", prompt, P))
    assert collect(engine)["a", 0].finish == "length"


def test_seeds_must_match_the_number_of_answers(engine: Engine) -> None:
    with pytest.raises(InvalidRequestError, match="n=2"):
        engine.add_request(request("a", [3, 4], SamplingParams(n=2), seeds=(1,)))


def test_a_closed_engine_says_so(device: str) -> None:
    engine = make_engine(tiny_checkpoint("llama"), device)
    engine.add_request(request("a", [3, 4, 5], P))
    engine.close()
    engine.close()
    for call in (engine.step, lambda: engine.add_request(request("b", [3], P)), lambda: engine.logits([3])):
        with pytest.raises(EngineDeadError):
            call()


def test_a_pool_that_cannot_be_had_names_the_setting(device: str) -> None:
    with pytest.raises(CapacityError, match="num_kv_blocks"):
        make_engine(tiny_checkpoint("llama"), device, num_kv_blocks=1 << 40)
    with pytest.raises(CapacityError, match="max_model_len"):
        make_engine(tiny_checkpoint("llama"), device, max_model_len=100_000)


def test_the_start_says_what_fits(device: str, capsys: pytest.CaptureFixture[str]) -> None:
    make_engine(tiny_checkpoint("llama"), device, quiet=False).close()
    text = capsys.readouterr().err
    assert "16,384 tokens in 256 blocks of 64" in text and "32 at the full length of 512" in text and "weights" in text
