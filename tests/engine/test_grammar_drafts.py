"""Drafts on rows that a grammar holds, in a running engine: answers and masks are those of never having drafted."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from deepinfer.engine.engine import Engine
from deepinfer.sampling import SamplingParams
from deepinfer.worker.grammar import mask_words
from engine_kit import VOCAB, Answer, collect, make_engine, random_prompts, request, same_bits, tiny_checkpoint

EOS, CHORUS = 2, (50, 51, 52, 53, 54)
Path = tuple[int, ...]


class Song:
    """Verses of one free word and the chorus, whose last word is another one in every third verse; then the end.

    The chorus is what prompt lookup finds, mostly right; the free word it guesses; in the third verse its draft is not allowed, and behind
    the last verse only the end is. ``log``: what had been sung, drafts included, and the mask that was given there.
    """

    def __init__(self, verses: int, log: list[tuple[Path, bytes]] | None = None) -> None:
        self._verses, self._log = verses, log
        self._sung: list[int] = []

    @property
    def position(self) -> int:
        return len(self._sung)

    @property
    def complete(self) -> bool:
        return len(self._sung) // (len(CHORUS) + 1) >= self._verses

    def allowed(self) -> list[int]:
        verse, word = divmod(len(self._sung), len(CHORUS) + 1)
        if EOS in self._sung or verse >= self._verses:
            return [EOS]
        if word == 0:
            return list(range(200, 206))
        if word == len(CHORUS) and verse % 3 == 2:
            return [60]
        return [CHORUS[word - 1]]

    def fill_mask(self, row: NDArray[np.int32]) -> None:
        bits = np.zeros(len(row) * 32, np.uint8)
        bits[self.allowed()] = 1
        row[:] = np.packbits(bits, bitorder="little").view(np.int32)
        if self._log is not None:
            self._log.append((tuple(self._sung), row.tobytes()))

    def accept(self, token: int) -> bool:
        if token not in self.allowed():
            return False
        self._sung.append(token)
        return True

    def rollback(self, count: int) -> None:
        del self._sung[len(self._sung) - count :]


PROMPTS = random_prompts((20, 33, 18, 47, 9), seed=2)
VERSES = (7, 5, 9, 6, None)  # the last one sings as it likes
PARAMS = [SamplingParams(temperature=(0.0, 1.2)[i % 2], seed=i, max_tokens=48, logprobs=2, ignore_eos=i == 2) for i in range(5)]
SMALL = {"block_size": 16, "num_kv_blocks": 11, "max_num_batched_tokens": 40}


def sing(engine: Engine) -> tuple[list[Answer], list[list[tuple[Path, bytes]]]]:
    logs: list[list[tuple[Path, bytes]]] = [[] for _ in PROMPTS]
    for i, (prompt, p) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
        grammar = None if VERSES[i] is None else partial(Song, VERSES[i], logs[i])
        engine.add_request(request(str(i), prompt, p, eos_ids=(EOS,), grammar=grammar, stream=i % 2 == 0, max_new=48))
    answers = collect(engine)
    for _ in range(3):
        engine.step()
    counts = engine.core_counts()
    assert not any(c["held"] for c in [*counts["groups"], counts["slots"]]) and engine._core.check() is None
    return [answers[str(i), 0] for i in range(len(PROMPTS))], logs


@pytest.fixture(scope="module")
def plain(device: str) -> list[Answer]:
    """The answers without drafts, overlap or want of room."""
    with make_engine(tiny_checkpoint("qwen2"), device, zero_overhead=False) as engine:
        return sing(engine)[0]


def replayed(verses: int, path: Path) -> bytes:
    """The mask behind a path, by a grammar that saw nothing else."""
    fresh, row = Song(verses), np.zeros(mask_words(VOCAB), np.int32)
    assert all(map(fresh.accept, path)), "a token that was not allowed"
    fresh.fill_mask(row)
    return row.tobytes()


@pytest.mark.parametrize("settings", [{}, SMALL, {**SMALL, "swap_space_gib": 0}], ids=["room", "swapped", "recomputed"])
@pytest.mark.parametrize("overlap", [True, False], ids=["overlapped", "serial"])
def test_drafts_on_grammar_rows_change_neither_answers_nor_masks(
    device: str, plain: list[Answer], overlap: bool, settings: dict[str, Any]
) -> None:
    drafts = {"speculative": "ngram", "num_draft_tokens": 4, "ngram_min": 1, "draft_budget": 24}
    with make_engine(tiny_checkpoint("qwen2"), device, zero_overhead=overlap, **drafts, **settings) as engine:
        answers, logs = sing(engine)
        stats = engine.core_stats()
    assert all(map(same_bits, plain, answers))
    assert {a.finish for a in answers} <= {"stop", "length"} and "stop" in {a.finish for a in answers}
    assert bool(stats["preemptions"]) == bool(settings)
    strayed = 0
    for answer, verses, log in zip(answers, VERSES, logs, strict=True):
        if verses is None:
            assert not log
            continue
        paths = dict(log)
        assert all(paths[tuple(answer.tokens[:n])] for n in range(len(answer.tokens))), "a token that was drawn without a mask"
        assert all(mask == replayed(verses, path) for path, mask in log)
        strayed += sum(path != tuple(answer.tokens[: len(path)]) for path in paths)
    assert strayed, "every draft was right: rows behind wrong ones were never masked"
    assert 0 < stats["accepted"] < stats["drafted"]
