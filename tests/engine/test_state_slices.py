"""State slices through the engine: tokens do not depend on them, in whatever arrangement, and one that is gone costs time only."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import pytest
import torch

import window_toy
from deepinfer.engine.config import EngineConfig, RunConfig
from deepinfer.engine.engine import Engine
from deepinfer.engine.hooks import NOTHING, Admission, KvSave
from deepinfer.engine.planner import KvPlan, report
from deepinfer.engine.state_slices import SlicePlan, plan_slices
from deepinfer.errors import CapacityError, ConfigError
from deepinfer.kvcache.layout import form_of
from deepinfer.kvcache.state_slices import HostSlices, SliceTier, Told
from deepinfer.models.base import PagedGroup, Source, StateGroup, WindowHits
from deepinfer.platforms.cpu import CpuPlatform
from deepinfer.sampling import SamplingParams
from deepinfer.worker.device_queue import InlineQueue, Ticket, make_queue
from deepinfer.worker.kv_cache import KVCache
from deepinfer.worker.slice_copies import SliceCopies
from engine_kit import collect, conversation, generate, request

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
SLICE = 2 * 11 * 8  # bytes of the toy's encoder rings
ROOM = 1000 * SLICE / 2**30
HITS = WindowHits(encoder=20, decoder=20, window=128, grain=128, backtrack=6)
STATE = StateGroup(stored=64, dropped=128, replicas=1, ring=134, cut=128, replica_at=128, hits=HITS)


def toy(cls: type[Engine] = Engine, slices: SliceTier | None = None, **settings: Any) -> Any:
    small = {"load_format": "dummy", "block_size": 16, "max_num_seqs": 6, "max_num_batched_tokens": 40, "swap_space_gib": 0}
    base = {"dtype": "float32", "num_kv_blocks": 256, "quiet": True, "num_threads": 1, "state_snapshot_gib": 0}
    config = EngineConfig(model=window_toy.toy_checkpoint(), device="cpu", **{**base, **small, **settings})
    return cls(config, slices=slices)


@pytest.fixture(scope="module")
def wanted() -> list[list[int]]:
    """Without a prefix cache, one step at a time."""
    with toy(enable_prefix_caching=False, zero_overhead=False) as engine:
        return conversation(engine, GREEDY, 25)


@pytest.mark.parametrize("overlap", [pytest.param(False, marks=pytest.mark.nightly), True])
@pytest.mark.parametrize(
    ("settings", "reached"),
    [
        ({}, ("start_slice",)),
        ({"state_slice_gib": 3 * SLICE / 2**30}, ("start_slice", "start_rerun")),
        ({"num_kv_blocks": 16}, ("preemptions", "start_slice")),
        ({"speculative": "ngram", "num_draft_tokens": 5}, ("accepted", "drafted", "start_slice")),
        ({"state_snapshot_gib": 2 * 700 / 2**30}, ("start_slice", "start_snapshot", "snapshots_evicted")),
        ({"max_num_batched_tokens": 9}, ("start_slice",)),
    ],
)
def test_tokens_do_not_depend_on_slices(wanted: list[list[int]], settings: dict[str, Any], reached: tuple[str, ...], overlap: bool) -> None:
    with toy(zero_overhead=overlap, **{"state_slice_gib": ROOM, **settings}) as engine:
        assert conversation(engine, GREEDY, 25) == wanted
        stats, slices = engine.core_stats(), engine.metrics().slices
        assert all(stats[name] > 0 for name in reached), stats
        assert engine._core.check() is None and engine._slices.last_fault is None
        assert slices["cut"] == slices["kept"] and slices["gone"] == slices["differing"] == 0
        assert slices["put_back"] == slices["hits"] == stats["start_slice"]
        assert (slices["evicted"] > 0) is ("state_slice_gib" in settings)
        assert stats["rerun_tokens"] == engine.model.reruns or stats["preemptions"]


def test_forks_begin_behind_a_slice() -> None:
    prompt = np.random.default_rng(5).integers(0, 90, 95).tolist()
    params = GREEDY.clone(n=3, temperature=1.0, seed=4)
    answers = []
    for settings in ({"enable_prefix_caching": False}, {"state_slice_gib": ROOM}):
        with toy(**settings) as engine:
            for name in ("first", "again"):
                engine.add_request(request(name, prompt, params))
                answers.append([a.tokens for _, a in sorted(collect(engine).items())])
            stats = engine.core_stats()
    assert answers[0] == answers[1] == answers[2] == answers[3]
    assert (stats["start_slice"], stats["forks"]) == (1, 4)


def test_what_is_computed_again_is_counted_to_the_token() -> None:
    """Of 95 tokens 80 are found; a slice needs 2 · 5 + 1 tokens behind it, a start without one 4 · 5 + 1 and 2 · 5 before the hit."""
    prompt = np.random.default_rng(6).integers(0, 90, 95).tolist()
    for length, policy, snapshots, room, start in [
        (95, "exact", None, ROOM, ("snapshot", 80)),
        (95, "exact", 0, ROOM, ("slice", 80)),
        (95, "exact", 0, 0, ("rerun", 64)),
        (90, "exact", 0, ROOM, ("rerun", 64)),  # 90 − 11 < 80
        (91, "exact", 0, ROOM, ("slice", 80)),
        (95, "replay", 0, ROOM, ("slice", 80)),
        (95, "replay", 0, 0, ("rerun", 64)),
        (90, "replay", 0, ROOM, ("rerun", 64)),  # 11 tokens are kept
    ]:
        with toy(hit_policy=policy, state_snapshot_gib=snapshots, state_slice_gib=room) as engine:
            generate(engine, [prompt], GREEDY.clone(max_tokens=1))
            before = engine.core_stats()
            assert (before["start_nothing"], before["hit_tokens"]) == (1, 0)
            generate(engine, [prompt[:length]], GREEDY.clone(max_tokens=1))
            stats, case = engine.core_stats(), (length, policy, start)
            assert {k: stats[f"start_{k}"] for k in ("snapshot", "slice", "rerun")} == {
                "snapshot": 0, "slice": 0, "rerun": 0, start[0]: 1,
            }, case  # fmt: skip
            assert (stats["hit_tokens"], stats["rerun_tokens"]) == (80, 80 - start[1]), case
            assert stats["prefill_tokens"] - before["prefill_tokens"] == length - start[1], case
            assert engine.model.reruns == 80 - start[1]


class Forgetful(HostSlices):
    """Says it has what it has given up already; now and then something else."""

    def __init__(self, capacity: int, answer: Callable[[bytes | None], bytes | None]) -> None:
        super().__init__(capacity)
        self.answer = answer

    def get(self, key: bytes) -> bytes | None:
        return self.answer(super().get(key))


def broken(_: bytes | None) -> bytes | None:
    raise OSError("the store does not answer")


@pytest.mark.parametrize("overlap", [pytest.param(False, marks=pytest.mark.nightly), True])
@pytest.mark.parametrize("answer", [lambda _: None, lambda data: data and data[:-1], broken], ids=["gone", "of another form", "an error"])
def test_a_slice_that_is_gone_costs_time_only(wanted: list[list[int]], answer: Callable[..., Any], overlap: bool) -> None:
    with toy(slices=Forgetful(1 << 20, answer), zero_overhead=overlap) as engine:
        assert conversation(engine, GREEDY, 25) == wanted
        stats, slices = engine.core_stats(), engine.metrics().slices
        assert stats["slices_gone"] == slices["gone"] > 2 and stats["start_slice"] == slices["put_back"] == 0
        assert stats["start_rerun"] > 2 and stats["preemptions"] == stats["failed_steps"] == 0
        assert slices["faults"] == (slices["gone"] if answer is broken else 0)
        assert engine._core.check() is None


def test_every_other_slice_is_gone_under_drafts_forks_and_pressure(wanted: list[list[int]]) -> None:
    turn = iter(range(10_000))
    tier = Forgetful(1 << 20, lambda data: data if next(turn) % 2 else None)
    settings = {"speculative": "ngram", "num_draft_tokens": 5, "num_kv_blocks": 20, "swap_space_gib": 0.01}
    with toy(slices=tier, **settings) as engine:
        engine._core.set_rates(1e15, 1.0)
        assert conversation(engine, GREEDY, 25) == wanted
        prompt = np.random.default_rng(5).integers(0, 90, 95).tolist()
        for _ in range(4):
            engine.add_request(request("r", prompt, GREEDY.clone(n=3, temperature=1.0, seed=4)))
            last = [a.tokens for _, a in sorted(collect(engine).items())]
        stats = engine.core_stats()
        assert stats["slices_gone"] > 1 and stats["start_slice"] > 1 and engine._core.check() is None
    with toy(enable_prefix_caching=False) as engine:
        engine.add_request(request("r", prompt, GREEDY.clone(n=3, temperature=1.0, seed=4)))
        assert [a.tokens for _, a in sorted(collect(engine).items())] == last


def test_engines_share_a_tier(wanted: list[list[int]]) -> None:
    """The second engine has no slice of its own, and begins with those of the first as soon as it has the blocks."""
    tier = HostSlices(1 << 20)
    prompt = np.random.default_rng(8).integers(0, 90, 95).tolist()
    one = GREEDY.clone(max_tokens=1)
    with toy(slices=tier) as first, toy(slices=tier) as second:
        assert generate(first, [prompt], one)[0].tokens == generate(second, [prompt], one)[0].tokens
        assert (first.metrics().slices["cut"], second.metrics().slices["cut"]) == (1, 0), "the second found it there"
        generate(second, [prompt], one)
        assert second.core_stats()["start_slice"] == 1
        # What one of them makes the tier give up is not named by the other again.
        (name,) = tier._slices
        tier.drop(name)
        generate(second, [prompt], one)
        assert second.core_stats()["start_rerun"] == 1 and second.core_stats()["slices_gone"] == 0
        # Another policy, and thus another meaning of the bytes, has other names.
        with toy(slices=tier, hit_policy="replay") as other:
            for _ in range(2):
                generate(other, [prompt], one)
            assert other.metrics().slices["cut"] == 1 and len(tier._slices) == 2
    with toy(slices=tier) as later:  # the first two are gone; what they left is known from the start
        assert conversation(later, GREEDY, 25) == wanted
        assert later.core_stats()["start_slice"] > 0


def test_engines_in_two_threads_share_a_small_tier(wanted: list[list[int]]) -> None:
    """Each makes slices of the other's go at any moment."""
    tier, made = HostSlices(4 * SLICE), {}

    def work(name: int) -> None:
        with toy(slices=tier) as engine:
            made[name] = [conversation(engine, GREEDY, 25), engine._core.check(), engine.core_stats()["start_slice"]]

    threads = [threading.Thread(target=work, args=(name,)) for name in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert [made[name][:2] for name in range(2)] == [[wanted, None]] * 2
    assert tier.counts().evicted > 10 and tier.counts().differing == 0


class Chooser(Engine):
    """Keeps slices of every other boundary, and gives those that it was told to."""

    def init_pd_split(self) -> None:
        self.saves: list[KvSave] = []
        self.loads: list[Admission] = []
        self.own: dict[bytes, bytes] = {}
        self.choose: Callable[[KvSave], slice | None] = lambda _: None

    def select_state_slice_to_store(self, save: KvSave) -> slice | None:
        self.saves.append(save)
        return self.choose(save)

    def load_state_from_store_to_prefill_cache(self, admission: Admission) -> bytes | None:
        self.loads.append(admission)
        return self.own.get(admission.key)


def test_hooks_choose_what_is_kept_and_what_is_put_back() -> None:
    prompt = np.random.default_rng(9).integers(0, 90, 60).tolist()
    tier = HostSlices(1 << 20)
    with toy(Chooser, tier) as engine:
        engine.choose = lambda save: NOTHING if save.tokens == 48 else None
        answer = generate(engine, [prompt], GREEDY.clone(max_tokens=40))[0].tokens
        assert [(s.what, s.tokens, s.request_id, len(s.blocks), len(s.key)) for s in engine.saves] == [
            ("slice", 48, "0", 0, 16), ("slice", 96, "0", 0, 16),
        ]  # fmt: skip
        assert list(tier._slices) == [engine.saves[1].key]
        # The hook's own bytes go before the tier's.
        key, rng = engine.saves[1].key, np.random.default_rng(1)
        longer = [*prompt, *answer, *rng.integers(0, 90, 9).tolist()]
        want = generate(engine, [longer], GREEDY)[0].tokens
        assert [(load.kind, load.tokens, load.hit, load.key) for load in engine.loads] == [("slice", 96, 96, key)]
        engine.own[key] = bytes(SLICE)
        assert generate(engine, [longer], GREEDY)[0].tokens != want, "it was given nonsense, and used it"
        engine.choose = lambda _: slice(1, 2)
        generate(engine, [prompt[:40]], GREEDY)
        assert engine.metrics().slices["faults"] == 2 and "hooks.NOTHING" in str(engine._slices.last_fault)
        assert engine.counters.failed_steps == 0


def test_stop_strings_and_aborts_cut_what_is_right(wanted: list[list[int]]) -> None:
    """Ends that come with a plan: the slot may be another's in that very step."""
    prompts = [np.random.default_rng(n).integers(0, 90, 40 + n).tolist() for n in range(5)]
    with toy(state_slice_gib=ROOM, max_num_seqs=2) as engine:
        for turn in range(2):
            for n, prompt in enumerate(prompts):
                engine.add_request(request(f"{turn} {n}", prompt, GREEDY.clone(max_tokens=40), stream=True))
            made: dict[str, int] = {}
            while engine.has_unfinished():
                for delta in engine.step():
                    made[delta.request_id] = made.get(delta.request_id, 0) + len(delta.new_token_ids)
                    if made[delta.request_id] > 27 and delta.finish_reason is None:
                        engine.stop_at(delta.request_id, 0, 26)
        cut = dict(engine._slices.tier._slices)
        assert len(cut) >= 5 and engine._core.check() is None
    with toy(state_slice_gib=ROOM, enable_prefix_caching=True, zero_overhead=False, max_num_batched_tokens=256) as engine:
        for prompt in prompts:
            generate(engine, [prompt], GREEDY.clone(max_tokens=40))
        plain = engine._slices.tier._slices
        same = [key for key in cut if key in plain]
        assert len(same) >= 5 and all(cut[key] == plain[key] for key in same)


def test_a_failed_step_leaves_no_slice_of_what_it_wrote(wanted: list[list[int]]) -> None:
    with toy(state_slice_gib=ROOM) as engine:
        forward = engine.model.forward

        def fails(batch: Any, kv: Any) -> torch.Tensor:
            engine.model.forward = forward
            for rings in (engine.model._rings(kv, r) for r in (False, True)):
                rings[batch.state.state_row] = 77
            raise RuntimeError("once")

        prompts = [[*range(20, 60), n] for n in range(3)]
        for _ in range(3):
            engine.model.forward = fails
            generate(engine, prompts, [GREEDY] * 3)
        assert engine.counters.failed_steps >= 3
        assert conversation(engine, GREEDY, 25) == wanted


def test_the_tier_is_sized_by_the_setting(capsys: pytest.CaptureFixture[str]) -> None:
    def plan(state: list[StateGroup], given: SliceTier | None = None, **settings: Any) -> SlicePlan:
        return plan_slices(EngineConfig(model="m", **settings), state, given)

    assert plan([STATE]) == plan([]) == SlicePlan()
    assert plan([STATE, STATE], state_slice_gib=1).amount == ((1 << 30) // 128, 1 << 30)
    assert plan([STATE], HostSlices(1)).amount == (0, 0)
    for settings, state, given, said in (
        ({"state_slice_gib": 1}, [], None, "state_slice_gib is for models that keep windows"),
        ({"state_slice_gib": 1}, [StateGroup(8, 8, 1)], None, "state_slice_gib is for models that keep windows"),
        ({"state_slice_gib": 1, "enable_prefix_caching": False}, [STATE], None, "needs prefix caching"),
        ({}, [], HostSlices(1), "a tier of state slices is for models"),
        ({"state_slice_gib": 1}, [STATE], HostSlices(1), "leave one of them out"),
    ):
        with pytest.raises(ConfigError, match=said):
            plan(state, given, **settings)
    for wrong, said in ((1 << 19, "lower it"), (1e-9, "holds no slice")):
        with pytest.raises(CapacityError, match=f"state_slice_gib.*{said}"):
            plan([STATE], state_slice_gib=wrong)
    for bad in (-1, float("nan"), "much", True):
        with pytest.raises(ConfigError, match="state_slice_gib"):
            EngineConfig(model="m", state_slice_gib=bad)  # type: ignore[arg-type]
    run = RunConfig(CpuPlatform(), torch.float32, 8, 512, 0.5, None, True)
    small = KvPlan(5, 64, 1 << 10, 1 << 20, 1000, (6,))
    assert "1.0 MiB of state · 9 slices of states in 2.00 GiB" in report(run, small, "m", 1 << 20, slices=(9, 2 << 30))
    with toy(state_slice_gib=ROOM, quiet=False) as engine:
        assert "1,000 slices of states" in capsys.readouterr().err
        assert engine.metrics().slices["slices"] == 0
    with toy() as engine:
        assert engine.metrics().slices == {}


def test_forms_of_pages_and_states_have_names_of_their_own() -> None:
    def pages(dtype: torch.dtype, width: int) -> list[PagedGroup]:
        return [PagedGroup(128, (Source(("a",), 64, (width,), dtype),))]

    names = {
        form_of(pages(torch.uint8, 8), [STATE]),
        form_of(pages(torch.uint8, 16), [STATE]),
        form_of(pages(torch.bfloat16, 4), [STATE]),
        form_of(pages(torch.uint8, 8), [StateGroup(stored=96, dropped=128, ring=134, cut=128)]),
        form_of(pages(torch.uint8, 8), [StateGroup(stored=64, dropped=128, ring=140, cut=128)]),
    }
    assert len(names) == 5
    same = StateGroup(stored=64, dropped=999, replicas=1, ring=134, cut=128, replica_at=128, hits=HITS)
    assert form_of(pages(torch.uint8, 8), [same]) == form_of(pages(torch.uint8, 8), [STATE]), "what is not kept does not matter"


@pytest.mark.parametrize("overlap", [False, True])
def test_slices_go_from_the_replica_to_the_live_bytes(device: str, overlap: bool) -> None:
    groups = [StateGroup(10, 32, replicas=1, replica_at=21), StateGroup(4, 10, replicas=1, replica_at=9)]
    kv = KVCache([], [], groups, 6, torch.device(device))
    generator = torch.Generator().manual_seed(0)
    for rows in kv.states:
        rows.copy_(torch.randint(0, 256, rows.shape, generator=generator, dtype=torch.uint8))
    before = [rows.cpu().clone() for rows in kv.states]
    queue = make_queue(torch.device(device), overlap)
    copies = SliceCopies(kv, groups, queue, pinned=device != "cpu")
    assert copies.num_bytes == 14
    copy = copies.out([4, 2])
    found = copy.wait()
    assert copy.done and found.device.type == "cpu"
    spans = ((10, 21), (4, 9))
    for row, slot in zip(found, (4, 2), strict=True):
        want = b"".join(b[slot, at : at + n].numpy().tobytes() for b, (n, at) in zip(before, spans, strict=True))
        assert row.numpy().tobytes() == want
    ticket = Ticket()
    queue.submit(ticket, copies.back(found[0].numpy().tobytes(), 3), last=True)
    queue.wait(ticket)
    for rows, then, (n, at) in zip(kv.states, before, spans, strict=True):
        now = rows.cpu()
        assert torch.equal(now[3, :n], then[4, at : at + n])
        assert torch.equal(now[3, n:], then[3, n:]) and torch.equal(now[[0, 1, 2, 4, 5]], then[[0, 1, 2, 4, 5]])
    queue.close()


def test_a_copy_that_fails_costs_its_slices() -> None:
    class Failing(InlineQueue):
        def submit(self, ticket: Ticket, work: Callable[[], None], *, last: bool) -> None:
            ticket.error = RuntimeError("no memory")
            ticket.done.set()

    with toy(state_slice_gib=ROOM) as engine:
        engine._slices._copies._queue = Failing()
        generate(engine, [list(range(60))], GREEDY)
        assert engine.metrics().slices["faults"] == 2 and "no memory" in str(engine._slices.last_fault)
        assert engine.metrics().slices["slices"] == 0


class Elsewhere:
    """A tier that is not in host memory, as a store's client would be."""

    kind: Literal["host", "store"] = "store"

    def __init__(self) -> None:
        self.slices: dict[bytes, bytes] = {}
        self.told: list[Told] = []

    def put(self, key: bytes, data: bytes) -> bool:
        self.slices[key] = data
        for told in self.told:
            told(key, True)
        return True

    def get(self, key: bytes) -> bytes | None:
        return self.slices.get(key)

    def has(self, key: bytes) -> bool:
        return key in self.slices

    def watch(self, told: Told) -> Callable[[], None]:
        self.told.append(told)
        return lambda: self.told.remove(told)


def test_any_tier_will_do(wanted: list[list[int]]) -> None:
    tier = Elsewhere()
    with toy(slices=tier) as engine:
        assert conversation(engine, GREEDY, 25) == wanted
        assert engine.core_stats()["start_slice"] > 0
        assert set(engine.metrics().slices) == {"cut", "put_back", "gone", "faults"}
    assert not tier.told
