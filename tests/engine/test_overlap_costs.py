"""What a step in flight adds to launching the next one: no operation while all decode, a handful otherwise, no memory, no event.

Counted, not timed: the same on a fake GPU and, with ``-m "gpu or not gpu"``, on a real one, whose step is bound by its launches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from deepinfer.engine.engine import Engine
from deepinfer.sampling import SamplingParams
from deepinfer.worker.step import Step
from deepinfer.worker.step_ring import Header
from engine_kit import make_engine, random_prompts, request, tiny_checkpoint
from fake_cuda import FakeCuda, FakeRecorder, Operations
from graphs_kit import decode_of_references

GREEDY: dict[str, Any] = {"temperature": 0}
DRAWN: dict[str, Any] = {"temperature": 0.8, "top_k": 20, "repetition_penalty": 1.2}
_RESOLVING = 7  # operations that fill in the ids of a step of which only some rows are unresolved


def some_tokens(host: torch.Tensor) -> None:
    """Puts a valid id where a copy of sampled tokens ends."""
    if host.dtype == torch.int32:
        host.fill_(5)


@pytest.fixture(params=["fake", pytest.param("gpu", marks=pytest.mark.gpu)])
def fake(request: pytest.FixtureRequest) -> Iterator[FakeCuda | None]:
    """A device called "cuda"."""
    if request.param == "gpu":
        yield None
        return
    with FakeCuda(some_tokens) as device:
        yield device


@dataclass
class Launch:
    """Operations of one step, and whether each of its rows is the token that the step in flight draws for it."""

    operations: Counter[str]
    unresolved: int
    steady: bool


def launches(overlap: bool, values: dict[str, Any]) -> dict[tuple[int, ...], Launch]:
    """The steps, by what they hold, of a load in which prompts come and sequences end one after another."""
    found: dict[tuple[int, ...], Launch] = {}
    steps: list[tuple[Header, list[int]]] = []
    arrivals = {0: 12, 3: 9, 6: 3}  # at which turn, for how many tokens
    with make_engine(tiny_checkpoint("llama", layers=1), "cuda", max_num_seqs=4, zero_overhead=overlap, cuda_graphs="off") as engine:
        launch = engine._runner.launch_forward

        def noted(index: int, error: Exception | None = None) -> Step:
            step = launch(index, error)
            steps.append((step.header, step.slot.a["seq_len"][: step.header.seqs].tolist()))
            return step

        engine._runner.launch_forward = noted  # type: ignore[method-assign]
        turn = 0
        while engine.has_unfinished() or turn in arrivals or turn < max(arrivals):
            if turn in arrivals:
                params = SamplingParams(max_tokens=arrivals[turn], ignore_eos=True, **values)
                engine.add_request(request(str(turn), random_prompts([9 + turn])[0], params))
            with Operations() as operations:
                engine.step()
            turn += 1
            while steps:
                h, lengths = steps.pop()
                steady = h.rows == h.seqs == h.unresolved
                found[h.rows, h.samples, h.deltas, h.admitted, *lengths] = Launch(operations.seen, h.unresolved, steady)
    return found


def test_overlap_adds_no_operation_while_all_decode_and_a_handful_otherwise(fake: FakeCuda | None) -> None:
    serial, overlapped = launches(False, GREEDY), launches(True, GREEDY)
    compared = Counter({True: 0, False: 0})
    for held, launch in overlapped.items():
        if launch.unresolved and held in serial:
            more = launch.operations - serial[held].operations
            assert more.total() <= (0 if launch.steady else _RESOLVING), (held, more)
            compared[launch.steady] += 1
    assert compared[True] >= 5 and compared[False] >= 1, compared


def taken(fake: FakeCuda | None) -> int:
    """Times that memory was taken so far: on a fake GPU page-locked memory, on a real one either kind, from the driver."""
    if fake is not None:
        return fake.times_pinned
    return int(torch.cuda.memory_stats()["num_device_alloc"] + torch.cuda.host_memory_stats().get("num_host_alloc", 0))


def decoding(overlap: bool, values: dict[str, Any]) -> Engine:
    engine = make_engine(tiny_checkpoint("llama", layers=1), "cuda", max_num_seqs=8, zero_overhead=overlap)
    for i, prompt in enumerate(random_prompts([20] * 3)):
        engine.add_request(request(str(i), prompt, SamplingParams(max_tokens=200, ignore_eos=True, **values)))
    for _ in range(6):
        engine.step()
    return engine


@pytest.mark.parametrize("overlap", [False, True], ids=["serial", "overlapped"])
def test_a_steady_step_takes_no_memory_and_makes_no_event(fake: FakeCuda | None, overlap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    with decoding(overlap, DRAWN) as engine:
        made: list[object] = []
        event = torch.cuda.Event

        def counted(*args: Any, **kwargs: Any) -> torch.cuda.Event:
            made.append(None)
            return event(*args, **kwargs)

        monkeypatch.setattr(torch.cuda, "Event", counted)
        before, steps = taken(fake), engine.counters.steps
        for _ in range(6):
            engine.step()
        monkeypatch.undo()
        assert engine.counters.steps == steps + 6
        assert taken(fake) == before
        assert not made


@pytest.mark.parametrize("overlap", [False, True], ids=["serial", "overlapped"])
def test_a_steady_greedy_step_is_two_copies_and_a_graph(fake: FakeCuda | None, overlap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """No operation besides, no memory, three moments marked, and no more bytes than its words."""
    decode_of_references(monkeypatch, [8])
    with decoding(overlap, GREEDY) as engine:
        steps, before, graphs = engine.counters.steps, taken(fake), engine.metrics().graphs["replays"]
        marks: list[object] = []
        record = torch.cuda.Event.record
        monkeypatch.setattr(torch.cuda.Event, "record", lambda self, *a: marks.append(None) or record(self, *a))
        if fake is not None:
            fake.copies.clear()
        fakes = FakeRecorder.replays
        with Operations() as operations:
            for _ in range(6):
                engine.step()
        assert engine.counters.steps == steps + 6 and engine.metrics().graphs["replays"] == graphs + 6
        assert operations.seen == {"aten::copy_": 12} and len(marks) == 18 and taken(fake) == before
        if fake is not None:
            words = engine._runner.ring.front_words
            assert fake.copies == [("cpu to cuda", 4 * words), ("cuda to cpu", 4 * 3)] * 6
            assert FakeRecorder.replays == fakes + 6


def test_a_steady_drawn_step_copies_no_more_than_it_reads(fake: FakeCuda | None, monkeypatch: pytest.MonkeyPatch) -> None:
    decode_of_references(monkeypatch, [8])
    with decoding(True, DRAWN) as engine:
        steps, graphs, before = engine.counters.steps, engine.metrics().graphs["replays"], taken(fake)
        if fake is not None:
            fake.copies.clear()
        for _ in range(6):
            engine.step()
        assert engine.counters.steps == steps + 6 and engine.metrics().graphs["replays"] == graphs + 6 and taken(fake) == before
        ring = engine._runner.ring
        assert ring.own_words < len(ring.slots[0].host) // 2
        if fake is not None:
            assert fake.copies == [("cpu to cuda", 4 * ring.own_words), ("cuda to cpu", 4 * 3)] * 6
