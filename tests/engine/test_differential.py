"""Whatever runs beside a request, is drafted, preempted, swapped, masked, aborted or fails: it gets what it would get alone."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import api_kit
import differential_kit as kit
import window_toy
from deepinfer import LLM, RequestOutput
from deepinfer.engine.kv_store.saves import Saves
from deepinfer.sampling import SamplingParams
from engine_kit import collect, make_engine, random_prompts, request, same_bits, tiny_checkpoint

PLAIN = {
    "block_size": 16,
    "num_kv_blocks": 32,
    "max_model_len": kit.LLAMA.max_len,
    "max_num_seqs": 1,
    "zero_overhead": False,
    "enable_prefix_caching": False,
    "swap_space_gib": 0,
}


LLAMA, WINDOWS = (pytest.param(kind, id=name) for kind, name in ((kit.LLAMA, "llama"), (kit.WINDOWS, "windows")))


def make(kind: kit.Kind, device: str, **settings: Any) -> LLM:
    return LLM(
        window_toy.toy_checkpoint() if kind.windows else api_kit.tiny_model(),
        device=device,
        dtype="float32",
        quiet=True,
        num_threads=1,
        **settings,
    )


@pytest.fixture(scope="module")
def alone(device: str) -> Iterator[Callable[[kit.Kind], LLM]]:
    """One request, one step at a time, nothing but the model."""
    made: dict[kit.Kind, LLM] = {}

    def of(kind: kit.Kind) -> LLM:
        if kind not in made:
            more = {"load_format": "dummy"} if kind.windows else {}
            made[kind] = make(kind, device, **{**PLAIN, "max_model_len": kind.max_len, **more})
        return made[kind]

    yield of
    for llm in made.values():
        llm.close()


def check(kind: kit.Kind, seed: int, device: str, alone: Callable[[kit.Kind], LLM]) -> dict[str, int]:
    play = kit.Play.of(seed, kind)
    with make(kind, device, **play.settings) as llm:
        found = kit.perform(llm, play)
        wrong = kit.leftovers(llm)
        done = {**llm.engine.core_stats(), "drafts": llm.engine.counters.draft_rows}
    wrong += kit.differences(play, found, {job.name: kit.alone(alone(kind), job) for job in play.jobs})
    assert not wrong and not play.refused, f"seed {seed}, {play.settings}: {wrong} {play.refused}"
    return done


@pytest.mark.parametrize(
    ("kind", "seeds", "reached"),
    [
        pytest.param(kit.LLAMA, range(6), ("drafts", "hit_tokens"), id="llama"),
        pytest.param(
            kit.WINDOWS, (2, 7, 10, 13, 16), ("drafts", "start_snapshot", "start_rerun", "snapshots_evicted", "preemptions"), id="windows"
        ),
    ],
)
def test_everything_at_once_is_as_each_alone(
    kind: kit.Kind, seeds: Sequence[int], reached: tuple[str, ...], device: str, alone: Callable[[kit.Kind], LLM]
) -> None:
    if kind is kit.WINDOWS and device != "cpu":
        pytest.skip("the toy is for a CPU")
    done = [check(kind, seed, device, alone) for seed in seeds]
    assert all(sum(d[name] for d in done) > 0 for name in reached), done


def check_lives(kind: kit.Kind, seed: int, device: str, alone: Callable[[kit.Kind], LLM], folder: Path) -> dict[str, int]:
    """Engines one after the other, each on what those before it stored."""
    play = kit.Play.of(seed, kind)
    found: dict[str, RequestOutput] = {}
    wrong: list[str] = []
    done: dict[str, int] = {}
    for part in play.parts():
        with make(kind, device, **play.settings, kv_store=f"dir:{folder / str(seed)}") as llm:
            found |= kit.perform(llm, part)
            wrong += kit.leftovers(llm)
            counters = llm.engine.metrics().store
            assert counters is not None
            for name in ("saved", "fetched", "slices_fetched"):
                done[name] = done.get(name, 0) + counters[name]
            wrong += [f"{name}: {counters[name]}" for name in ("conflicts", "lost", "faults") if counters[name]]
    wrong += kit.differences(play, found, {job.name: kit.alone(alone(kind), job) for job in play.jobs})
    assert not wrong and not play.refused, f"seed {seed}, {play.settings}: {wrong} {play.refused}"
    return done


@pytest.mark.parametrize(
    ("kind", "seeds", "reached"),
    [
        pytest.param(kit.STORED, (4, 5), ("saved", "fetched"), id="llama"),
        pytest.param(kit.STORED_WINDOWS, (0, 3), ("saved", "fetched", "slices_fetched"), id="windows"),
    ],
)
def test_engines_that_share_a_store_answer_as_each_alone(
    kind: kit.Kind, seeds: Sequence[int], reached: tuple[str, ...], device: str, alone: Callable[[kit.Kind], LLM], tmp_path: Path
) -> None:
    if kind.windows and device != "cpu":
        pytest.skip("the toy is for a CPU")
    done = [check_lives(kind, seed, device, alone, tmp_path) for seed in seeds]
    assert all(sum(d[name] for d in done) > 0 for name in reached), done


def lost(saves: Saves, chain: Any) -> None:
    """A save that is forgotten instead of ended."""
    if not chain.pieces and chain.sent == chain.count:
        saves._open.discard(chain)


@pytest.mark.parametrize("wrong", ["slow", "never", "lost"])
def test_a_save_is_waited_for_and_one_whose_end_is_lost_is_told(
    wrong: str, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A put that takes its time leaves nothing behind; one that hangs, or a transfer that nobody ends, does."""
    gate, put = threading.Event(), Saves._send_piece

    def slowly(saves: Saves, *given: Any) -> None:
        saves._mover.send_off(lambda: gate.wait(20.0 if wrong == "never" else 0.3))  # the one thread comes to the put behind it
        put(saves, *given)

    monkeypatch.setattr(Saves, "_send_piece", slowly)
    if wrong == "lost":
        monkeypatch.setattr(Saves, "_look_whether_done", lost)
    monkeypatch.setattr(kit, "PATIENCE", 1.0 if wrong == "never" else kit.PATIENCE)
    settings = {**PLAIN, "max_model_len": 352, "enable_prefix_caching": True, "kv_store": f"dir:{tmp_path / 'store'}"}
    with make(kit.STORED, device, **settings) as llm:
        llm.generate({"prompt_token_ids": random_prompts((200,))[0]}, SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
        found = kit.leftovers(llm)
        gate.set()
    if wrong == "slow":
        assert not found
    else:
        assert any("'transfer_refs': 1" in said for said in found), found
        assert ("is still to be stored" in found[0]) == (wrong == "never")


@pytest.mark.nightly
@pytest.mark.parametrize("kind", [kit.STORED, kit.STORED_WINDOWS], ids=["llama", "windows"])
@pytest.mark.parametrize("first", range(1000, 1100, 10))
def test_engines_that_share_a_store_at_length(
    first: int, kind: kit.Kind, device: str, alone: Callable[[kit.Kind], LLM], tmp_path: Path
) -> None:
    if kind.windows and device != "cpu":
        pytest.skip("the toy is for a CPU")
    for seed in range(first, first + 10):
        check_lives(kind, seed, device, alone, tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", [LLAMA, WINDOWS])
@pytest.mark.parametrize("first", range(1000, 1400, 10))
def test_everything_at_once_at_length(first: int, kind: kit.Kind, device: str, alone: Callable[[kit.Kind], LLM]) -> None:
    if kind is kit.WINDOWS and device != "cpu":
        pytest.skip("the toy is for a CPU")
    for seed in range(first, first + 10):
        check(kind, seed, device, alone)


@pytest.mark.parametrize("overlap", [True, False])
def test_draft_rows_that_are_as_many_as_the_sequences(overlap: bool, device: str) -> None:
    """Two rows of one sequence beside a prompt's chunk, which has none: each row still has the sampling of its own sequence."""
    drafted = SamplingParams(
        temperature=0, max_tokens=40, presence_penalty=1.0, logit_bias={52: 9.0, 239: 10.0}, logprobs=2, ignore_eos=True
    )
    plain = SamplingParams(temperature=0, max_tokens=4, logprobs=2, ignore_eos=True)
    prompts, found = random_prompts((5, 90)), []
    for drafts in ({}, {"speculative": "ngram", "num_draft_tokens": 1, "ngram_min": 1, "draft_budget": 8}):
        with make_engine(
            tiny_checkpoint("llama"), device, zero_overhead=overlap, max_num_seqs=2, max_num_batched_tokens=4, **drafts
        ) as engine:
            seen, launch = [0], engine._runner.launch_sample

            def launched(step, launch=launch, seen=seen):  # type: ignore[no-untyped-def]
                rows = np.diff(step.slot.a["sample_off"][: step.header.seqs + 1])
                seen[0] += rows.max() > 1 and rows.sum() == len(rows)
                launch(step)

            engine._runner.launch_sample = launched  # type: ignore[method-assign]
            engine.add_request(request("a", prompts[0], drafted))
            for _ in range(6):
                engine.step()
            engine.add_request(request("b", prompts[1], plain))
            found.append(collect(engine))
            assert (seen[0] > 0) == bool(drafts)
    assert same_bits(found[0]["a", 0], found[1]["a", 0]) and same_bits(found[0]["b", 0], found[1]["b", 0])
