"""Decode steps by graphs give the bits of those without, whatever happens around them; by a stand-in that runs on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from deepinfer.engine import decode_graphs
from deepinfer.engine.config import EngineConfig
from deepinfer.engine.engine import Engine
from deepinfer.engine.step_log import line
from deepinfer.errors import CapacityError, ConfigError, ModelContractError
from deepinfer.models.base import row_buckets
from deepinfer.models.llama.forward import LlamaModel
from deepinfer.sampling import SamplingParams
from deepinfer.worker import graphs
from deepinfer.worker.decode_step import DecodeGraphs
from deepinfer.worker.graphs import Replay, Work
from engine_kit import EvenOnly, collect, generate, make_engine, random_prompts, request, same_bits, tiny_checkpoint
from graphs_kit import Recorded, graphs_on_cpu
from play_kit import KINDS, arriving, check_recorded_play

GREEDY = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)


def replays(engine: Engine) -> int:
    return engine.metrics().graphs.get("replays", 0)


@pytest.mark.parametrize("buckets", [None, [3], [2, 40]], ids=str)
@pytest.mark.parametrize("overlap", [False, True], ids=["serial", "overlapped"])
def test_answers_are_the_same(buckets: list[int] | None, overlap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with more padding than there are sequences, and with steps of more rows than were recorded."""
    prompts = random_prompts([5, 70, 33, 18, 64, 3, 40, 90, 21, 10])
    params = [KINDS[i % len(KINDS)] for i in range(len(prompts))]
    settings: dict[str, Any] = {"max_num_seqs": 5, "max_num_batched_tokens": 48, "zero_overhead": overlap}
    with make_engine(tiny_checkpoint("llama"), "cpu", **settings) as engine:
        want = arriving(engine, prompts, params, 3)
        assert not engine.metrics().graphs
    graphs_on_cpu(monkeypatch, buckets)
    with make_engine(tiny_checkpoint("llama"), "cpu", **settings) as engine:
        got = arriving(engine, prompts, params, 3)
        assert 10 < replays(engine) <= engine.metrics().steps["decode"]
    assert all(same_bits(a, b) for a, b in zip(want, got, strict=True))


@pytest.mark.parametrize("overlap", [False, True], ids=["serial", "overlapped"])
def test_every_plain_decode_step_is_a_replay(overlap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    graphs_on_cpu(monkeypatch)
    with make_engine(tiny_checkpoint("llama", layers=1), "cpu", zero_overhead=overlap, block_size=16) as engine:
        generate(engine, random_prompts([5, 9, 30]), GREEDY)
        metrics = engine.metrics()
        assert metrics.graphs["replays"] == metrics.steps["decode"] > 15
        assert f" · graphs {metrics.graphs['replays']} · " in line(None, metrics, 1.0)
        before = metrics
        generate(engine, random_prompts([5, 9, 30], seed=1), GREEDY.clone(temperature=0.7, seed=3))
        metrics = engine.metrics()
        assert metrics.graphs["replays"] == metrics.steps["decode"] > 30
        assert f" · graphs {metrics.graphs['replays'] - before.graphs['replays']} · " in line(before, metrics, 1.0)


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(s, marks=pytest.mark.nightly) for s in range(2, 10))])
def test_the_same_under_aborts_stops_forks_and_preemption(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    check_recorded_play(seed, lambda: graphs_on_cpu(monkeypatch, [1, 2, 4, 6]), replays)


class Dirty(Recorded):
    """Spoils, ahead of each replay, all memory of graphs that a replay is to write itself, and the null page."""

    made: list[Dirty] = []

    def __init__(self) -> None:
        super().__init__()
        self.made.append(self)
        self.spoil: Callable[[], None] = lambda: None

    def record(self, work: Work) -> Replay:
        """See `deepinfer.worker.graphs.Recorder`."""
        work = super().record(work)

        def replay() -> None:
            self.spoil()
            work()

        return replay


def test_padding_reads_nothing_that_was_there(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = random_prompts([5, 70, 33])
    with make_engine(tiny_checkpoint("llama"), "cpu") as engine:
        want = arriving(engine, prompts, KINDS[:3], 4)
    graphs_on_cpu(monkeypatch, [8])
    monkeypatch.setattr(graphs, "recorder_for", lambda device: Dirty())
    with make_engine(tiny_checkpoint("llama"), "cpu", max_num_seqs=8) as engine:
        made, kv = engine._runner.graphs, engine._runner.kv
        assert made is not None

        @torch.inference_mode()
        def spoil() -> None:
            made._fields.wide.fill_(-7)
            made._fields.seq_len.fill_(10_000)
            made._hidden.fill_(torch.nan)  # type: ignore[union-attr]
            made._newest[3:].fill_(12_345)
            for tensor in kv.tensors.values():
                tensor[0].fill_(torch.nan)

        Dirty.made[-1].spoil = spoil
        got = arriving(engine, prompts, KINDS[:3], 4)
        assert replays(engine) > 20
    assert all(same_bits(a, b) for a, b in zip(want, got, strict=True))


@pytest.mark.parametrize("overlap", [False, True], ids=["serial", "overlapped"])
def test_rows_with_a_grammar(overlap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = random_prompts([5, 9])

    def run() -> tuple[list[list[int]], int]:
        with make_engine(tiny_checkpoint("llama"), "cpu", zero_overhead=overlap) as engine:
            engine.add_request(request("held", prompts[0], GREEDY, grammar=EvenOnly))
            engine.add_request(request("free", prompts[1], GREEDY))
            answers = collect(engine)
            return [answers[name, 0].tokens for name in ("held", "free")], replays(engine)

    want, _ = run()
    graphs_on_cpu(monkeypatch)
    got, count = run()
    assert got == want and count > 15
    assert all(t % 2 == 0 for t in got[0]) and not all(t % 2 == 0 for t in got[1])


def test_steps_with_drafts_run_without_and_those_between_them_as_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [p * 4 for p in random_prompts([7, 11, 5])]
    with make_engine(tiny_checkpoint("llama"), "cpu") as engine:
        want = generate(engine, prompts, GREEDY.clone(max_tokens=60))
    graphs_on_cpu(monkeypatch)
    with make_engine(tiny_checkpoint("llama"), "cpu", speculative="ngram", num_draft_tokens=3) as engine:
        got = generate(engine, prompts, GREEDY.clone(max_tokens=60))
        metrics = engine.metrics()
        assert metrics.totals["accepted"] > 0 and 0 < metrics.graphs["replays"] < metrics.steps["decode"]
    assert [a.tokens for a in got] == [a.tokens for a in want]


@pytest.mark.parametrize("overlap", [False, True], ids=["serial", "overlapped"])
def test_a_replay_that_fails_ends_its_sequences_alone(overlap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it was to store a page in the table: who comes later, or had no row in it, is not touched."""
    graphs_on_cpu(monkeypatch)
    prompts = random_prompts([30, 12])
    with make_engine(tiny_checkpoint("llama"), "cpu", zero_overhead=overlap, block_size=16) as engine:
        want = generate(engine, prompts[1:], GREEDY)
        for fail_at in range(3, 9):  # one of these steps begins a page
            with monkeypatch.context() as patch:
                real, left = DecodeGraphs.replay, [fail_at]

                def replay(self: DecodeGraphs, *args: Any, real: Any = real, left: list[int] = left) -> None:
                    left[0] -= 1
                    if left[0] == 0:
                        raise RuntimeError("no launch")
                    real(self, *args)

                patch.setattr(DecodeGraphs, "replay", replay)
                before = engine.counters.failed_steps
                engine.add_request(request("fails", prompts[0], GREEDY))
                ends = {d.request_id: d for _ in range(fail_at + 1) for d in engine.step() if d.finish_reason}
                engine.add_request(request("lives", prompts[1], GREEDY))
                answers = collect(engine)
                failed = answers["fails", 0].error if ("fails", 0) in answers else ends["fails"].error
                assert "no launch" in (failed or "") and engine.counters.failed_steps == before + 1
                assert answers["lives", 0].tokens == want[0].tokens
        assert not engine.core_counts()["groups"][0]["held"]


# What is said of it


def test_what_is_recorded_and_said(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    made: list[Recorded] = []
    graphs_on_cpu(monkeypatch, [1, 4, 6])
    monkeypatch.setattr(graphs, "recorder_for", lambda device: made.append(Recorded()) or made[-1])
    with make_engine(tiny_checkpoint("llama", layers=1), "cpu", max_num_seqs=6, quiet=False) as engine:
        assert engine.metrics().graphs == {"buckets": 3, "replays": 0} and made[0].recorded == 6
    said = capfd.readouterr().err
    assert "decode graphs" in said and "3 sizes up to 6 rows" in said and "recording" not in said, "bars are for terminals"


def without_graphs(settings: dict[str, Any]) -> None:
    with make_engine(tiny_checkpoint("llama", layers=1), "cpu", **settings) as engine:
        assert not engine.metrics().graphs and len(generate(engine, [[5, 6]], GREEDY)[0].tokens) == 20


def test_they_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs_on_cpu(monkeypatch)
    without_graphs({"cuda_graphs": False})
    without_graphs({"cuda_graphs": "off"})
    monkeypatch.setenv("DEEPINFER_CUDA_GRAPHS", "0")
    without_graphs({})
    monkeypatch.setenv("DEEPINFER_CUDA_GRAPHS", "auto")
    with make_engine(tiny_checkpoint("llama", layers=1), "cpu") as engine:
        assert engine.metrics().graphs


def test_settings_that_make_no_sense(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="cuda_graphs must be"):
        EngineConfig(model="m", cuda_graphs="some")  # type: ignore[arg-type]
    for value in (True, "on"):
        with pytest.raises(ConfigError, match="leave cuda_graphs"):
            EngineConfig(model="m", device="cpu", cuda_graphs=value).resolve()
    monkeypatch.setenv("DEEPINFER_CUDA_GRAPHS", "perhaps")
    with pytest.raises(ConfigError, match="use auto, 1 or 0"):
        EngineConfig(model="m", device="cpu").resolve()


def insisting(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a user had set ``cuda_graphs='on'`` on a GPU."""
    for name in ("wanted_buckets", "record_graphs"):
        real = getattr(decode_graphs, name)

        def asked(*args: Any, real: Any = real) -> Any:
            for arg in args:
                if hasattr(arg, "cuda_graphs"):
                    object.__setattr__(arg, "cuda_graphs", True)
            return real(*args)

        where = "assembly" if name == "wanted_buckets" else "engine"
        monkeypatch.setattr(f"deepinfer.engine.{where}.{name}", asked)


def test_a_model_without_a_decode_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "can_record", lambda device: True)
    monkeypatch.setattr(LlamaModel, "graph_rows", lambda self, most: None, raising=False)
    monkeypatch.setattr(LlamaModel, "decode", lambda self, rows, kv: None, raising=False)
    without_graphs({})
    insisting(monkeypatch)
    with pytest.raises(ConfigError, match="LlamaModel wants none here; leave cuda_graphs out"):
        without_graphs({})


def test_row_buckets_are_the_same_for_every_size_and_stop_where_it_fits() -> None:
    every = row_buckets(1000)
    assert every == sorted(set(every)) and len(row_buckets(256)) == 15 and every[14] == 256
    for rows in range(1, 1000):
        buckets = row_buckets(rows)
        assert buckets == every[: len(buckets)] and buckets[-1] >= rows and all(b < rows for b in buckets[:-1])
        assert buckets[-1] - rows <= max(rows, 31)


@pytest.mark.parametrize("buckets", [[0, 2], [2, 1], [1, 1], [8, 64]], ids=str)
def test_buckets_that_make_no_sense(buckets: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    graphs_on_cpu(monkeypatch)
    monkeypatch.setattr(LlamaModel, "graph_rows", lambda self, most: buckets)
    with pytest.raises(ModelContractError, match="ascending row counts from 1 on, at most one of them 8 or more"):
        make_engine(tiny_checkpoint("llama", layers=1), "cpu", max_num_seqs=8)


def test_no_memory_to_record_names_what_to_lower(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs_on_cpu(monkeypatch)

    def decode(self: LlamaModel, rows: Any, kv: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(LlamaModel, "decode", decode)
    with pytest.raises(CapacityError, match=r"kv_memory_fraction \(now 0.5\), num_kv_blocks or max_num_seqs"):
        make_engine(tiny_checkpoint("llama", layers=1), "cpu")


def test_a_model_that_cannot_be_recorded_runs_without_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs_on_cpu(monkeypatch)

    def decode(self: LlamaModel, rows: Any, kv: Any) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(LlamaModel, "decode", decode)
    with pytest.warns(RuntimeWarning, match="could not be recorded .*not permitted"):
        without_graphs({})
    insisting(monkeypatch)
    with pytest.raises(ConfigError, match="cuda_graphs='off'"):
        without_graphs({})
