"""Models with windows and a store: random conversations over random engines, each token that of the whole prompt.

The toy's every token depends on every row before it, so that one that is missing, stale or somebody else's is seen.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

import window_toy
from deepinfer.engine.config import EngineConfig
from deepinfer.engine.engine import Engine
from deepinfer.errors import ConfigError
from deepinfer.sampling import SamplingParams
from engine_kit import collect, request, tiny_checkpoint
from store_kit import Tier, ask, at_rest

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def toy(tier: Tier | None, **settings: Any) -> Any:
    small = {"load_format": "dummy", "block_size": 128, "max_num_seqs": 4, "max_num_batched_tokens": 70, "swap_space_gib": 0}
    base = {"dtype": "float32", "num_kv_blocks": 64, "quiet": True, "num_threads": 1, "state_snapshot_gib": 0, "kv_prefetch_min_tokens": 1}
    config = EngineConfig(model=window_toy.toy_checkpoint(), device="cpu", **{**base, **small, **settings})
    return Engine(config, store=tier)


def numbers(draw: random.Random, count: int) -> list[int]:
    return [draw.randrange(90) for _ in range(count)]


@pytest.mark.parametrize("overlap", [True, False])
def test_slices_come_behind_their_blocks_whoever_is_first(overlap: bool) -> None:
    """Several prompts that end in one step: slices are cut before the core gives their blocks."""
    draw, tier = random.Random(6), Tier()
    with toy(tier, zero_overhead=overlap, max_num_batched_tokens=1000) as engine:
        for n in range(3):
            engine.add_request(request(str(n), numbers(draw, 270), GREEDY))
        collect(engine)
        assert at_rest(engine)
        counters = engine.metrics().store
        assert (counters["slices_saved"], counters["saved"], counters["failed"]) == (3, 6, 0) == (tier.stats()["slices"], 6, 0)


@pytest.mark.parametrize(
    ("block", "length", "policy", "kind", "hit", "start"),
    [
        (128, 267, "exact", "slice", 256, 256),  # two layers behind the slice: 2 · 5 + 1 tokens
        (128, 266, "exact", "rerun", 256, 128),  # four without: 4 · 5 + 1, and 2 · 5 before the end of the hit
        (128, 266, "replay", "rerun", 256, 128),
        (128, 267, "replay", "slice", 256, 256),
        (16, 300, "exact", "rerun", 256, 240),  # slices at the ends of blocks of 16 are none of a store's
    ],
)
def test_what_is_computed_again_behind_a_fetch(block: int, length: int, policy: str, kind: str, hit: int, start: int) -> None:
    text, tier = numbers(random.Random(1), 320), Tier(first_stays=policy == "replay")
    with toy(tier, block_size=block, hit_policy=policy) as first:
        ask(first, text[:260], GREEDY.clone(max_tokens=1))
        counters = first.metrics().store
        assert (counters["saved"], counters["slices_saved"], counters["failed"]) == (2, int(block == 128), 0)
    with toy(tier, block_size=block, hit_policy=policy) as second:
        found = ask(second, text[:length], GREEDY)
        stats = second.core_stats()
        assert stats[f"start_{kind}"] == 1 and stats["rerun_tokens"] == second.model.reruns == hit - start
        assert stats["prefill_tokens"] == length - start and at_rest(second)
    if policy == "exact":
        with toy(None, enable_prefix_caching=False) as plain:
            assert ask(plain, text[:length], GREEDY).tokens == found.tokens


def conversations(draw: random.Random, turns: int) -> list[list[list[int]]]:
    """Prompts of each turn: some share a beginning, some go on behind an earlier one, some are said again."""
    common, known, made = numbers(draw, 280), [], []
    for _ in range(turns):
        prompts = []
        for _ in range(draw.randrange(2, 5)):
            kind = draw.random()
            if known and kind < 0.35:
                prompt = draw.choice(known)[: draw.randrange(40, 440)] + numbers(draw, draw.randrange(0, 60))
            elif known and kind < 0.5:
                prompt = draw.choice(known)
            else:
                prompt = common[: draw.choice((128, 200, 256, 280))] + numbers(draw, draw.randrange(1, 200))
            prompts.append(prompt[:480])
        known += prompts
        made.append(prompts)
    return made


def wander(seed: int, turns: int) -> dict[str, int]:
    """Answers of engines with random settings, one after the other over one tier, are those of a plain one; gives what was counted."""
    draw, tier, total = random.Random(seed), Tier(draw_capacity(seed)), dict.fromkeys(("slice", "rerun", "fetched"), 0)
    with toy(None, enable_prefix_caching=False, zero_overhead=False) as plain:
        for prompts in conversations(draw, turns):
            settings = {
                "max_num_batched_tokens": draw.choice((20, 70, 300)),
                "zero_overhead": draw.random() < 0.7,
                "num_kv_blocks": draw.choice((7, 12, 64)),
                "kv_store_write": draw.choice(("on_finish", "write_through")),
                "kv_prefetch": draw.choice(("wait", "timeout", "best_effort")),
                "state_slice_gib": draw.choice((None, 3 * 2 * 11 * 8 / 2**30)),
                **draw.choice(({}, {"speculative": "ngram", "num_draft_tokens": 5})),
                "max_model_len": 500,
            }
            params = draw.choice((GREEDY, GREEDY.clone(temperature=0.9, seed=3, n=2)))
            tier.delay = draw.choice((0, 0, 0.01))
            tier.broken = draw.choice(({}, {}, {"get": lambda hits: bytes(hit and draw.random() < 0.7 for hit in hits)}))
            with toy(tier, **settings) as engine:
                found = []
                for e in (engine, plain):
                    for n, prompt in enumerate(prompts):
                        e.add_request(request(str(n), prompt, params))
                    found.append({key: answer.tokens for key, answer in collect(e).items()})
                assert found[0] == found[1], (seed, settings)
                stats, counters = engine.core_stats(), engine.metrics().store
                assert at_rest(engine) and counters["faults"] == counters["conflicts"] == 0, (seed, settings)
                for name in ("slice", "rerun"):
                    total[name] += stats[f"start_{name}"]
                total["fetched"] += counters["fetched"]
    return total


def draw_capacity(seed: int) -> int:
    """Room for everything, or for a few objects, so that chains lose their ends."""
    return 1 << 24 if seed % 3 else 8 * 128 * 8


def test_random_conversations_over_random_engines() -> None:
    totals = [wander(seed, 5) for seed in (1, 3)]
    assert all(sum(t[name] for t in totals) > 0 for name in totals[0]), totals


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(20))
def test_many_random_conversations(seed: int) -> None:
    assert wander(seed, 8)["fetched"] > 0


def test_a_store_is_refused_where_nothing_is_looked_up() -> None:
    with pytest.raises(ConfigError, match="leave one of them out"):
        Engine(EngineConfig(model=tiny_checkpoint("llama"), device="cpu", kv_store="dir:/nowhere", quiet=True), store=Tier())
    with pytest.raises(ConfigError, match="enable_prefix_caching=True"):
        toy(Tier(), enable_prefix_caching=False)
