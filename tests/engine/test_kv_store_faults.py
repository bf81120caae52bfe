"""A store that fails, hangs, lies or is slow, and requests that end meanwhile: misses and counters, nothing left behind."""

from __future__ import annotations

import random
import select
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from deepinfer.engine.engine import Engine
from deepinfer.errors import EngineDeadError
from deepinfer.sampling import SamplingParams
from engine_kit import Answer, collect, make_engine, random_prompts, request, same_bits, tiny_checkpoint
from store_kit import Tier, ask, at_rest

P = SamplingParams(temperature=0, max_tokens=6, logprobs=4, ignore_eos=True)
PROMPT, OTHER = random_prompts((450, 40), seed=11)


def make(device: str, tier: Any, cls: type[Engine] = Engine, **settings: Any) -> Any:
    small = {"block_size": 16, "max_num_batched_tokens": 96}
    if tier is None:
        return make_engine(tiny_checkpoint("llama"), device, **{**small, **settings})
    from deepinfer.engine.config import EngineConfig

    base = {"dtype": "float32", "num_kv_blocks": 256, "quiet": True, "num_threads": 1}
    return cls(EngineConfig(model=tiny_checkpoint("llama"), device=device, **{**base, **small, **settings}), store=tier)


@pytest.fixture(scope="module")
def right(device: str) -> Answer:
    with make(device, None, enable_prefix_caching=False, zero_overhead=False) as engine:
        return ask(engine, PROMPT, P)


@pytest.fixture
def tier(device: str, right: Answer) -> Iterator[Tier]:
    """With the prompt's objects in it."""
    made = Tier()
    with make(device, made) as engine:
        assert same_bits(ask(engine, PROMPT, P), right)
    assert made.stats()["blocks"] == 3
    yield made
    made.gate.set()


class Odd(BaseException):
    """No error that anybody knows."""


@pytest.mark.parametrize("overlap", [pytest.param(False, marks=pytest.mark.nightly), True])
@pytest.mark.parametrize(
    ("call", "wrong", "counted"),
    [
        ("check", OSError("gone"), {"faults": 1}),
        ("check", Odd("odd"), {"faults": 1}),
        ("check", lambda _: None, {"faults": 1}),
        ("check", lambda _: (99, [], 0), {"faults": 1}),
        ("check", lambda found: (found[0], [-1], 0), {"faults": 1}),
        ("get", OSError("gone"), {"faults": 1, "lost": 3}),
        ("get", Odd("odd"), {"faults": 1, "lost": 3}),
        ("get", lambda hits: bytes(len(hits)), {"faults": 0, "lost": 3}),
        ("get", lambda hits: hits[:-1], {"faults": 0, "lost": 3}),
        ("get", lambda _: "yes", {"faults": 0, "lost": 3}),
        ("get", lambda hits: hits[:2] + b"\0", {"faults": 0, "lost": 1, "fetched": 2}),
        ("get", lambda hits: b"\0" + hits[1:], {"faults": 0, "lost": 3, "fetched": 0}),
    ],
)
def test_a_tier_that_fails_or_lies_is_a_miss(
    call: str, wrong: Any, counted: dict[str, int], overlap: bool, tier: Tier, right: Answer, device: str
) -> None:
    tier.broken = {call: wrong}
    with make(device, tier, zero_overhead=overlap) as engine:
        found = ask(engine, PROMPT, P)
        counters = engine.metrics().store
        assert same_bits(found, right) and found.cached_tokens == 128 * counters["fetched"]
        assert {name: counters[name] for name in counted} == counted and at_rest(engine)
        tier.broken = {}
        assert same_bits(ask(engine, PROMPT, P, "again"), right)


@pytest.mark.parametrize(
    ("wrong", "failed", "faults"),
    [
        (OSError("disk full"), 3, 2),
        (lambda said: b"f" * len(said), 3, 0),
        (lambda said: b"p" * len(said), 3, 0),
        (lambda said: said + b"s", 3, 2),
        (lambda said: b"c" * len(said), 0, 0),
    ],
)
def test_a_tier_that_takes_nothing_is_counted_and_asked_again(wrong: Any, failed: int, faults: int, right: Answer, device: str) -> None:
    tier = Tier()
    tier.broken = {"put": wrong}
    with make(device, tier) as engine:
        assert same_bits(ask(engine, PROMPT, P), right)
        counters = engine.metrics().store
        assert counters["failed"] >= failed and (counters["conflicts"] > 0) is (failed == 0) and (counters["faults"] > 0) is (faults > 0)
        assert at_rest(engine)
        tier.broken = {}
        before = tier.stats()
        ask(engine, PROMPT, P, "again")
        # What could not be stored is stored when its chain is complete the next time; what is there is not.
        assert (tier.stats()["stored"] - before["stored"] + tier.stats()["exists"] - before["exists"] > 0) is (failed > 0)


def test_a_tier_that_hangs_is_waited_for_no_longer_than_it_may_be(tier: Tier, right: Answer, device: str) -> None:
    tier.gate.clear()
    with make(device, tier, kv_prefetch="timeout", kv_prefetch_timeout=0.3) as engine:
        begin = time.monotonic()
        found = ask(engine, PROMPT, P)
        assert 0.3 <= time.monotonic() - begin < 10
        counters = engine.metrics().store
        assert same_bits(found, right) and found.cached_tokens == 0
        assert (counters["waits"], counters["leases"], counters["fetched"]) == (1, 1, 0) and at_rest(engine)
        # While it hangs nobody is made to wait for it any more.
        assert ask(engine, [*OTHER, *PROMPT], P, "other").finish == "length"
        counters = engine.metrics().store
        assert (counters["waits"], counters["skipped"]) == (1, 1)
        tier.gate.set()
        while engine._store._fetches._jobs:
            engine.step()
        assert engine.metrics().store["skipped"] == 1 and at_rest(engine)


def test_what_came_in_time_counts(tier: Tier, right: Answer, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of one object, the first two at once and the third never."""
    monkeypatch.setattr("deepinfer.engine.kv_store.staging._BUFFER_BYTES", 1)
    calls = iter(range(10))
    tier.broken = {"get": lambda hits: hits if next(calls) < 2 else time.sleep(1.5) or hits}
    with make(device, tier, kv_prefetch_timeout=0.5) as engine:
        found = ask(engine, PROMPT, P)
        assert same_bits(found, right) and found.cached_tokens == 256
        counters = engine.metrics().store
        assert (counters["fetched"], counters["leases"], counters["store_tokens"]) == (2, 1, 256) and at_rest(engine)


def test_best_effort_waits_for_nothing_and_uses_what_came(tier: Tier, right: Answer, device: str) -> None:
    tier.gate.clear()
    with make(device, tier, kv_prefetch="best_effort") as engine:
        assert same_bits(ask(engine, PROMPT, P), right)
        assert engine.metrics().store["waits"] == 0
        tier.gate.set()
    with make(device, tier, kv_prefetch="best_effort", max_num_seqs=1) as engine:
        engine.add_request(request("long", OTHER, P.clone(max_tokens=300, logprobs=None)))
        engine.step()
        engine.add_request(request("r", PROMPT, P))  # the only lane is taken
        answers = collect(engine)
        assert same_bits(answers["r", 0], right) and answers["r", 0].cached_tokens == 384
        assert engine.metrics().store["fetched"] == 3 and at_rest(engine)


@pytest.mark.parametrize("overlap", [pytest.param(False, marks=pytest.mark.nightly), True])
@pytest.mark.parametrize("phase", ["before the first step", "lookup", "fetch", "queued"])
def test_an_abort_in_any_phase_leaves_nothing(phase: str, overlap: bool, tier: Tier, right: Answer, device: str) -> None:
    looked = threading.Event()
    if phase == "lookup":
        tier.broken = {"check": lambda found: looked.wait(10) and found}
    tier.gate.clear()
    with make(device, tier, zero_overhead=overlap, max_num_seqs=1) as engine:
        if phase == "queued":
            engine.add_request(request("before", OTHER, P.clone(max_tokens=40)))
        engine.add_request(request("r", PROMPT, P))
        if phase != "before the first step":
            for _ in range(20):
                engine.step()
                time.sleep(0.005)
        if phase in ("fetch", "queued"):
            assert engine.core_stats()["fetches"] == 1
        if phase == "queued":
            tier.gate.set()
            while not engine.metrics().store["fetched"]:
                engine.step()
        engine.abort("r")
        collect(engine)
        assert at_rest(engine) and not engine._store.waiting
        looked.set()
        tier.gate.set()
        assert same_bits(ask(engine, PROMPT, P, "again"), right) and at_rest(engine)


def test_an_interrupt_in_the_middle_of_a_fetch_leaves_an_empty_engine(tier: Tier, right: Answer, device: str) -> None:
    class Interrupted(Engine):
        at = 3

        def post_schedule(self, slot: int) -> None:
            self.at -= 1
            if not self.at:
                raise Odd("stop")

    tier.gate.clear()
    with make(device, tier, Interrupted) as engine:
        engine.add_request(request("a", OTHER, P.clone(max_tokens=30)))
        engine.add_request(request("r", PROMPT, P))
        with pytest.raises(Odd):
            for _ in range(1000):
                engine.step()
        assert not engine.has_unfinished() and at_rest(engine)
        tier.gate.set()
        assert same_bits(ask(engine, PROMPT, P), right) and at_rest(engine)


class InHook(Engine):
    """Interrupted where it is told of a save."""

    def pe_prepare_save_kvcache(self, save: Any) -> None:
        if save.what == "store":
            raise Odd("in a hook")


def test_an_interrupt_in_a_hook_of_a_save_holds_nothing(device: str) -> None:
    with make(device, Tier(), InHook) as engine:
        engine.add_request(request("r", PROMPT, P))
        with pytest.raises(Odd):
            collect(engine)
        with suppress(Odd):
            assert at_rest(engine)
        assert engine._core.check() is None and not engine.has_unfinished()


@pytest.mark.parametrize("end", ["close", "dies"])
def test_the_end_comes_while_everything_is_on_its_way(end: str, tier: Tier, device: str, right: Answer) -> None:
    tier.gate.clear()
    threads = threading.active_count()
    engine = make(device, tier)
    engine.add_request(request("saved", [*OTHER, *PROMPT[:200]], P.clone(max_tokens=1)))
    while engine._answers.by_handle:
        engine.step()
    engine.add_request(request("r", PROMPT, P))
    for _ in range(5):
        engine.step()
        time.sleep(0.005)
    assert engine._store.waiting
    if end == "dies":
        with suppress(EngineDeadError):
            engine._core.inject_fault("a fault")
        with pytest.raises(EngineDeadError):
            engine.step()
    begin = time.monotonic()
    engine.close()
    assert time.monotonic() - begin < 3
    tier.gate.set()
    until = time.monotonic() + 5
    while threading.active_count() > threads and time.monotonic() < until:
        time.sleep(0.01)
    assert threading.active_count() <= threads, threading.enumerate()
    if end == "close":
        assert tier.stats()["blocks"] == 4, "what was complete is written out"
    with make(device, tier) as again:
        assert same_bits(ask(again, PROMPT, P), right)


def test_chains_are_given_up_where_the_store_takes_them_too_slowly(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deepinfer.engine.kv_store.staging._BUFFER_BYTES", 1)
    gate, tier = threading.Event(), Tier()
    tier.broken = {"put": lambda said: gate.wait(20) and said}
    prompts = random_prompts([300] * 8, seed=21)
    with make(device, tier, num_kv_blocks=64) as engine:
        for n, prompt in enumerate(prompts):
            engine.add_request(request(str(n), prompt, P))
            assert collect(engine)[str(n), 0].finish == "length"
        counters = engine.metrics().store
        assert counters["dropped"] > 0
        gate.set()
        assert at_rest(engine)


@pytest.mark.parametrize(("blocks", "prefetch"), [(30, "wait"), (40, "wait"), (40, "timeout")])
def test_a_pool_with_little_room_still_moves_on(blocks: int, prefetch: str, tier: Tier, right: Answer, device: str) -> None:
    """Blocks are reserved for a fetch only where there is room; without, prompts are computed."""
    with make(device, tier, num_kv_blocks=blocks, kv_prefetch=prefetch, swap_space_gib=0, max_model_len=456) as engine:
        for n in range(3):
            engine.add_request(request(f"o{n}", OTHER, P.clone(max_tokens=60, logprobs=None)))
            engine.add_request(request(f"r{n}", PROMPT, P))
        answers = collect(engine)
        assert all(same_bits(answers[f"r{n}", 0], right) for n in range(3)) and at_rest(engine)


def test_long_chains_are_stored_though_buffers_are_few(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Far more than an eighth of the pool waits for a buffer, and nobody lacks it; without steps, too."""
    monkeypatch.setattr("deepinfer.engine.kv_store.staging._BUFFER_BYTES", 1)
    tier = Tier()
    tier.broken = {"put": lambda said: time.sleep(0.02) or said}
    with make(device, tier, num_kv_blocks=64) as engine:
        engine.add_request(request("r", PROMPT, P))
        collect(engine)
        while (rest := engine.tend()) is not None:
            assert select.select([rest[0]], [], [], 10)[0]
        assert tier.stats()["blocks"] == 3 and engine.metrics().store["dropped"] == 0 and engine.tend() is None and at_rest(engine)


def test_what_has_come_is_taken_though_the_head_of_the_queue_cannot_run(tier: Tier, right: Answer, device: str) -> None:
    """The end of a fetch does not wait for its request's turn: blocks are anybody's and nothing is held while others keep the lanes."""
    with make(device, tier, max_num_seqs=2) as engine:
        for n in range(2):
            engine.add_request(request(f"o{n}", [n + 3, *OTHER], P.clone(max_tokens=120, logprobs=None)))
        engine.step()
        engine.add_request(request("head", [9, *OTHER], P))
        engine.add_request(request("r", PROMPT, P))
        until = time.monotonic() + 10
        while not engine.metrics().store["fetched"] and time.monotonic() < until:
            engine.step()
        stats = engine.core_stats()
        assert (stats["running"], stats["waiting"], stats["fetches_ended"]) == (2, 2, 1)
        assert not engine._store._fetches.busy
        answers = collect(engine)
        assert same_bits(answers["r", 0], right) and answers["r", 0].cached_tokens == 384 and at_rest(engine)


def test_memory_does_not_grow_with_what_passes_through(device: str) -> None:
    """Prompts that push each other out of the index and the tier, over and over: buffers are used again, nothing keeps views of them."""
    tier, prompts, draw = Tier(12 * 98304), random_prompts([300] * 12, seed=51), random.Random(52)

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    with make(device, tier, num_kv_blocks=60) as engine:
        for turn in range(70):
            ask(engine, draw.choice(prompts), P.clone(logprobs=None, max_tokens=2), str(turn))
            if turn == 20:
                before = resident()
        grown, counters = resident() - before, engine.metrics().store
        assert counters["fetched"] > 20 and counters["saved"] > 20 and tier.stats()["evicted"] > 20
        assert grown < 24 << 20, grown
        assert at_rest(engine)
