"""Hits of models with windows through the engine: what is restored or made up gives the tokens of a run without any hit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import window_toy
from deepinfer import _core
from deepinfer.engine.config import EngineConfig, RunConfig
from deepinfer.engine.engine import Engine
from deepinfer.engine.hooks import Admission
from deepinfer.engine.planner import KvPlan, report
from deepinfer.engine.state_hits import SnapshotPlan, hit_rule, plan_snapshots
from deepinfer.errors import CapacityError, ConfigError, ModelContractError
from deepinfer.models.base import ModelOptions, StateGroup, WindowHits
from deepinfer.models.contract import checked_groups
from deepinfer.platforms.cpu import CpuPlatform
from deepinfer.sampling import SamplingParams
from deepinfer.worker.host_pages import HostSnapshots
from deepinfer.worker.kv_cache import KVCache
from engine_kit import collect, conversation, generate, make_engine, request
from roles_kit import Pair

HITS = WindowHits(encoder=20, decoder=20, window=128, grain=128, backtrack=6)
STATE = StateGroup(stored=64, dropped=64, replicas=1, ring=134, cut=128, replica_at=96, hits=HITS)
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


def toy(**settings: Any) -> Engine:
    small = {"load_format": "dummy", "block_size": 16, "max_num_seqs": 6, "max_num_batched_tokens": 40, "swap_space_gib": 0}
    return make_engine(window_toy.toy_checkpoint(), "cpu", **{**small, **settings})


@pytest.fixture(scope="module")
def wanted() -> list[list[int]]:
    """Without a prefix cache, one step at a time."""
    with toy(enable_prefix_caching=False, zero_overhead=False) as engine:
        made = conversation(engine, GREEDY, 7)
        assert engine.snapshots == SnapshotPlan() and engine.core_stats()["hit_tokens"] == 0
        return made


@pytest.mark.parametrize("overlap", [pytest.param(False, marks=pytest.mark.nightly), True])
@pytest.mark.parametrize(
    ("settings", "reached"),
    [
        ({}, ("start_snapshot", "snapshots_taken")),
        ({"state_snapshot_gib": 0}, ("start_rerun", "rerun_tokens")),
        ({"state_snapshot_gib": 800 / 2**30}, ("start_rerun", "start_snapshot", "snapshots_evicted")),
        ({"num_kv_blocks": 14}, ("preemptions", "start_snapshot")),
        ({"num_kv_blocks": 14, "state_snapshot_gib": 0}, ("preemptions", "start_rerun")),
        ({"speculative": "ngram", "num_draft_tokens": 5}, ("accepted", "drafted", "start_snapshot")),
        ({"speculative": "ngram", "num_draft_tokens": 5, "state_snapshot_gib": 0, "num_kv_blocks": 14}, ("accepted", "start_rerun")),
    ],
)
def test_tokens_do_not_depend_on_hits(wanted: list[list[int]], settings: dict[str, Any], reached: tuple[str, ...], overlap: bool) -> None:
    with toy(zero_overhead=overlap, **settings) as engine:
        assert conversation(engine, GREEDY, 7) == wanted
        stats = engine.core_stats()
        assert all(stats[name] > 0 for name in reached), stats
        assert engine._core.check() is None
        assert stats["rerun_tokens"] == engine.model.reruns or stats["preemptions"]  # type: ignore[attr-defined]


def test_swapped_sequences_keep_their_windows(wanted: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    with toy(swap_space_gib=0.01, num_kv_blocks=14) as engine:
        monkeypatch.setattr(engine._rates, "note", lambda *_: None)
        engine._core.set_rates(1e15, 1.0)
        assert conversation(engine, GREEDY, 7) == wanted
        stats = engine.core_stats()
        assert stats["swapped_in"] > 0 and stats["start_snapshot"] > 0


def test_forks_share_windows_and_prompts_of_one_answer_are_as_without(wanted: list[list[int]]) -> None:
    with toy() as engine:
        prompt = np.random.default_rng(5).integers(0, 90, 70).tolist()
        for _ in range(2):
            engine.add_request(request("r", prompt, GREEDY.clone(n=3, temperature=1.0, seed=4)))
            made = [a.tokens for a in collect(engine).values()]
            engine.add_request(request("again", prompt, GREEDY.clone(n=3, temperature=1.0, seed=4)))
            assert [a.tokens for a in collect(engine).values()] == made
        assert engine.core_stats()["forks"] > 0


@pytest.mark.parametrize("room", [None, 0])
def test_a_pair_hands_whole_windows_over(monkeypatch: pytest.MonkeyPatch, room: float | None) -> None:
    rng = np.random.default_rng(9)
    common = rng.integers(0, 90, 50).tolist()
    prompts = [[*common, *rng.integers(0, 90, n).tolist()] for n in (3, 9, 30)] * 2
    with toy(enable_prefix_caching=False) as engine:
        want = [a.tokens for a in generate(engine, prompts, [GREEDY] * len(prompts))]
    settings = {"load_format": "dummy", "max_num_batched_tokens": 40, "state_snapshot_gib": room}
    pair = Pair(monkeypatch, "cpu", model=window_toy.toy_checkpoint(), **settings)
    try:
        made = []
        for i, prompt in enumerate(prompts):
            made += [a.tokens for a in pair.generate([request(f"r{i}", prompt, GREEDY, seeds=(0,))])]
        assert made == want
        stats = pair.prompt.core_stats()
        assert stats["start_snapshot" if room is None else "start_rerun"] >= 3 and pair.completion.core_stats()["output_tokens"] > 0
        pair.check_rest()
    finally:
        pair.close()


def test_replay_computes_less_again_and_only_that(wanted: list[list[int]]) -> None:
    again = {}
    for policy in ("exact", "replay"):
        with toy(state_snapshot_gib=0, hit_policy=policy) as engine:
            made = conversation(engine, GREEDY, 7)
            stats = engine.core_stats()
            again[policy] = stats["rerun_tokens"]
            assert stats["start_rerun"] > 0 and stats["rerun_tokens"] == engine.model.reruns  # type: ignore[attr-defined]
            assert engine._core.check() is None and engine._layout.identity["hit policy"] == policy
    assert made != wanted, "windows of one grain are not those of the whole prompt"
    assert 0 < again["replay"] < again["exact"]


@pytest.mark.parametrize(("room", "kind"), [(None, "whole"), (0, "rerun")])
def test_the_hook_of_an_admission_is_told_what_its_state_has(monkeypatch: pytest.MonkeyPatch, room: float | None, kind: str) -> None:
    seen: list[Admission] = []
    monkeypatch.setattr(Engine, "load_state_from_store_to_prefill_cache", lambda _, admission: seen.append(admission))
    with toy(state_snapshot_gib=room) as engine:
        for _ in range(2):
            generate(engine, [list(range(60))], [GREEDY])
    (told,) = seen
    start = 48 if room is None else 32  # 60 − 4·5 − 1 and 48 − 2·5, rounded down
    assert (told.kind, told.tokens, told.hit) == (kind, start, 48)


def test_a_failed_step_leaves_no_snapshot_of_what_it_wrote(wanted: list[list[int]]) -> None:
    with toy() as engine:
        forward = engine.model.forward
        fails = iter([True] * 3)

        def broken(batch: Any, kv: Any) -> torch.Tensor:
            engine.model.forward = forward  # type: ignore[method-assign]
            for rings in (engine.model._rings(kv, r) for r in (False, True)):  # type: ignore[attr-defined]
                rings[batch.state.state_row] = 77
            next(fails)
            raise RuntimeError("once")

        prompts = [[*range(20, 60), n] for n in range(3)]
        for _ in range(3):
            engine.model.forward = broken  # type: ignore[method-assign]
            generate(engine, prompts, [GREEDY] * 3)
        assert engine.counters.failed_steps >= 3
        assert conversation(engine, GREEDY, 7) == wanted


def test_rules_follow_the_groups_and_the_policy() -> None:
    config = EngineConfig(model="m", hit_policy="replay")
    options = ModelOptions(truncation="mask", keep_tokens=3000)
    assert hit_rule(config, options, []) == "all"
    assert hit_rule(config, options, [StateGroup(8, 8)]) == "state_slice"
    rule = hit_rule(config, options, [STATE, STATE])
    assert isinstance(rule, _core.WindowRule)
    assert (rule.encoder, rule.decoder, rule.window, rule.grain, rule.backtrack) == (20, 20, 128, 128, 6)
    assert (rule.exact, rule.keep, rule.truncated) == (False, 3000, True)
    plain = hit_rule(EngineConfig(model="m"), ModelOptions(), [STATE])
    assert isinstance(plain, _core.WindowRule) and (plain.exact, plain.keep, plain.truncated) == (True, 134, False)
    with pytest.raises(ConfigError, match="hit_policy must be one of exact, replay"):
        EngineConfig(model="m", hit_policy="fast")  # type: ignore[arg-type]


def test_places_are_bounded_by_the_setting_and_the_memory() -> None:
    run = RunConfig(CpuPlatform(), torch.float32, 8, 512, 0.5, None, True)
    pool = KvPlan(10_000_000, 128, 1 << 10, 1 << 20, 1000, (10_000_001,))

    def plan(state: list[StateGroup], **settings: Any) -> SnapshotPlan:
        return plan_snapshots(EngineConfig(model="m", **settings), run, pool, state)

    assert plan([STATE, STATE], state_snapshot_gib=1) == SnapshotPlan((1 << 30) // 192, 192)
    assert plan([STATE], state_snapshot_gib=0) == SnapshotPlan(0, 96)
    default = plan([STATE])
    assert 0 < default.amount[1] <= 1 << 30
    small = KvPlan(5, 64, 1 << 10, 1 << 20, 1000, (6,))
    assert plan_snapshots(EngineConfig(model="m"), run, small, [STATE]).places == 2, "boundaries of 128 tokens in five blocks of 64"
    assert plan([]) == plan([StateGroup(8, 8, 1)]) == plan([STATE], enable_prefix_caching=False) == SnapshotPlan()
    for wrong, said in ((1 << 19, "lower it"), (1e-9, "holds no snapshot")):
        with pytest.raises(CapacityError, match=f"state_snapshot_gib.*{said}"):
            plan([STATE], state_snapshot_gib=wrong)
    for bad in (-1, float("nan"), "much", True):
        with pytest.raises(ConfigError, match="state_snapshot_gib"):
            EngineConfig(model="m", state_snapshot_gib=bad)
    assert "1.0 MiB of state · 9 snapshots of states in 2.00 GiB" in report(run, small, "m", 1 << 20, (9, 2 << 30))


def test_groups_that_cannot_be_restored_are_named() -> None:
    model = window_toy.WindowToy()
    for state, said in (
        ([STATE, StateGroup(8, 8, 1)], "disagree in hits"),
        ([StateGroup(8, 8, 1, replica_at=13, hits=HITS)], "no copy of its first 13 bytes"),
        ([StateGroup(8, 16, 0, replica_at=8, hits=HITS)], "0 replicas"),
    ):
        groups = (model.kv_groups(16)[0], state)
        model.kv_groups = lambda _tokens, groups=groups: groups  # type: ignore[method-assign, misc]
        with pytest.raises(ModelContractError, match=said):
            checked_groups(model, 16)


def test_snapshots_come_back_bit_for_bit_to_the_live_bytes(device: str) -> None:
    groups = [StateGroup(10, 26, replicas=1, replica_at=21), StateGroup(4, 8, replicas=1, replica_at=7)]
    kv = KVCache([], [], groups, 6, torch.device(device))
    generator = torch.Generator().manual_seed(0)
    for rows in kv.states:
        rows.copy_(torch.randint(0, 256, rows.shape, generator=generator, dtype=torch.uint8))
    before = [rows.cpu().clone() for rows in kv.states]
    host = HostSnapshots(kv, [21, 7], 5, pinned=device != "cpu")
    out, back = np.array([[1, 3], [4, 0], [2, 4]], np.int32), np.array([[3, 5], [4, 1]], np.int32)
    host.out(out, torch.from_numpy(out.copy()).to(device))
    for rows in kv.states:
        rows.fill_(7)
    host.back(back, torch.from_numpy(back.copy()).to(device))
    for rows, then, at in zip(kv.states, before, (21, 7), strict=True):
        now = rows.cpu()
        assert torch.equal(now[[5, 1], :at], then[[1, 2], at : 2 * at])
        assert bool((now[:, at:] == 7).all()) and bool((now[[0, 2, 3, 4]] == 7).all())
