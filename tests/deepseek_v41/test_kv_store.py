"""A second engine of the real model goes on from what a store has: the bits of the whole prompt, and counts to the token.

As in `test_slices`: windows of 128 tokens, five layers up to the last one that writes block KV and five from there on. A start with a slice
needs 5 · 127 + 1 = 636 tokens behind it, one without 10 · 127 + 1 = 1271, of which 5 · 127 = 635 before the end of the hit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from deepinfer import _core
from deepinfer.engine.kv_store import identity_of
from deepinfer.kvcache.block_tier import MemoryTier
from deepinfer.kvcache.state_slices import HostSlices
from deepseek_v41.test_slices import FIRST, STORED, Made, answers_alone, nats, stats_of, text
from engine_kit import Answer, generate, same_bits
from store_kit import Tier, ask, at_rest

SETTINGS: dict[str, Any] = {"num_kv_blocks": 60, "kv_prefetch_min_tokens": 1}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, device: str) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        yield Made(patch, tmp_path_factory.mktemp("store"), device)


@pytest.fixture(scope="module")
def alone(made: Made) -> Callable[..., Answer]:
    return answers_alone(made)


def first_turn(made: Made, tier: MemoryTier, length: int, policy: str = "exact", **settings: Any) -> None:
    """An engine answers the first tokens of the text, and ends."""
    with made(None, store=tier, hit_policy=policy, **SETTINGS, **settings) as engine:
        assert ask(engine, text(length), FIRST).cached_tokens == 0
        counters = engine.metrics().store
        assert counters["saved"] == (length + 2) // 128 and counters["slices_saved"] == 1
        assert counters["failed"] == counters["faults"] == 0 and at_rest(engine)


@pytest.mark.parametrize(
    ("policy", "stored", "length", "kind", "hit", "start"),
    [
        pytest.param("exact", 300, 300, "nothing", 0, 0, marks=pytest.mark.nightly),  # every row anew: nothing is worth a fetch
        ("exact", 900, 1000, "nothing", 0, 0),
        pytest.param("exact", 900, 1531, "rerun", 896, 256, marks=pytest.mark.nightly),  # 1531 − 1271 → 256
        ("exact", 900, 1532, "slice", 896, 896),  # 1532 − 636 = 896
        ("exact", 1500, 1500, "rerun", 1408, 128),  # the same prompt: at least 1271 tokens again
        pytest.param("exact", 3000, 3000, "rerun", 2944, 1664, marks=pytest.mark.nightly),  # 3000 − 1271 → 1664
        ("replay", 900, 1029, "rerun", 896, 768),
        ("replay", 900, 1030, "slice", 896, 896),
        pytest.param("replay", 3000, 3000, "rerun", 2944, 2816, marks=pytest.mark.nightly),
    ],
)
def test_what_is_computed_again_behind_a_fetch_is_counted_to_the_token(
    policy: str,
    stored: int,
    length: int,
    kind: str,
    hit: int,
    start: int,
    made: Made,
    alone: Callable[..., Answer],
    record_property: Callable[[str, object], None],
) -> None:
    tier = Tier(first_stays=policy == "replay")
    first_turn(made, tier, stored, policy)
    with made(None, store=tier, hit_policy=policy, max_num_batched_tokens=700, **SETTINGS) as engine:
        found = ask(engine, text(length), FIRST)
        stats, counters = engine.core_stats(), engine.metrics().store
        assert stats[f"start_{kind}"] == 1 and stats["prefill_tokens"] == length - start
        assert (stats["hit_tokens"], stats["rerun_tokens"]) == (hit, hit - start)
        assert counters["fetched"] == hit // 128 and counters["slices_fetched"] == (kind == "slice")
        # What a command prints, without an engine, gives the same keys.
        identity = identity_of(engine.config)
        salt, _ = bytes.fromhex(identity.pop("salt")), identity.pop("tenant")
        assert tier.check(_core.kv_keys(text(stored), salt=salt, **identity), 0)[0] == stored // 128
        assert counters["lost"] == counters["conflicts"] == counters["faults"] == 0 and at_rest(engine)
        assert engine.metrics().slices["gone"] == 0
    whole = alone(text(length))
    if policy == "exact":
        assert same_bits(found, whole)
    else:
        off = nats(found, whole)
        record_property("nats", off)
        assert 0 < off < 2.0, off


@pytest.mark.parametrize("overlap", [pytest.param(False, marks=pytest.mark.nightly), True])
def test_conversations_go_on_in_other_engines(overlap: bool, made: Made, alone: Callable[..., Answer]) -> None:
    """Turn after turn in an engine of its own, beside others and in other chunks: each begins with the slice of the turn before."""
    tier, lengths = Tier(), (650, 1300, 2000)
    for turn, length in enumerate(lengths):
        settings = {"zero_overhead": overlap, "max_num_batched_tokens": (1024, 300, 555)[turn]}
        with made(None, store=tier, **SETTINGS, **settings) as engine:
            found = generate(engine, [text(length), text(200, 3)], FIRST)
            assert same_bits(found[0], alone(text(length))) and same_bits(found[1], alone(text(200, 3)))
            stats = stats_of(engine)
            begins = {"start_slice": turn > 0, "start_nothing": 1 + (turn == 0), "start_rerun": 0}
            assert {name: stats[name] for name in begins} == begins, turn
            assert found[0].cached_tokens == (0, 640, 1280)[turn]
            assert at_rest(engine) and engine.metrics().store["faults"] == 0


def test_a_near_slice_is_not_fetched_and_one_that_is_gone_is_no_harm(made: Made, alone: Callable[..., Answer]) -> None:
    tier, near = Tier(), HostSlices(10 * STORED)
    first_turn(made, tier, 900)
    with made(near, store=tier, **SETTINGS) as engine:
        assert same_bits(ask(engine, text(1532), FIRST), alone(text(1532)))
        assert engine.metrics().store["slices_fetched"] == 1 and engine.core_stats()["start_slice"] == 1
    with made(near, store=tier, **SETTINGS) as engine:
        assert same_bits(ask(engine, text(1532), FIRST), alone(text(1532)))
        assert engine.metrics().store["slices_fetched"] == 0 and engine.core_stats()["start_slice"] == 1
        before = engine.metrics().store["slices_saved"]
        assert before == tier.stats()["slices"] - 1 or before == 0
    tier._slices.clear()
    with made(None, store=tier, **SETTINGS) as engine:
        assert same_bits(ask(engine, text(1532), FIRST), alone(text(1532)))
        assert engine.core_stats()["start_rerun"] == 1 and engine.metrics().store["faults"] == 0


def test_a_slice_of_another_form_or_none_at_all_costs_time_only(made: Made, alone: Callable[..., Answer]) -> None:
    tier = Tier()
    first_turn(made, tier, 900)
    key = next(iter(tier._slices))
    for wrong in (b"short", None):
        tier._slices[key] = wrong or tier._slices[key]
        tier.broken = {} if wrong else {"get": lambda hits: bytes(len(hits))}
        with made(None, store=tier, **SETTINGS) as engine:
            assert same_bits(ask(engine, text(1532), FIRST), alone(text(1532)))
            stats, counters = engine.core_stats(), engine.metrics().store
            assert stats["start_slice"] == counters["slices_fetched"] == 0 and at_rest(engine)
            assert (counters["fetched"], counters["lost"]) == ((7, 0) if wrong else (0, 11))  # by now with the second prompt
