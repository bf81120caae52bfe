"""A busy engine, the same every time: arrivals, aborts, stops, forks, and a pool that is too small for all."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from deepinfer.engine.engine import Engine
from deepinfer.sampling import SamplingParams
from engine_kit import Answer, make_engine, random_prompts, request, same_bits, tiny_checkpoint

KINDS: list[SamplingParams] = [
    SamplingParams(max_tokens=17, temperature=0),
    SamplingParams(max_tokens=23, temperature=0, logprobs=3, ignore_eos=True),
    SamplingParams(max_tokens=9, temperature=0.9, top_k=30, seed=5, ignore_eos=True),
    SamplingParams(max_tokens=31, temperature=1.1, repetition_penalty=1.3, seed=6, ignore_eos=True),
    SamplingParams(max_tokens=12, temperature=0, min_tokens=4, prompt_logprobs=2),
]
"""Of everything that decides what a step of a sequence does."""


def arriving(engine: Engine, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], apart: int, **values: Any) -> list[Answer]:
    """Answers to requests that come some turns apart, so that steps of all kinds alternate. ``values``: of all requests."""
    found: dict[str, Answer] = {}
    todo = list(enumerate(zip(prompts, params, strict=True)))
    turn = 0
    while todo or engine.has_unfinished():
        if todo and turn % apart == 0:
            name, (prompt, one) = todo.pop(0)
            engine.add_request(request(str(name), prompt, one, **values))
        for d in engine.step():
            a = found.setdefault(d.request_id, Answer())
            a.tokens += d.new_token_ids
            a.logprobs += d.logprobs or []
            a.prompt_logprobs = d.prompt_logprobs or a.prompt_logprobs
            a.finish, a.error = d.finish_reason, d.error
        turn += 1
    return [found[str(i)] for i in range(len(prompts))]


def play(engine: Engine, seed: int) -> dict[tuple[str, int], Answer]:
    """Random arrivals, aborts and stops by what has been seen, which is the same whatever is in flight."""
    rng = random.Random(seed)
    lengths = [rng.randint(1, 40) for _ in range(14)]
    prompts = random_prompts(lengths, seed)
    answers: dict[tuple[str, int], Answer] = {}
    waiting = list(range(14))
    stops = {f"r{i}": rng.randint(1, 20) for i in range(0, 14, 4)}
    aborts = {f"r{i}": rng.randint(1, 10) for i in range(1, 14, 5)}
    steps = 0
    while waiting or engine.has_unfinished():
        if waiting and steps % 2 == 0:
            i = waiting.pop(0)
            p = SamplingParams(
                temperature=(0.0, 0.9)[i % 2],
                seed=i,
                n=2 if i % 6 == 5 else 1,
                max_tokens=30 + i % 5 * 8,
                logprobs=2,
                presence_penalty=0.5 if i % 3 == 2 else 0.0,
            )
            engine.add_request(request(f"r{i}", prompts[i], p, eos_ids=(3,), stream=i % 2 == 0, priority=i % 3))
        steps += 1
        for d in engine.step():
            a = answers.setdefault((d.request_id, d.index), Answer())
            assert a.finish is None
            a.tokens += d.new_token_ids
            a.logprobs += d.logprobs or []
            a.finish = d.finish_reason
            if d.finish_reason is None and len(a.tokens) >= stops.get(d.request_id, 1 << 30):
                engine.stop_at(d.request_id, d.index, stops[d.request_id])
                a.finish = "cut"
            if d.finish_reason is None and len(a.tokens) >= aborts.get(d.request_id, 1 << 30):
                engine.abort(d.request_id)
                for key in [k for k in answers if k[0] == d.request_id]:
                    answers[key].finish = answers[key].finish or "gone"
                aborts.pop(d.request_id)
    return answers


def same_play(one: dict[tuple[str, int], Answer], other: dict[tuple[str, int], Answer]) -> None:
    """Both have the same answers, as far as time does not decide about them."""
    assert one.keys() == other.keys()
    for key, want in one.items():
        got = other[key]
        if want.finish == "gone":  # how far an aborted one came is a matter of time
            n = min(len(want.tokens), len(got.tokens))
            assert want.tokens[:n] == got.tokens[:n]
        else:
            assert same_bits(want, got), key


def check_recorded_play(seed: int, record: Callable[[], None], replays: Callable[[Engine], int]) -> None:
    """A play on a CPU is the same, serial and overlapped, once ``record`` has had steps recorded; ``replays``: so far, of an engine."""
    settings = {"block_size": 16, "num_kv_blocks": 8, "max_num_seqs": 6, "max_num_batched_tokens": 40}
    with make_engine(tiny_checkpoint("llama"), "cpu", zero_overhead=False, **settings) as engine:
        want = play(engine, seed)
    record()
    for overlap in (False, True):
        with make_engine(tiny_checkpoint("llama"), "cpu", zero_overhead=overlap, **settings) as engine:
            same_play(want, play(engine, seed))
            assert replays(engine) > 10 and (seed > 1 or engine.core_stats()["preemptions"] > 0)
            for _ in range(3):
                engine.step()
            assert not engine.core_counts()["groups"][0]["held"] and engine._core.check() is None
