"""Sequences held to a grammar: what is drawn is what the grammar allows, whatever overlaps, is preempted or fails."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from deepinfer.engine.engine import Engine
from deepinfer.sampling import SamplingParams
from deepinfer.worker.grammar import MOST_MASK, DeadEndError, MaskClock, apply_masks, fill_masks, mask_words
from engine_kit import VOCAB, Answer, collect, generate, make_engine, random_prompts, request, same_bits, tiny_checkpoint

EOS, OPEN, CLOSE, COMMA = 2, 100, 101, 102
DIGITS = range(200, 210)


class Numbers:
    """A list of whole numbers of one to three digits, closed after at most ``most`` of them: ``[ 1 2 , 7 ]``, then the end."""

    def __init__(self, most: int = 4, log: list[tuple[int, bytes]] | None = None) -> None:
        self._most, self.log = most, log
        self._states: list[tuple[str, int, int]] = [("start", 0, 0)]  # where, numbers so far, digits of the last

    @property
    def position(self) -> int:
        return len(self._states) - 1

    @property
    def complete(self) -> bool:
        return self._states[-1][0] == "end"

    def allowed(self) -> list[int]:
        where, numbers, digits = self._states[-1]
        if where == "start":
            return [OPEN]
        if where == "end":
            return [EOS]
        if where == "number":
            more = list(DIGITS) if digits < 3 else []
            return [*more, CLOSE, *([COMMA] if numbers < self._most else [])]
        return list(DIGITS)

    def fill_mask(self, row: NDArray[np.int32]) -> None:
        bits = np.zeros(len(row) * 32, np.uint8)
        bits[self.allowed()] = 1
        row[:] = np.packbits(bits, bitorder="little").view(np.int32)
        if self.log is not None:
            self.log.append((self.position, row.tobytes()))

    def accept(self, token: int) -> bool:
        if token not in self.allowed():
            return False
        _, numbers, digits = self._states[-1]
        if token in DIGITS:
            self._states.append(("number", numbers + (digits == 0), digits + 1))
        else:
            self._states.append(({OPEN: "list", COMMA: "list", CLOSE: "end", EOS: "end"}[token], numbers, 0))
        return True

    def rollback(self, count: int) -> None:
        del self._states[len(self._states) - count :]


def run(engine: Engine, prompts: list[list[int]], params: list[SamplingParams], with_grammar: list[bool]) -> tuple[list[Answer], list[Any]]:
    logs: list[list[tuple[int, bytes]]] = [[] for _ in prompts]
    for i, (prompt, p) in enumerate(zip(prompts, params, strict=True)):
        grammar = partial(Numbers, 2 + i % 3, logs[i]) if with_grammar[i] else None
        engine.add_request(request(str(i), prompt, p, eos_ids=(EOS,), grammar=grammar, stream=i % 2 == 0))
    answers = collect(engine)
    return [answers[str(i), 0] for i in range(len(prompts))], logs


@pytest.mark.parametrize("small", [False, True])
def test_masks_equal_a_replay_of_the_tokens_whatever_overlaps(small: bool, device: str) -> None:
    """Greedy and drawn rows, with and without a grammar in one step; with a small pool also preempted and swapped."""
    prompts = random_prompts((20, 33, 18, 47, 9, 30), seed=2)
    params = [SamplingParams(temperature=(0.0, 1.0)[i % 2], seed=i, max_tokens=40, logprobs=3, ignore_eos=i != 0) for i in range(6)]
    params[1] = params[1].clone(repetition_penalty=1.3, top_k=50)
    grammars = [True, True, True, False, False, True]
    settings: dict[str, Any] = {"block_size": 16, "num_kv_blocks": 10, "max_num_batched_tokens": 40} if small else {}
    found = []
    for overlap in (False, True):
        with make_engine(tiny_checkpoint("qwen2"), device, zero_overhead=overlap, **settings) as engine:
            answers, logs = run(engine, prompts, params, grammars)
            found.append(answers)
            assert (engine.core_stats()["preemptions"] > 0) == small
        for i, answer in enumerate(answers):
            assert answer.finish in ("stop", "length") and answer.error is None
            if not grammars[i]:
                assert not logs[i]
                continue
            replay = Numbers(2 + i % 3)
            masks = []
            row = np.zeros(mask_words(VOCAB), np.int32)
            for token in answer.tokens:
                replay.fill_mask(row)
                masks.append(row.tobytes())
                assert replay.accept(token), "a token that was not allowed"
            assert {at for at, _ in logs[i]} >= set(range(len(masks)))
            assert all(mask == masks[at] for at, mask in logs[i] if at < len(masks))
    assert all(map(same_bits, *found))
    assert found[0][3].tokens != found[0][0].tokens


def test_answers_of_one_request_have_matchers_of_their_own(device: str) -> None:
    with make_engine(tiny_checkpoint("llama"), device) as engine:
        p = SamplingParams(n=3, temperature=1.5, seed=3, max_tokens=30)
        engine.add_request(request("r", random_prompts((30,))[0], p, eos_ids=(EOS,), grammar=Numbers))
        answers = collect(engine)
    for i in range(3):
        replay = Numbers()
        assert all(replay.accept(t) for t in answers["r", i].tokens)
    assert len({tuple(answers["r", i].tokens) for i in range(3)}) == 3


class Three(Numbers):
    """Three ids, and then nothing at all: the end, or a fault."""

    def __init__(self, whole: bool) -> None:
        super().__init__()
        self._whole = whole

    @property
    def complete(self) -> bool:
        return self._whole and self.position >= 3

    def allowed(self) -> list[int]:
        return super().allowed() if self.position < 3 else []


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("overlap", [True, False])
def test_nothing_follows_what_a_grammar_describes(overlap: bool, stream: bool, whole: bool, device: str) -> None:
    """A dead end is found when the next step is in the making: what that one draws is not told, even if it is the last by length."""
    p = SamplingParams(temperature=1.0, seed=1, max_tokens=4, logprobs=0)
    with make_engine(tiny_checkpoint("llama"), device, zero_overhead=overlap) as engine:
        engine.add_request(request("r", random_prompts((20,))[0], p, grammar=partial(Three, whole), stream=stream))
        answer = collect(engine)["r", 0]
    assert answer.finish == ("stop" if whole else "so_failed") and (answer.error is None) == whole
    assert whole or "allows no token" in (answer.error or "")
    assert len(answer.tokens) == len(answer.logprobs) == 3


class Broken(Numbers):
    """Fails in a chosen way at a chosen position."""

    def __init__(self, way: str, at: int) -> None:
        super().__init__(99)
        self._way, self._at = way, at
        if way == "make":
            raise ValueError("no such grammar")

    def fill_mask(self, row: NDArray[np.int32]) -> None:
        if self.position == self._at and self._way == "fill":
            raise RuntimeError("fill broke")
        if self.position == self._at and self._way == "slow":
            start = time.thread_time()
            while time.thread_time() - start < MOST_MASK:
                pass
        super().fill_mask(row)
        if self.position == self._at and self._way == "empty":
            row[:] = 0

    def accept(self, token: int) -> bool:
        if self.position == self._at and self._way == "raise":
            raise RuntimeError("accept broke")
        return not (self.position == self._at and self._way == "refuse") and super().accept(token)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(
    ("way", "why"),
    [
        ("make", "no such grammar"),
        ("fill", "fill broke"),
        ("empty", "no token"),
        ("raise", "accept broke"),
        ("refuse", "refuses token"),
        ("slow", "for one mask"),
    ],
)
def test_a_grammar_that_fails_ends_its_own_request_only(way: str, why: str, overlap: bool, device: str) -> None:
    prompts = random_prompts((20, 33, 15))
    p = SamplingParams(temperature=1.0, seed=1, max_tokens=20, ignore_eos=True)
    with make_engine(tiny_checkpoint("llama"), device, zero_overhead=overlap) as engine:
        want = generate(engine, prompts[:1], p)[0]
        engine.add_request(request("free", prompts[0], p))
        engine.add_request(request("held", prompts[1], p, grammar=Numbers))
        engine.add_request(request("broken", prompts[2], p, grammar=partial(Broken, way, 3), stream=True))
        answers = collect(engine)
        broken = answers["broken", 0]
        assert broken.finish == "so_failed" and why in (broken.error or ""), broken.error
        assert len(broken.tokens) == (0 if way == "make" else 3)  # nothing that came without a mask, nor what was refused
        assert same_bits(answers["free", 0], want) and answers["held", 0].finish == "length"
        replay = Numbers()
        assert all(replay.accept(t) for t in answers["held", 0].tokens[: replay.position or None] if t != EOS)
        for _ in range(3):
            engine.step()
        assert not engine.core_counts()["groups"][0]["held"]
        counted = engine.metrics().grammars
        assert counted["so_failed"] == 1 and counted["fills"] >= 20 and counted["slow_fills"] == (way == "slow")


# The parts


def test_rows_behind_drafts_are_masked_from_where_the_drafts_lead() -> None:
    grammar = Numbers()
    for token in (OPEN, 201):
        assert grammar.accept(token)
    rows = np.zeros((5, mask_words(VOCAB)), np.int32)
    drafts = [COMMA, 203, OPEN, 204]  # the third is not allowed
    fill_masks(grammar, rows, drafts, MaskClock())
    assert grammar.position == 2
    ahead, row = Numbers(), np.zeros(mask_words(VOCAB), np.int32)
    for token in (OPEN, 201):
        ahead.accept(token)
    for nth in range(3):
        ahead.fill_mask(row)
        assert np.array_equal(rows[nth], row)
        ahead.accept(drafts[nth])
    assert (rows[3:] == -1).all()
    with pytest.raises(DeadEndError):
        fill_masks(Broken("empty", 0), rows[:1], [], MaskClock())


def test_a_mask_forbids_exactly_what_it_says(device: str) -> None:
    vocab = 77
    rng = np.random.default_rng(0)
    allowed = rng.random((3, vocab)) < 0.4
    bits = np.zeros((3, mask_words(vocab) * 32), np.uint8)
    bits[:, :vocab] = allowed
    masks = torch.from_numpy(np.packbits(bits, axis=1, bitorder="little").view(np.int32).copy()).to(device)
    logits = torch.randn(6, vocab, generator=torch.Generator().manual_seed(0)).to(device)
    before = logits.clone()
    apply_masks(logits, torch.tensor([4, 0, 5], dtype=torch.int32, device=device), masks)
    assert torch.equal(logits[[1, 2, 3]], before[[1, 2, 3]])
    for nth, row in enumerate((4, 0, 5)):
        keep = torch.from_numpy(allowed[nth]).to(device)
        assert torch.equal(logits[row][keep], before[row][keep]) and bool(torch.isneginf(logits[row][~keep]).all())
