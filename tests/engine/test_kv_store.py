"""An engine and a store: what one computed another one finds, bit for bit and to the token, in whatever arrangement."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from deepinfer import _core
from deepinfer.engine.config import EngineConfig
from deepinfer.engine.engine import Engine
from deepinfer.engine.hooks import KvSave
from deepinfer.kvcache.objects import GRAIN
from deepinfer.sampling import SamplingParams
from engine_kit import Answer, collect, generate, random_prompts, request, same_bits, tiny_checkpoint
from store_kit import Tier, ask, at_rest, hit

P = SamplingParams(temperature=0, max_tokens=6, logprobs=4, ignore_eos=True)
PROMPT, OTHER = random_prompts((450, 300), seed=4)


def make(device: str, tier: Tier | None, cls: type[Engine] = Engine, **settings: Any) -> Any:
    small = {"dtype": "float32", "block_size": 16, "num_kv_blocks": 256, "max_num_batched_tokens": 96, "quiet": True, "num_threads": 1}
    config = EngineConfig(device=device, **{"model": tiny_checkpoint("llama"), **small, **settings})
    return cls(config, store=tier)


def alone(device: str, prompts: list[list[int]], params: Any = P, **settings: Any) -> list[Answer]:
    """Answers that nothing cached has a part in."""
    with make(device, None, enable_prefix_caching=False, zero_overhead=False, max_num_batched_tokens=512, **settings) as engine:
        return generate(engine, prompts, params)


@pytest.mark.parametrize(
    ("block", "dtype"),
    [
        (16, "float32"),
        (64, "bfloat16"),
        (128, "float32"),
        *(
            pytest.param(*rest, marks=pytest.mark.nightly)
            for rest in ((32, "float32"), (16, "bfloat16"), (128, "bfloat16"), (64, "float32"))
        ),
    ],
)
def test_a_second_engine_has_the_bits_and_counts_of_the_first(block: int, dtype: str, device: str) -> None:
    """Prompts of lengths around every kind of boundary, then what follows them; in other chunks, with and without overlap."""
    settings = {"block_size": block, "dtype": dtype, "kv_prefetch_min_tokens": 1}
    lengths = (127, 128, 129, 255, 256, 257, 300, 384, 401)
    prompts = random_prompts(lengths, seed=block)
    wanted = alone(device, prompts, **settings)
    longer = [[*p, *a.tokens, *OTHER[:60]] for p, a in zip(prompts, wanted, strict=True)]
    then = alone(device, longer, **settings)
    tier = Tier()
    with make(device, tier, num_kv_blocks=4096 // block, **settings) as first:
        for found, right in zip(generate(first, prompts, P), wanted, strict=True):
            assert same_bits(found, right)
        assert at_rest(first)
        counters = first.metrics().store
        objects = sum((n + P.max_tokens - 1) // GRAIN for n in lengths)
        assert (counters["saved"], counters["failed"], counters["faults"]) == (objects, 0, 0) and tier.stats()["blocks"] == objects
    with make(device, tier, num_kv_blocks=8192 // block, max_num_batched_tokens=50, zero_overhead=block != 64, **settings) as second:
        for n, found, right in zip(lengths, generate(second, prompts, P), wanted, strict=True):
            assert same_bits(found, right) and found.cached_tokens == hit(n, n + 5, block), n
        for n, found, right in zip(lengths, generate(second, longer, P), then, strict=True):
            stored, more = n + 5, n + 66
            # By now the index has the first turn, too, to the block.
            assert same_bits(found, right)
            assert found.cached_tokens == max(hit(more, stored, block), (stored // block) * block), n
        assert at_rest(second)
        counters = second.metrics().store
        assert (counters["lost"], counters["conflicts"], counters["failed"], counters["faults"], counters["leases"]) == (0,) * 5
    with make(device, tier, **settings) as third:  # has never seen the first turn
        for n, right in zip(lengths[-3:], then[-3:], strict=True):
            found = ask(third, longer[lengths.index(n)], P)
            assert same_bits(found, right) and found.cached_tokens == hit(n + 66, n + 5, block), n


def test_what_the_index_has_is_not_fetched_again(device: str) -> None:
    """90 tokens are there already, to the block: the first object comes for the rest of its pages."""
    tier = Tier()
    (right,) = alone(device, [PROMPT])
    with make(device, tier) as first:
        ask(first, PROMPT, P)
    with make(device, tier) as second:
        ask(second, PROMPT[:90], P)
        found = ask(second, PROMPT, P)
        counters = second.metrics().store
        assert same_bits(found, right) and found.cached_tokens == 384
        assert (counters["device_tokens"], counters["store_tokens"], counters["fetched"]) == (80, 384 - 80, 3)
        again = ask(second, PROMPT, P)
        assert same_bits(again, right) and again.cached_tokens == 448
        assert second.metrics().store["fetched"] == 3 and at_rest(second)


@pytest.mark.parametrize("overlap", [True, False])
def test_several_answers_wait_for_one_fetch(overlap: bool, device: str) -> None:
    params = P.clone(n=3, temperature=0.9, seed=5, logprobs=None)
    tier, answers = Tier(), []
    for settings in ({"enable_prefix_caching": False}, {}, {}):
        with make(device, tier if not settings else None, zero_overhead=overlap, **settings) as engine:
            engine.add_request(request("r", PROMPT, params))
            answers.append([a.tokens for _, a in sorted(collect(engine).items())])
            assert engine._store is None or (engine._store.settle(20) and at_rest(engine))
    assert answers[0] == answers[1] == answers[2] and len(set(map(tuple, answers[0]))) > 1


def test_sequences_that_share_a_beginning_bring_it_once(device: str) -> None:
    tier = Tier()
    prompts = [[*PROMPT[:300], *more] for more in random_prompts((20, 90, 140), seed=8)]
    right = alone(device, prompts)
    with make(device, tier) as first:
        generate(first, prompts, P)
        assert at_rest(first)
    with make(device, tier, kv_prefetch_min_tokens=1) as second:
        tier.delay = 0.02
        found = generate(second, prompts, P)
        assert all(same_bits(a, b) for a, b in zip(found, right, strict=True))
        assert [a.cached_tokens for a in found] == [hit(len(p), len(p) + 5, 16) for p in prompts]
        counters = second.metrics().store
        assert counters["fetched"] == tier.stats()["blocks"] == 2 + 1 + 1 and at_rest(second)


@pytest.mark.parametrize("write", ["on_finish", "write_through"])
def test_pressure_and_preemption_change_nothing(write: str, device: str) -> None:
    """Less room than two sequences need, and a store behind it that takes and gives all the time."""
    draw = random.Random(2)
    prompts = [PROMPT[: draw.randrange(100, 300)] + p for p in random_prompts([draw.randrange(5, 120) for _ in range(8)], seed=3)]
    params = P.clone(max_tokens=24)
    right, tier = alone(device, prompts, params), Tier()
    for turn in range(2):
        with make(device, tier, num_kv_blocks=60, kv_store_write=write, swap_space_gib=0) as engine:
            found = generate(engine, prompts, params)
            assert all(same_bits(a, b) for a, b in zip(found, right, strict=True)), turn
            assert engine.core_stats()["preemptions"] > 0 and at_rest(engine)
            counters = engine.metrics().store
            assert counters["faults"] == counters["conflicts"] == 0 and (counters["fetched"] > 0) >= (turn > 0)


def test_nothing_is_found_under_another_salt_or_by_another_tenant(device: str) -> None:
    tier = Tier()
    with make(device, tier, kv_store_tenant="a") as first:
        ask(first, PROMPT, P, salt=b"one")
        before = tier.stats()["blocks"]
        assert ask(first, PROMPT, P, "again", salt=b"one").cached_tokens == 448
    for tenant, salt, cached in (("a", b"one", 384), ("a", b"two", 0), ("a", b"", 0), ("b", b"one", 0), ("", b"one", 0)):
        with make(device, tier, kv_store_tenant=tenant) as other:
            assert ask(other, PROMPT, P, salt=salt).cached_tokens == cached, (tenant, salt)
    assert tier.stats()["blocks"] == 5 * before and tier.stats()["exists"] == 0


def test_other_blocks_and_types_share_nothing(device: str) -> None:
    tier = Tier()
    for nth, settings in enumerate(({}, {"block_size": 32}, {"dtype": "bfloat16"})):
        with make(device, tier, **settings) as engine:
            assert ask(engine, PROMPT, P).cached_tokens == 0 and tier.stats()["blocks"] == 3 * (nth + 1)


def test_only_engines_of_the_same_weights_share(device: str, tmp_path: Path) -> None:
    """Wherever they lie. Two models that take turns at one path, with one size and time, as in images whose times are all one."""
    here, elsewhere = (Path(shutil.copytree(tiny_checkpoint("llama"), tmp_path / name)) for name in ("here", "elsewhere"))
    file = here / "model.safetensors"
    os.utime(file, (1, 1))
    size, tier = file.stat().st_size, Tier()

    def answer(model: Path, store: Tier | None) -> Answer:
        with make(device, store, model=str(model)) as engine:
            return ask(engine, PROMPT, P)

    first = answer(here, tier)
    assert answer(elsewhere, tier).cached_tokens == 384
    save_file({name: values + 0.05 * values.std() for name, values in load_file(file).items()}, file, {"format": "pt"})
    os.utime(file, (1, 1))
    assert file.stat().st_size == size
    found, right = answer(here, tier), answer(here, None)
    assert found.cached_tokens == 0 and same_bits(found, right) and not same_bits(found, first)


def test_only_engines_of_the_same_arithmetic_share(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another processor or torch makes other bits of the same tokens."""
    tier = Tier()
    with make(device, tier) as first:
        ask(first, PROMPT, P)
        platform, identity = type(first.run.platform), first.kv_identity()
        own = first.run.platform.arithmetic
    assert torch.__version__ in own and own in str(identity["numerics"])
    monkeypatch.setattr(platform, "arithmetic", property(lambda self: own + " and more"))
    with make(device, tier) as other:
        assert ask(other, PROMPT, P).cached_tokens == 0
    monkeypatch.undo()
    with make(device, tier) as third:
        assert ask(third, PROMPT, P).cached_tokens == 384 and third.kv_identity() == identity
    assert tier.stats()["blocks"] == 6 and tier.stats()["conflicts"] == 0


def test_the_identity_of_an_engine_gives_the_names_of_its_objects(device: str) -> None:
    tier = Tier()
    with make(device, tier, kv_store_tenant="a") as engine:
        ask(engine, PROMPT, P)
        identity = engine.kv_identity()
    keys = _core.kv_keys(PROMPT, **{**identity, "salt": bytes.fromhex(str(identity["salt"]))})  # type: ignore[arg-type]
    assert len(keys) == 3 * 16 and tier.check(keys, 0)[0] == 3


@pytest.mark.parametrize("near", [0, 2, 3])
def test_tokens_are_counted_once_by_where_they_came_from(near: int, device: str) -> None:
    """Also where the first object that is fetched is in place in part."""
    tier = Tier()
    with make(device, tier) as first:
        ask(first, PROMPT, P)
    tier.broken["check"] = lambda found: (found[0], found[1], min(near, found[0]))
    with make(device, tier) as second:
        ask(second, [*PROMPT[:200], *OTHER[:40]], P, "part")
        before = second.metrics().store
        assert ask(second, PROMPT, P).cached_tokens == 384
        after = second.metrics().store
    counted = {name: after[name] - before[name] for name in ("device_tokens", "host_tokens", "store_tokens", "fetched")}
    host = max(0, near * GRAIN - 192)
    assert counted == {"device_tokens": 192, "host_tokens": host, "store_tokens": 384 - 192 - host, "fetched": 2}


def test_full_grains_are_stored_while_a_request_runs_if_written_through(device: str) -> None:
    """Until the end of the request ``on_finish`` has what the prompt completed."""
    for write, stored in (("on_finish", 2), ("write_through", 3)):
        tier = Tier()
        with make(device, tier, kv_store_write=write) as engine:
            engine.add_request(request("r", PROMPT[:300], P.clone(max_tokens=150)))
            while engine.counters.generated_tokens < 100:
                engine.step()
            assert engine._store is not None and engine._store.settle(20)
            assert tier.stats()["blocks"] == stored, write
            engine.abort_all()
            assert at_rest(engine)


class Told(Engine):
    """Keeps what the hooks are told."""

    def init_pd_split(self) -> None:
        self.told: list[tuple[str, KvSave]] = []

    def pe_prepare_save_kvcache(self, save: KvSave) -> None:
        self.told.append(("prepare", save))

    def do_save_kvcache(self, save: KvSave) -> None:
        self.told.append(("do", save))


@pytest.mark.parametrize("closed", [False, True])
@pytest.mark.parametrize("overlap", [True, False])
def test_what_an_answer_completed_before_it_was_stopped_is_stored(overlap: bool, closed: bool, device: str) -> None:
    """A stop string is found when the core has gone on: it hears of the end with the next plan, though nobody asks for anything more,
    and though the engine is closed with a row of the answer in flight."""
    tier = Tier()
    with make(device, tier, zero_overhead=overlap) as engine:
        engine.add_request(request("r", PROMPT[:250], P.clone(max_tokens=100), stream=True))
        tokens = 0
        while tokens < 20:
            tokens += sum(len(delta.new_token_ids) for delta in engine.step())
        engine.stop_at("r", 0, tokens)
        assert engine.has_unfinished()
        if not closed:
            assert collect(engine, 5) == {} and not engine.core_stats()["running"]
            assert at_rest(engine) and engine.metrics().store["saved"] == 2
    assert tier.stats()["blocks"] == 2


def test_hooks_are_told_of_what_goes_to_the_store(device: str) -> None:
    tier = Tier()
    with make(device, tier, Told) as engine:
        ask(engine, PROMPT[:380], P.clone(max_tokens=10))
        assert [(when, s.what, s.request_id, s.tokens, len(s.blocks), s.state_slot) for when, s in engine.told] == [
            ("prepare", "store", "r", 256, 16, 0), ("do", "store", "r", 256, 16, 0),
            ("prepare", "store", "r", 384, 8, 0), ("do", "store", "r", 384, 8, 0),
        ]  # fmt: skip
        assert {s.key for _, s in engine.told} <= set(tier._blocks)
        assert np.unique(np.concatenate([s.blocks for when, s in engine.told if when == "do"])).size == 24


def test_a_hook_that_fails_costs_what_was_to_be_saved(device: str) -> None:
    class Failing(Told):
        def pe_prepare_save_kvcache(self, save: KvSave) -> None:
            raise RuntimeError("no")

    tier = Tier()
    with make(device, tier, Failing) as engine:
        assert ask(engine, PROMPT, P).finish == "length"
        counters = engine.metrics().store
        assert tier.stats()["blocks"] == counters["saved"] == 0 < counters["faults"] and at_rest(engine)
