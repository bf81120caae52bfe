"""Steps with prompts by graphs give the bits of those without, whatever happens around them; by a stand-in that runs on a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import play_kit
from deepinfer.engine.engine import Engine
from deepinfer.engine.step_log import line
from deepinfer.errors import CapacityError, ConfigError, ModelContractError
from deepinfer.models.llama.forward import LlamaModel
from deepinfer.sampling import SamplingParams
from deepinfer.worker import graphs
from deepinfer.worker.prompt_step import PromptGraphs
from deepinfer.worker.step import Step
from engine_kit import Answer, EvenOnly, collect, generate, make_engine, random_prompts, request, same_bits, tiny_checkpoint
from graphs_kit import Recorded, graphs_on_cpu
from play_kit import KINDS, check_recorded_play

GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
PROMPTS = [5, 70, 33, 18, 64, 3, 40, 90, 21, 10, 1, 2]


def arriving(engine: Engine, **values: Any) -> list[Answer]:
    """Answers to requests of all kinds, in steps of all kinds."""
    params = [KINDS[i % len(KINDS)] for i in range(len(PROMPTS))]
    return play_kit.arriving(engine, random_prompts(PROMPTS), params, 3, **values)


def replays(engine: Engine) -> int:
    return engine.metrics().prompt_graphs.get("replays", 0)


def with_prompts(engine: Engine) -> int:
    """Steps so far that had rows of prompts."""
    return sum(engine.metrics().steps[kind] for kind in ("prefill", "mixed"))


@pytest.mark.parametrize("decode", [[], [1, 2, 5]], ids=["prompts", "all"])
@pytest.mark.parametrize("buckets", [[48], [3, 7, 20, 64], [20]], ids=str)
@pytest.mark.parametrize("overlap", [False, True], ids=["serial", "overlapped"])
def test_answers_are_the_same(decode: list[int], buckets: list[int], overlap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With decode steps as graphs and without, with steps of more rows than were recorded, and with any padding."""
    settings: dict[str, Any] = {"max_num_seqs": 5, "max_num_batched_tokens": 48, "zero_overhead": overlap}
    with make_engine(tiny_checkpoint("llama"), "cpu", **settings) as engine:
        want = arriving(engine)
        assert not engine.metrics().prompt_graphs
    graphs_on_cpu(monkeypatch, decode, buckets)
    with make_engine(tiny_checkpoint("llama"), "cpu", **settings) as engine:
        got = arriving(engine)
        assert 4 < replays(engine) <= with_prompts(engine) and bool(engine.metrics().graphs) == bool(decode)
        assert buckets[-1] < 48 or replays(engine) == with_prompts(engine)
    assert all(same_bits(a, b) for a, b in zip(want, got, strict=True))
    told = [[(p.ids.tolist(), p.values.tobytes()) for p in a.prompt_logprobs or [] if p] for a in (*want, *got)]
    assert told[: len(want)] == told[len(want) :] and sum(map(bool, told)) == 4


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(s, marks=pytest.mark.nightly) for s in range(2, 10))])
def test_the_same_under_aborts_stops_forks_and_preemption(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    check_recorded_play(seed, lambda: graphs_on_cpu(monkeypatch, [1, 2, 4, 6], [8, 16, 40]), replays)


@pytest.mark.parametrize("overlap", [False, True], ids=["serial", "overlapped"])
def test_prompts_that_begin_behind_a_hit(overlap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = random_prompts([50, 30])
    prompts = [first, first[:33] + second, first + second, first[:20] + second]

    def run() -> list[Answer]:
        with make_engine(tiny_checkpoint("llama"), "cpu", zero_overhead=overlap, block_size=16) as engine:
            answers = [*generate(engine, prompts[:1], GREEDY), *generate(engine, prompts[1:], GREEDY)]
            assert [a.cached_tokens > 0 for a in answers] == [False, True, True, True]
            assert engine.metrics().prompt_graphs.get("replays", with_prompts(engine)) == with_prompts(engine)
            return answers

    want = run()
    graphs_on_cpu(monkeypatch, None, [16, 512])
    assert all(same_bits(a, b) for a, b in zip(want, run(), strict=True))


class Dirty(Recorded):
    """Spoils, ahead of each replay, all memory of graphs that a replay is to write itself, and the null page."""

    def record(self, work: graphs.Work) -> graphs.Replay:
        """See `deepinfer.worker.graphs.Recorder`."""
        work = super().record(work)

        @torch.inference_mode()
        def replay() -> None:
            made = SPOILED[-1].prompt_graphs
            assert made is not None and made._hidden is not None
            made._fields.wide.fill_(-7)
            made._fields.seq_len.fill_(10_000)
            made._hidden.fill_(torch.nan)
            for tensor in SPOILED[-1].kv.tensors.values():
                tensor[0].fill_(torch.nan)
            work()

        return replay


SPOILED: list[Any] = []


def test_padding_reads_nothing_that_was_there(monkeypatch: pytest.MonkeyPatch) -> None:
    with make_engine(tiny_checkpoint("llama"), "cpu") as engine:
        want = arriving(engine)
    graphs_on_cpu(monkeypatch, [], [48, 96])
    monkeypatch.setattr(graphs, "recorder_for", lambda device: Dirty())
    with make_engine(tiny_checkpoint("llama"), "cpu", max_num_seqs=8, max_num_batched_tokens=90) as engine:
        SPOILED.append(engine._runner)
        got = arriving(engine)
        SPOILED.pop()
        assert replays(engine) == with_prompts(engine) > 10
    assert all(same_bits(a, b) for a, b in zip(want, got, strict=True))


@pytest.mark.parametrize("overlap", [False, True], ids=["serial", "overlapped"])
def test_rows_with_a_grammar(overlap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> list[Answer]:
        with make_engine(tiny_checkpoint("llama"), "cpu", zero_overhead=overlap, max_num_batched_tokens=48) as engine:
            answers = arriving(engine, grammar=EvenOnly)
            assert all(t % 2 == 0 for a in answers for t in a.tokens)
            assert engine.metrics().prompt_graphs.get("replays", with_prompts(engine)) == with_prompts(engine)
            return answers

    want = run()
    graphs_on_cpu(monkeypatch, None, [48])
    assert all(same_bits(a, b) for a, b in zip(want, run(), strict=True))


@pytest.mark.parametrize("overlap", [False, True], ids=["serial", "overlapped"])
def test_among_steps_with_drafts(overlap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step with drafts is none; one behind it takes from it what a graph could not."""

    def run(**settings: Any) -> list[list[int]]:
        with make_engine(tiny_checkpoint("llama"), "cpu", zero_overhead=overlap, max_num_batched_tokens=48, **settings) as engine:
            found: dict[str, list[int]] = {}
            todo = [p * 3 for p in random_prompts([7, 11, 5, 30, 9, 21, 40, 13, 17, 8])]
            turn = 0
            while turn < 6 * len(todo) or engine.has_unfinished():
                if turn % 6 == 0 and turn // 6 < len(todo):
                    engine.add_request(request(str(turn // 6), todo[turn // 6], GREEDY.clone(max_tokens=60)))
                for d in engine.step():
                    found.setdefault(d.request_id, []).extend(d.new_token_ids)
                turn += 1
            if settings:
                assert engine.metrics().totals["accepted"] > 0 and 0 < replays(engine) < with_prompts(engine)
            return [found[str(i)] for i in range(len(todo))]

    want = run()
    graphs_on_cpu(monkeypatch, None, [16, 48])
    assert run(speculative="ngram", num_draft_tokens=3, ngram_min=1) == want


@pytest.mark.parametrize("overlap", [False, True], ids=["serial", "overlapped"])
def test_a_replay_that_fails_ends_its_sequences_alone(overlap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = random_prompts([30, 12])
    graphs_on_cpu(monkeypatch, None, [64])
    with make_engine(tiny_checkpoint("llama"), "cpu", zero_overhead=overlap, block_size=16) as engine:
        want = generate(engine, prompts[1:], GREEDY)
        with monkeypatch.context() as patch:

            def replay(self: PromptGraphs, step: Step) -> torch.Tensor:
                raise RuntimeError("no launch")

            patch.setattr(PromptGraphs, "replay", replay)
            failed = generate(engine, prompts[:1], GREEDY)[0]
            assert "no launch" in (failed.error or "") and not failed.tokens
        engine.add_request(request("lives", prompts[1], GREEDY))
        assert collect(engine)["lives", 0].tokens == want[0].tokens
        assert not engine.core_counts()["groups"][0]["held"]


def test_a_prompt_engine_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs_on_cpu(monkeypatch, None, [64])
    with make_engine(tiny_checkpoint("llama", layers=1), "cpu", engine_type="prompt") as engine:
        assert engine.metrics().prompt_graphs == {"buckets": 1, "replays": 0} and not engine.metrics().graphs


# What is said of it


def test_what_is_recorded_and_said(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    graphs_on_cpu(monkeypatch, [1, 4, 6], [16, 40])
    with make_engine(tiny_checkpoint("llama", layers=1), "cpu", max_num_seqs=6, max_num_batched_tokens=40, quiet=False) as engine:
        assert engine.metrics().prompt_graphs == {"buckets": 2, "replays": 0}
        before = engine.metrics()
        generate(engine, random_prompts([5, 9, 30]), GREEDY)
        after = engine.metrics()
        assert after.prompt_graphs["replays"] == with_prompts(engine) > 0
        assert f" · prompt graphs {after.prompt_graphs['replays']} · " in line(before, after, 1.0)
    said = capfd.readouterr().err
    assert "prompt graphs" in said and "2 sizes up to 40 rows" in said and "decode graphs" in said


def without_them(settings: dict[str, Any]) -> None:
    with make_engine(tiny_checkpoint("llama", layers=1), "cpu", **settings) as engine:
        assert not engine.metrics().prompt_graphs and len(generate(engine, [[5, 6]], GREEDY)[0].tokens) == 12


def test_they_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs_on_cpu(monkeypatch, None, [16])
    without_them({"cuda_graphs": "off"})
    monkeypatch.setattr(LlamaModel, "prompt_rows", lambda self, most: [])
    without_them({})


@pytest.mark.parametrize("buckets", [[0, 2], [2, 1], [1, 1], [512, 1024]], ids=str)
def test_buckets_that_make_no_sense(buckets: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    graphs_on_cpu(monkeypatch, None, buckets)
    with pytest.raises(ModelContractError, match=r"prompt_rows\(512\) must give ascending row counts from 1 on, at most one of them 512"):
        make_engine(tiny_checkpoint("llama", layers=1), "cpu")


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("not permitted")], ids=["memory", "other"])
def test_what_cannot_be_recorded_runs_without_and_says_so(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    graphs_on_cpu(monkeypatch, None, [16])

    def prompt_step(self: LlamaModel, rows: Any, kv: Any) -> None:
        raise error

    monkeypatch.setattr(LlamaModel, "prompt_step", prompt_step)
    with pytest.warns(RuntimeWarning, match="prompt steps could not be recorded .*(not permitted|out of memory)"):
        without_them({})
    insist(monkeypatch)
    with pytest.raises((CapacityError, ConfigError), match="cuda_graphs='off'"):
        make_engine(tiny_checkpoint("llama", layers=1), "cpu")


def insist(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a user had set ``cuda_graphs='on'`` on a GPU."""
    from deepinfer.engine import decode_graphs

    def asked(runner: Any, run: Any) -> None:
        object.__setattr__(run, "cuda_graphs", True)
        decode_graphs.record_graphs(runner, run)

    monkeypatch.setattr("deepinfer.engine.engine.record_graphs", asked)
