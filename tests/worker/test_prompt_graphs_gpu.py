"""CUDA graphs of steps with prompts on a GPU: a replay has the bits of the same operations launched one by one, whatever was in its memory,
and whole engines give the answers that they give without."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import play_kit
from deepinfer.engine.engine import Engine
from deepinfer.models.llama.forward import LlamaModel
from deepinfer.sampling import SamplingParams
from deepinfer.worker.prompt_step import PromptGraphs
from deepinfer.worker.step import Step
from engine_kit import Answer, random_prompts, same_bits
from exact_kit import KINDS, VOCAB, engine_of
from play_kit import play, same_play

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("checked")]

SAID: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0, "logprobs": 50},
    {"temperature": 0.8, "top_k": 20, "repetition_penalty": 1.1},
    {"temperature": 0, "logprobs": 5, "prompt_logprobs": 3},
]
LENGTHS = [3, 200, 17, 64, 500, 40, 5, 130, 900, 65, 1, 33]


def arriving(engine: Engine, lengths: list[int], apart: int = 2, max_tokens: int = 9) -> list[Answer]:
    """Answers to prompts that come some turns apart, the last one as the first one began."""
    prompts = random_prompts(lengths, seed=3, vocab=VOCAB)
    prompts.append(prompts[1][:150] + prompts[0])
    params = [SamplingParams(max_tokens=max_tokens + i % 5, ignore_eos=True, seed=i, **SAID[i % len(SAID)]) for i in range(len(prompts))]
    return play_kit.arriving(engine, prompts, params, apart)


def told(answer: Answer) -> list[tuple[list[int], bytes]]:
    """Log-probabilities of a prompt."""
    return [(p.ids.tolist(), p.values.tobytes()) for p in answer.prompt_logprobs or [] if p]


def all_replayed(engine: Engine) -> int:
    """Steps with prompts so far, all of them graphs."""
    metrics = engine.metrics()
    assert metrics.prompt_graphs["replays"] == metrics.steps["mixed"] + metrics.steps["prefill"]
    return metrics.prompt_graphs["replays"]


@pytest.mark.parametrize("overlap", [False, True], ids=["serial", "overlapped"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_those_without_graphs(kind: str, dtype: str, overlap: bool) -> None:
    """Prompts whole and in chunks, behind hits, beside decoding sequences; windows, biases and normalised heads."""
    for rows in (96, 1000):
        settings: dict[str, Any] = {"dtype": dtype, "zero_overhead": overlap, "max_num_batched_tokens": rows, "num_kv_blocks": 900}
        with engine_of("cuda", kind, cuda_graphs="off", **settings) as engine:
            want = arriving(engine, LENGTHS)
        with engine_of("cuda", kind, **settings) as engine:
            got = arriving(engine, LENGTHS)
            assert all_replayed(engine) > 10 and engine.core_stats()["hit_tokens"] > 0
        assert all(a.error is None and same_bits(a, b) and told(a) == told(b) for a, b in zip(want, got, strict=True)), rows
        assert sum(bool(told(a)) for a in got) == 3


def test_the_largest_steps_have_them() -> None:
    lengths = [3, 1999, 1700, 2000, 1801, 1950, 64, 1500]
    settings: dict[str, Any] = {"max_num_batched_tokens": 8192, "num_kv_blocks": 1200}
    with engine_of("cuda", "llama", cuda_graphs="off", **settings) as engine:
        want = arriving(engine, lengths, apart=1)
    with engine_of("cuda", "llama", **settings) as engine:
        graphs = engine._runner.prompt_graphs
        assert graphs is not None and graphs.buckets[-1] == 8192
        got = arriving(engine, lengths, apart=1)
        assert all_replayed(engine) >= 4
    assert all(a.error is None and same_bits(a, b) for a, b in zip(want, got, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_a_replay_has_the_bits_of_its_operations(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over memory that holds anything, and with NaN or the largest numbers on the null page."""
    found: list[tuple[int, list[torch.Tensor], list[torch.Tensor]]] = []
    real = PromptGraphs.replay

    def left(graphs: PromptGraphs, rows: int) -> list[torch.Tensor]:
        assert graphs._hidden is not None
        return [graphs._hidden[:rows].clone(), *(tensor[1:].clone() for tensor in graphs._kv.values())]

    def spoil(graphs: PromptGraphs) -> None:
        assert graphs._hidden is not None
        graphs._fields.wide.fill_(-(2**40))
        graphs._fields.seq_len.fill_(2**30)
        graphs._hidden.fill_(torch.nan)
        for tensor in graphs._kv.values():
            tensor[0].fill_(torch.nan if len(found) % 2 else 3e38)

    @torch.inference_mode()
    def replay(self: PromptGraphs, step: Step) -> torch.Tensor:
        spoil(self)
        hidden = real(self, step)
        by_graph = left(self, step.header.rows)
        spoil(self)
        self._run(step.prompts)
        found.append((step.header.rows, by_graph, left(self, step.header.rows)))
        return hidden

    settings: dict[str, Any] = {"max_num_batched_tokens": 1000, "num_kv_blocks": 300}
    with engine_of("cuda", kind, cuda_graphs="off", **settings) as engine:
        want = arriving(engine, LENGTHS[:8])
    monkeypatch.setattr(PromptGraphs, "replay", replay)
    with engine_of("cuda", kind, **settings) as engine:
        got = arriving(engine, LENGTHS[:8])
        all_replayed(engine)
    assert len(found) > 5 and len({rows for rows, _, _ in found}) > 5
    for rows, by_graph, one_by_one in found:
        assert torch.isfinite(by_graph[0]).all(), rows
        assert all(torch.equal(a, b) for a, b in zip(by_graph, one_by_one, strict=True)), rows
    assert all(same_bits(a, b) for a, b in zip(want, got, strict=True))


@pytest.mark.parametrize("overlap", [False, True], ids=["serial", "overlapped"])
def test_the_same_under_aborts_stops_forks_and_preemption(overlap: bool) -> None:
    settings = {"num_kv_blocks": 8, "max_num_seqs": 6, "max_num_batched_tokens": 40, "max_model_len": 128, "zero_overhead": overlap}
    with engine_of("cuda", "llama", cuda_graphs="off", **settings) as engine:
        want = play(engine, 0)
    with engine_of("cuda", "llama", **settings) as engine:
        same_play(want, play(engine, 0))
        assert all_replayed(engine) > 10 and engine._core.check() is None


def test_one_that_waits_is_told_and_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode steps are recorded all the same, and what failed leaves a GPU that works."""
    real = LlamaModel.prompt_step

    def prompt_step(self: LlamaModel, rows: Any, kv: Any) -> torch.Tensor:
        if torch.cuda.is_current_stream_capturing():
            int(rows.unit_count[0])
        return real(self, rows, kv)

    with engine_of("cuda", "llama", cuda_graphs="off") as engine:
        want = arriving(engine, LENGTHS[:4])
    with monkeypatch.context() as patch:
        patch.setattr(LlamaModel, "prompt_step", prompt_step)
        with pytest.warns(RuntimeWarning, match="prompt steps could not be recorded"), engine_of("cuda", "llama") as engine:
            assert not engine.metrics().prompt_graphs
            got = arriving(engine, LENGTHS[:4])
    assert all(same_bits(a, b) for a, b in zip(want, got, strict=True))
    with engine_of("cuda", "llama") as engine:
        again = arriving(engine, LENGTHS[:4])
        all_replayed(engine)
    assert all(same_bits(a, b) for a, b in zip(want, again, strict=True))


def test_steps_with_prompts_take_no_memory_of_the_driver() -> None:
    with engine_of("cuda", "llama", max_num_batched_tokens=1000) as engine:
        arriving(engine, LENGTHS)
        before = torch.cuda.memory_stats()["num_device_alloc"]
        arriving(engine, LENGTHS[::-1])
        assert torch.cuda.memory_stats()["num_device_alloc"] == before
