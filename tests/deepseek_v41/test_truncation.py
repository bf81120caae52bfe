"""Prefills whose decoder sees only a prompt's last tokens: masked, left out, in one piece and in chunks.

Exact bound (docs/architecture.md): with ``n`` decoder layers and windows of ``W``, ``n (W - 1) + 1`` tokens.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch

from deepinfer.errors import ConfigError
from deepinfer.models.base import ModelOptions, Truncation
from deepinfer.models.deepseek_v41.forward import DeepseekV41Model
from deepseek_v41.forward_kit import Bench, Running, make_model
from deepseek_v41.sequential import Run, Sequential
from deepseek_v41.weights_kit import RandomWeights, plan, random_ids

LENGTH, EXTRA = 120, 8
BOUND = 5 * 15 + 1  # five decoder layers, windows of 16
KEEPS = (22, 50, BOUND, 300)


@cache
def model(device: str) -> DeepseekV41Model:
    topology = plan("tiny")
    return make_model(topology, RandomWeights(topology, 3, released=True), torch.float32, device)


@cache
def answer(mode: Truncation, keep: int, chunk: int | None, device: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Logits of the prompt's last row and of the tokens that follow it (fed one by one), and the bytes of all entries."""
    bench = Bench(model(device), truncation=mode, keep=keep)
    run = bench.start(random_ids(plan("tiny"), LENGTH + EXTRA, 3), prompt=LENGTH)
    rows: list[torch.Tensor] = []
    while run.done < LENGTH:
        rows = bench.step([(run, min(chunk or LENGTH, LENGTH - run.done))])
    rows = [rows[0][-1:]]
    while run.done < LENGTH + EXTRA:
        rows += bench.step([(run, min(4, LENGTH + EXTRA - run.done))])
    return torch.cat(rows), bench.written(run)


def test_the_bound() -> None:
    assert plan("tiny").exact_decoder_tokens == BOUND and plan("full").exact_decoder_tokens == 2541
    assert plan("tiny").least_keep == 22 and plan("full").least_keep == 134


@pytest.mark.parametrize("keep", KEEPS)
def test_masked_and_left_out_are_the_same_bits(keep: int, device: str) -> None:
    masked, entries = answer("mask", keep, None, device)
    for mode, chunk in (("compact", None), ("compact", 33), ("mask", 50)):
        logits, written = answer(mode, keep, chunk, device)
        assert torch.equal(logits, masked), (mode, chunk)
        assert all(torch.equal(written[name], rows) for name, rows in entries.items())
    whole, untruncated = answer("off", 0, None, device)
    assert torch.equal(masked, whole) is (keep >= BOUND)
    # what prefixes are made of does not depend on what the decoder sees
    assert all(torch.equal(untruncated[name], rows) for name, rows in entries.items())


def test_errors_fall_with_what_is_kept(device: str) -> None:
    whole = answer("off", 0, None, device)[0]
    errors = [float((answer("compact", keep, None, device)[0][0] - whole[0]).abs().max()) for keep in KEEPS]
    assert errors[0] > errors[1] > 0 and errors[2:] == [0.0, 0.0], errors


def test_truncation_is_what_the_reference_does(device: str) -> None:
    topology = plan("tiny", x_cache_quant="none", quantization_config=None)
    weights = RandomWeights(topology, 3)
    bench = Bench(make_model(topology, weights, torch.float32, device), truncation="compact", keep=30)
    ids, rows, taps = random_ids(topology, LENGTH, 3), [], []
    run = bench.start(ids)
    for count in (47, 47, 26):  # the second one holds four of the rows that are kept
        rows += bench.step([(run, count)])
        assert bench.model.taps is not None
        taps.append(bench.model.taps)
    theirs = Sequential(topology, weights, Run(caches=False)).forward(ids, keep=30)
    assert theirs.first_row == LENGTH - 30
    assert (torch.cat(rows)[-30:].cpu() - theirs.logits).abs().max() < 1e-5
    assert [tap.values.shape[0] for tap in taps] == [0, 4, 26]
    assert taps[1].rows is not None and taps[1].rows.tolist() == [43, 44, 45, 46] and taps[2].rows is None
    made = torch.cat([tap.values for tap in taps]).cpu()
    assert (made - theirs.taps).abs().max() < 1e-5 * theirs.taps.abs().max()


def test_batches_of_truncated_and_other_sequences(device: str) -> None:
    bench = Bench(model(device), truncation="compact", keep=40)
    ids = [random_ids(plan("tiny"), length, 3) for length in (LENGTH, 35, 90)]
    runs = [bench.start(i) for i in ids]
    rows: list[list[torch.Tensor]] = [[] for _ in runs]
    for counts in ((50, 35, 10), (60, 0, 79), (10, 0, 1)):
        work = [(k, count) for k, count in enumerate(counts) if count]
        for (k, _), logits in zip(work, bench.step([(runs[k], count) for k, count in work]), strict=True):
            rows[k].append(logits)
    for k, run_rows in enumerate(rows):
        alone = Bench(model(device), truncation="compact", keep=40).prefill(ids[k])[1]
        assert torch.equal(torch.cat(run_rows)[-40:], alone[-40:]), k


def test_what_is_kept_covers_a_window_and_what_may_be_taken_back(device: str) -> None:
    m = model(device)
    try:
        assert m.configure(ModelOptions(truncation="compact")).keep_tokens == 22
        with pytest.raises(ConfigError, match=r"yoco_prefill_keep_tokens 21 .* at least 22"):
            m.configure(ModelOptions(truncation="mask", keep_tokens=21))
        with pytest.raises(ConfigError, match=r"keep_tokens 22 .* at least 24"):
            m.configure(ModelOptions(truncation="mask", keep_tokens=22, max_backtracking=8))
        with pytest.raises(ConfigError, match=r"max_backtracking_tokens 4 .* set it to at least 6"):
            m.configure(ModelOptions(max_backtracking=4, max_draft=5))
        assert m.configure(ModelOptions(max_draft=9)).max_backtracking == 10
    finally:
        m.configure(ModelOptions())


def test_a_wider_ring_gives_the_same_bits(device: str) -> None:
    m, ids = model(device), random_ids(plan("tiny"), 60, 3)
    narrow = Bench(m).prefill(ids, chunk=25)[1]
    m.configure(ModelOptions(max_backtracking=11))
    try:
        bench = Bench(m)
        raw = {field.shape[0] for field in m.caches.dropped.fields if field.name.endswith(".pending")}
        assert m.caches.ring == 27 and raw == {16}
        run: Running = bench.start(ids)
        assert torch.equal(torch.cat([bench.step([(run, 12)])[0] for _ in range(5)]), narrow)
    finally:
        m.configure(ModelOptions())
