"""Whole engines whose sampler runs as kernels, on TileLang's CPU target: what the runner hands them is right, and answers are the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from deepinfer.sampling import SamplingParams
from deepinfer.worker import runner
from deepinfer.worker.device_sampler import DeviceSampler
from deepinfer.worker.sampler import SampleRows
from deepinfer.worker.sampling_state import SamplingState
from engine_kit import Answer, EvenOnly, collect, make_engine, random_prompts, request, tiny_checkpoint
from sampling_kit import device_sampler

pytest.importorskip("tilelang", reason="kernels are lowered by TileLang: pip install 'deepinfer[cuda]'")

F32, BF16 = torch.float32, torch.bfloat16

KINDS = [
    SamplingParams(temperature=0),
    SamplingParams(temperature=1.0, seed=1),
    SamplingParams(temperature=0.8, seed=2, top_k=20),
    SamplingParams(temperature=1.2, seed=3, top_p=0.9, min_p=0.01),
    SamplingParams(temperature=0.9, seed=4, repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=-0.2, top_p=0.95),
    SamplingParams(temperature=1.0, seed=5, logit_bias={7: 4.0, 9: -100.0}, min_tokens=12, stop_token_ids=[7, 11, 30, 31]),
    SamplingParams(temperature=0, logprobs=5, prompt_logprobs=2),
    SamplingParams(temperature=1.0, seed=8, logprobs=0),
]


MADE: list[OnCpu] = []


class OnCpu(DeviceSampler):
    """Kernels of the CPU target, which has bfloat16 as float32; notes what it was asked for."""

    asked: list[tuple[str, torch.dtype]]

    @classmethod
    def on(cls, device: torch.device, vocab: int, dtype: torch.dtype, max_rows: int) -> OnCpu:  # type: ignore[override]
        made = device_sampler("c", vocab, {F32: F32}, max_rows)
        made.__class__ = cls
        assert isinstance(made, OnCpu)
        made.asked = []
        MADE.append(made)
        return made

    def reads(self, dtype: torch.dtype) -> bool:
        return dtype in (F32, BF16)

    def greedy(self, logits: torch.Tensor) -> torch.Tensor:
        self.asked.append(("greedy", logits.dtype))
        return super().greedy(logits.float())

    def mask(self, logits: torch.Tensor, rows: torch.Tensor, masks: torch.Tensor) -> None:
        self.asked.append(("mask", logits.dtype))
        super().mask(logits, rows, masks)

    def draw(self, logits: torch.Tensor, rows: SampleRows, before: torch.Tensor | None, state: SamplingState) -> torch.Tensor:
        self.asked.append(("edit" if rows.edit is not None else "draw", logits.dtype))
        return super().draw(logits.float() if logits.dtype == BF16 else logits, rows, before, state)


def run(dtype: str, kinds: list[SamplingParams], grammar: bool = False, **settings: Any) -> list[Answer]:
    prompts = [p * 2 for p in random_prompts([9, 5, 14, 3, 8, 6, 11, 7][: len(kinds)], seed=4)]
    with make_engine(tiny_checkpoint("llama"), "cpu", dtype=dtype, **settings) as engine:
        for i, (prompt, p) in enumerate(zip(prompts, kinds, strict=True)):
            words = ((40, 41), (50,)) if i % 4 == 3 else ()
            held = EvenOnly if grammar and i % 3 == 1 else None
            engine.add_request(request(str(i), prompt, p.clone(max_tokens=24), grammar=held, bad_word_ids=words))
        answers = collect(engine)
    return [answers[str(i), 0] for i in range(len(kinds))]


def both(monkeypatch: pytest.MonkeyPatch, *args: Any, **settings: Any) -> tuple[list[Answer], set[tuple[str, torch.dtype]]]:
    """Answers of kernels, once they are those of torch operators, and what the kernels were asked for."""
    want = run(*args, **settings)
    with monkeypatch.context() as patched:
        patched.setattr(runner, "DeviceSampler", OnCpu)
        got = run(*args, **settings)
    assert [a.tokens for a in got] == [a.tokens for a in want] and [a.finish for a in got] == [a.finish for a in want]
    for mine, theirs in zip(got, want, strict=True):
        pairs = list(zip(mine.logprobs, theirs.logprobs, strict=True))
        pairs += [(x, y) for x, y in zip(mine.prompt_logprobs or [], theirs.prompt_logprobs or [], strict=True) if x and y]
        assert mine.prompt_logprobs is None or len(pairs) > 24
        for x, y in pairs:
            assert np.array_equal(x.ids, y.ids) and x.rank == y.rank
            np.testing.assert_allclose(x.values, y.values, rtol=2e-7, atol=2e-6)
    return got, set(MADE[-1].asked)


@pytest.mark.parametrize("overlap", [False, True], ids=["serial", "overlapped"])
def test_mixed_rows(overlap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    _, asked = both(monkeypatch, "float32", KINDS, zero_overhead=overlap)
    assert ("edit", F32) in asked


def test_rows_with_a_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    got, asked = both(monkeypatch, "float32", KINDS, True)
    assert ("mask", F32) in asked
    assert all(t % 2 == 0 for i in (1, 4, 7) for t in got[i].tokens)


def test_steps_with_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    both(monkeypatch, "float32", KINDS, speculative="ngram", num_draft_tokens=3)


def test_the_heads_own_logits_are_read_where_nothing_edits_them(monkeypatch: pytest.MonkeyPatch) -> None:
    _, asked = both(monkeypatch, "bfloat16", KINDS[:1])
    assert asked == {("greedy", BF16)}
    _, asked = both(monkeypatch, "bfloat16", KINDS[:3])
    assert asked == {("draw", BF16)}
    _, asked = both(monkeypatch, "bfloat16", KINDS)
    assert ("edit", F32) in asked and ("edit", BF16) not in asked
