"""State slices of the real model: the bits of the whole prompt from a start behind one, and bytes that do not know of drafts.

Windows of 128 tokens on pages of 128, five layers up to the last one that writes block KV and five from there on: a start with a slice
needs 5 · 127 + 1 = 636 tokens behind it, one without 10 · 127 + 1 = 1271, of which 5 · 127 = 635 before the end of the hit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from deepinfer.engine.config import EngineConfig
from deepinfer.engine.engine import Engine
from deepinfer.engine.hooks import Admission
from deepinfer.kvcache.block_tier import BlockTier
from deepinfer.kvcache.state_slices import HostSlices
from deepinfer.models.base import WindowHits
from deepinfer.models.deepseek_v41.caches import plan_caches
from deepinfer.models.deepseek_v41.topology import read_topology
from deepinfer.sampling import SamplingParams
from deepseek_v41.draft_kit import DRAFTS, Told, loaded, write_config
from deepseek_v41.weights_kit import config, plan, random_ids
from engine_kit import Answer, collect, generate, request, same_bits

FIRST = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, logprobs=3)
STORED = plan_caches(plan("tiny128")).stored.nbytes


@cache
def text(length: int, seed: int = 1) -> tuple[int, ...]:
    """The first tokens of a text."""
    return tuple(random_ids(plan("tiny128"), 3100, seed)[:length].tolist())


class Made:
    """Makes engines of ``tiny128`` that share one model; the tier of each, ``None`` = no slices."""

    def __init__(self, patch: pytest.MonkeyPatch, where: Path, device: str) -> None:
        patch.setattr("deepinfer.engine.assembly.load_model", lambda *_: loaded("tiny128", device))
        self._where, self._device = write_config(where, "tiny128"), device

    def __call__(
        self, slices: HostSlices | None = None, cls: type[Engine] = Engine, store: BlockTier | None = None, **settings: Any
    ) -> Any:
        small = {
            "load_format": "dummy", "dtype": "float32", "quiet": True, "num_threads": 1, "num_kv_blocks": 60, "max_num_seqs": 4,
            "max_num_batched_tokens": 1024, "max_model_len": 3200, "state_snapshot_gib": 0, "swap_space_gib": 0,
        }  # fmt: skip
        return cls(EngineConfig(model=self._where, device=self._device, **{**small, **settings}), slices=slices, store=store)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, device: str) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        yield Made(patch, tmp_path_factory.mktemp("slices"), device)


def answers_alone(made: Made) -> Callable[..., Answer]:
    """Answers that nothing cached has a part in."""

    @cache
    def once(prompt: tuple[int, ...], count: int = 3) -> Answer:
        with made(enable_prefix_caching=False, zero_overhead=False, max_num_batched_tokens=3200) as engine:
            return generate(engine, [prompt], FIRST.clone(max_tokens=count))[0]

    return once


@pytest.fixture(scope="module")
def alone(made: Made) -> Callable[..., Answer]:
    return answers_alone(made)


def stats_of(engine: Engine, before: dict[str, int] | None = None) -> dict[str, int]:
    names = ("hit_tokens", "rerun_tokens", "start_nothing", "start_snapshot", "start_slice", "start_rerun")
    return {name: engine.core_stats()[name] - (before or {}).get(name, 0) for name in names}


def test_the_full_models_slice_has_the_bytes_that_are_sized_for() -> None:
    caches = plan_caches(read_topology(config("full")))
    group = caches.state_group()
    assert group.stored == 1_415_040 and caches.hits == WindowHits(20, 20, 128, 128, 6)
    assert caches.stored_slice == slice(group.replica_at, group.replica_at + 1_415_040)


@pytest.mark.parametrize("overlap", [pytest.param(False, marks=pytest.mark.nightly), True])
def test_starts_behind_slices_give_the_bits_of_the_whole_prompt(overlap: bool, made: Made, alone: Callable[..., Answer]) -> None:
    """Chunks, mates that begin in other ways, the same prompt once more and what follows it."""
    long = text(790)
    longer = (*long, *text(660, 2))
    beside = text(200, 3)
    with made(HostSlices(100 * STORED), zero_overhead=overlap, max_num_batched_tokens=300) as engine:
        asked = [(long, [0, 0]), ((*long, *text(50, 4)), [768, 0]), (longer, [768, 768])]
        for prompt, (hit, start) in asked:
            before = stats_of(engine)
            found = generate(engine, [prompt, beside], FIRST)
            assert same_bits(found[0], alone(prompt)) and same_bits(found[1], alone(beside)), len(prompt)
            stats = stats_of(engine, before)
            # The mate's hit of 128 tokens is too short for anything but a start from its beginning.
            mates = 0 if prompt == long else 128
            assert (stats["hit_tokens"], stats["rerun_tokens"]) == (hit + mates, hit - start + mates), len(prompt)
        assert stats["start_slice"] == 1 and engine.metrics().slices["gone"] == 0
        assert engine._core.check() is None


@pytest.mark.parametrize(
    ("policy", "kept", "length", "kind", "start"),
    [
        ("exact", "snapshot", 1000, "snapshot", 896),
        pytest.param("exact", "slice", 1000, "rerun", 0, marks=pytest.mark.nightly),
        pytest.param("exact", "slice", 1531, "rerun", 256, marks=pytest.mark.nightly),  # 1531 − 1271 → 256
        ("exact", "slice", 1532, "slice", 896),  # 1532 − 636 = 896
        pytest.param("exact", "nothing", 1532, "rerun", 256, marks=pytest.mark.nightly),  # 896 − 635 → 256
        pytest.param(
            "replay", "slice", 1029, "rerun", 768, marks=pytest.mark.nightly
        ),  # 134 tokens are kept, and 128 before the end of the hit
        ("replay", "slice", 1030, "slice", 896),
        pytest.param("replay", "nothing", 1030, "rerun", 768, marks=pytest.mark.nightly),
    ],
)
def test_what_is_computed_again_is_counted_to_the_token(
    policy: str, kept: str, length: int, kind: str, start: int, made: Made, alone: Callable[..., Answer]
) -> None:
    """A text of 900 tokens was asked before, which leaves 896 in the index."""
    settings: dict[str, Any] = {"hit_policy": policy, "state_snapshot_gib": None if kept == "snapshot" else 0}
    with made(HostSlices(100 * STORED) if kept == "slice" else None, **settings) as engine:
        generate(engine, [text(900)], FIRST)
        before = engine.core_stats()
        found = generate(engine, [text(length)], FIRST)[0]
        after = engine.core_stats()
    stats = {name: after[name] - before[name] for name in after}
    assert {name: stats[f"start_{name}"] for name in ("snapshot", "slice", "rerun")} == {
        "snapshot": 0, "slice": 0, "rerun": 0, kind: 1,
    }  # fmt: skip
    assert (stats["hit_tokens"], stats["rerun_tokens"]) == (896, 896 - start)
    assert stats["prefill_tokens"] == length - start
    if policy == "exact":
        assert same_bits(found, alone(text(length)))


class Watching(Engine):
    """Keeps the pages of each hit as they are when a sequence begins behind it."""

    def init_pd_split(self) -> None:
        self.begun: list[tuple[Admission, list[torch.Tensor]]] = []

    def load_state_from_store_to_prefill_cache(self, admission: Admission) -> bytes | None:
        self.begun.append((admission, []))
        return None

    def pages(self, tokens: int, state_slot: int) -> list[torch.Tensor]:
        """Bytes of everything on the pages of the first tokens of a slot's sequence."""
        self._runner.in_order(lambda: None)()
        pages = self._runner.inputs.table[state_slot][: tokens // 128].long()
        kv = self._runner.kv.tensors
        return [kv[name][pages].view(torch.uint8).clone() for name in sorted(kv) if not name.startswith("state")]


def nats(found: Answer, whole: Answer) -> float:
    """Largest change of the log-probability of a first token that both have."""
    now, then = ({int(i): float(v) for i, v in zip(a.logprobs[0].ids, a.logprobs[0].values, strict=True)} for a in (found, whole))
    return max(abs(now[token] - then[token]) for token in now.keys() & then.keys())


@pytest.mark.parametrize("policy", [pytest.param("exact", marks=pytest.mark.nightly), "replay"])
def test_what_is_computed_again_writes_nothing_that_others_read(
    policy: str, made: Made, alone: Callable[..., Answer], record_property: Callable[[str, object], None]
) -> None:
    """Block KV of the hit keeps its bytes, from the start at the slice to the end of the answer; what ``replay`` is off by is measured.

    Under ``replay`` what is behind the hit enters the cache as it was computed, and only that: decoder rows have no place in it.
    """
    length = 1560 if policy == "exact" else 1060
    params = FIRST.clone(logprobs=-1, max_tokens=1)
    with made(HostSlices(100 * STORED), Watching, hit_policy=policy, max_num_batched_tokens=200) as engine:
        generate(engine, [text(900)], params)
        engine.add_request(request("again", text(length), params.clone(max_tokens=80)))
        engine.step()
        ((admission, _),) = engine.begun
        assert (admission.kind, admission.tokens, admission.hit) == ("slice", 896, 896)
        before = engine.pages(896, admission.state_slot)
        answer = collect(engine)["again", 0]
        after = engine.pages(896, admission.state_slot)
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        published = engine.core_counts()["groups"][0]["cached"]
        assert published == (length + 79) // 128, "the blocks of one text, each once"
        # What was cut behind the replay lies in the same names, and a later start from it is as good as from nothing cached.
        assert engine.metrics().slices["differing"] == 0 and engine._core.check() is None
    with made(enable_prefix_caching=False, max_num_batched_tokens=3200) as engine:
        whole = generate(engine, [text(length)], params)[0]
    off = nats(answer, whole)
    record_property("nats", off)
    assert (off == 0) if policy == "exact" else (0 < off < 2.0), off


@pytest.mark.nightly
def test_slices_do_not_know_of_drafts(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """The boundary at 128 is passed while drafts are made, by steps that keep 0 to 5 of them from every place before it."""
    prompt, count = text(117), 22
    params = FIRST.clone(max_tokens=count, logprobs=None)
    tiers: list[HostSlices] = []

    def run(**settings: Any) -> Any:
        tiers.append(HostSlices(100 * STORED))
        return made(tiers[-1], enable_prefix_caching=True, **settings)

    with run() as engine:
        answer = generate(engine, [prompt], params)[0].tokens
    for turn in range(DRAFTS + 1):
        with monkeypatch.context() as patch, run(speculative="dspark", zero_overhead=bool(turn % 2)) as engine:
            told = Told(patch, engine, [[*prompt, *answer]], lambda position, turn=turn: (position * (turn + 1) + turn) % (DRAFTS + 1))
            assert generate(engine, [prompt], params)[0].tokens == answer
            assert told.calls > 0 and (engine.core_stats()["accepted"] > 0 or turn == 5)
    assert len(tiers[0]._slices) == 1 and [tier._slices for tier in tiers[1:]] == [tiers[0]._slices] * (DRAFTS + 1)


def test_every_pattern_of_drafts_across_the_boundary_leaves_one_slice(made: Made, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences stand wherever 0 to 5 drafts, kept in a step that overlaps with the next one, lead across the boundary at 256.

    It is not the first boundary: what a step writes behind it overwrites rows that the ring still has from before the window.
    """
    prompt, count, boundary = text(245), 22, 256
    params = FIRST.clone(logprobs=None)
    undrafted = HostSlices(100 * STORED)
    with made(undrafted, zero_overhead=False) as engine:
        stream = [*prompt, *generate(engine, [prompt], params.clone(max_tokens=count))[0].tokens]
    _, wanted = undrafted._slices.values()  # the prompt left the one at 128
    tier, kept, stood = HostSlices(100 * STORED), 0, Counter[int]()

    def right(position: int) -> int:
        stood[position] += 1
        return kept

    with made(tier, speculative="dspark", max_num_seqs=6, draft_budget=6 * DRAFTS) as engine:
        Told(monkeypatch, engine, [stream], right)
        for kept in range(DRAFTS + 1):
            stood.clear()
            places = range(boundary - kept - 1, boundary)
            for place in places:
                rest = params.clone(max_tokens=len(stream) - place)
                engine.add_request(request(f"{place} {kept}", stream[:place], rest, salt=f"{place} {kept}".encode()))
            assert all([*stream[: int(name.split()[0])], *a.tokens] == stream for (name, _), a in collect(engine).items())
            # Where steps begin: at each of the places, and from there on every ``kept + 1`` tokens.
            begun = Counter(p for place in places for p in range(place, boundary + DRAFTS + 1, kept + 1))
            assert {p: stood[p] for p in begun} == begun, kept
        assert engine._core.check() is None
    patterns = sum(range(1, DRAFTS + 2))
    assert Counter(tier._slices.values()) == dict.fromkeys(undrafted._slices.values(), patterns)
    # Six places of each ring are outside of the window, and cleared.
    bytes_of = torch.frombuffer(bytearray(wanted), dtype=torch.uint8)[None]
    assert bytes_of.numel() == STORED
    held = {position % 134 for position in range(128, 256)}
    for rows in loaded("tiny128", device).caches.stored.views(bytes_of, 0).values():
        assert [bool(row.any()) for row in rows[0]] == [place in held for place in range(134)]


@pytest.mark.nightly
def test_drafts_and_forks_behind_a_slice(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = text(1290)
    params = SamplingParams(temperature=0.8, n=2, seed=3, max_tokens=8, ignore_eos=True)
    answers = []
    for settings in ({"enable_prefix_caching": False}, {"speculative": "dspark"}):
        tier = None if "speculative" not in settings else HostSlices(100 * STORED)
        with monkeypatch.context() as patch, made(tier, **settings) as engine:
            if tier is not None:
                Told(patch, engine, [[*prompt, *tokens] for tokens in answers[0]], lambda position: position % 4)
                generate(engine, [text(650)], FIRST)
            engine.add_request(request("forks", prompt, params))
            answers.append([answer.tokens for _, answer in sorted(collect(engine).items())])
            stats = engine.core_stats()
    assert answers[0] == answers[1] and answers[0][0] != answers[0][1]
    assert (stats["start_slice"], stats["forks"]) == (1, 1) and stats["accepted"] > 0


@pytest.mark.nightly
def test_victims_begin_again_behind_their_slices(made: Made, alone: Callable[..., Answer]) -> None:
    """Two sequences grow until the newer one has to give its blocks up; it begins again behind a slice of what it shares with others."""
    prompts = [text(370, 6), (*text(660), *text(730, 5))]
    with made(HostSlices(100 * STORED), num_kv_blocks=15, max_model_len=1600) as engine:
        generate(engine, [text(660)], FIRST)
        found = generate(engine, prompts, FIRST.clone(max_tokens=40))
        stats = engine.core_stats()
        assert stats["preemptions"] > 0 and stats["start_slice"] > 0 and engine._core.check() is None
    for prompt, answer in zip(prompts, found, strict=True):
        assert same_bits(answer, alone(tuple(prompt), 40)), len(prompt)


def sweep(made: Made, tails: Sequence[int]) -> None:
    """Slices at the last boundary of prompts that end so many tokens behind it, computed side by side in chunks of any length."""
    tier = HostSlices(1000 * STORED)
    with made(tier, max_num_batched_tokens=90) as engine:
        for tail in tails:
            # The same text under names of its own.
            engine.add_request(request(str(tail), text(256 + tail), FIRST.clone(max_tokens=1, logprobs=None), salt=str(tail).encode()))
        collect(engine)
    slices = list(tier._slices.values())
    assert len(slices) == len(tails) and all(data == slices[0] for data in slices)


def test_some_tails_of_a_prompt_leave_the_same_slice(made: Made) -> None:
    sweep(made, (0, 1, 2, 5, 6, 7, 31, 64, 90, 121, 126, 127))


@pytest.mark.nightly
def test_every_tail_of_a_prompt_leaves_the_same_slice(made: Made) -> None:
    sweep(made, range(128))


@pytest.mark.nightly
def test_a_second_engine_begins_with_the_slices_of_the_first(made: Made, alone: Callable[..., Answer]) -> None:
    """It has the block KV by its own work, in other chunks and beside others."""
    tier, prompt = HostSlices(100 * STORED), text(1290)
    with made(tier) as first:
        generate(first, [text(650)], FIRST)
    with made(tier, max_num_batched_tokens=333) as second:
        generate(second, [text(650), text(80, 9)], FIRST)
        assert same_bits(generate(second, [prompt], FIRST)[0], alone(prompt))
        assert second.core_stats()["start_slice"] == 1 and tier.counts().differing == 0
