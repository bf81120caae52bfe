"""The sampler: what each value does, and that a row never depends on its mates."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from deepinfer.sampling import SamplingParams
from deepinfer.worker.counter_rng import random_bits, uniform
from deepinfer.worker.logprobs import gather_logprobs
from deepinfer.worker.ranking import falling_keys, ranked
from deepinfer.worker.sampler import Sampler, SampleRows, weight_scale
from deepinfer.worker.sampling_state import DRAWS, EDITS, MIN_LENGTH, RANKED, TOP_K, RowSampling, SamplingState

VOCAB = 1000


def draw(
    device: str,
    logits: torch.Tensor,
    params: list[SamplingParams],
    *,
    seeds: list[int] | None = None,
    positions: list[int] | None = None,
    prompt: list[int] | None = None,
    outputs: list[list[int]] | None = None,
    eos: tuple[int, ...] = (),
    bad_words: tuple[tuple[int, ...], ...] = (),
) -> list[int]:
    """Tokens of a batch whose row i sits in state slot i + 1."""
    if prompt is None:
        prompt = [1, 2, 3]
    m = len(params)
    vocab = logits.shape[1]
    state = SamplingState(m + 1, vocab, torch.device(device))
    outputs = outputs or [[] for _ in range(m)]
    for i, p in enumerate(params):
        state.admit(i + 1, RowSampling(p, (seeds or [0] * m)[i], prompt, eos, bad_words), outputs[i])
    state.table = torch.from_numpy(state.host).to(device)
    slots = torch.arange(1, m + 1)
    at = torch.tensor(positions or [len(prompt) + len(o) for o in outputs])
    flags = state.flags[1:]

    def rows(mask: np.ndarray) -> torch.Tensor | None:
        found = torch.from_numpy(np.flatnonzero(mask))
        return found.to(device) if len(found) else None

    by_rank = (flags & RANKED) != 0
    chosen = SampleRows(
        slots.to(device),
        at.to(device),
        int(np.bitwise_or.reduce(flags)),
        edit=rows((flags & EDITS) != 0),
        plain=rows(((flags & DRAWS) != 0) & ~by_rank),
        ranked=rows(by_rank),
        max_top_k=int(state.host[1:][by_rank][:, TOP_K].max()) if by_rank.any() else 0,
    )
    return Sampler(state, vocab)(logits.clone().to(device), chosen).tolist()


@pytest.fixture
def logits() -> torch.Tensor:
    return torch.randn(64, VOCAB, generator=torch.Generator().manual_seed(1)) * 3


MIXED = [
    SamplingParams(temperature=0),
    SamplingParams(temperature=1),
    SamplingParams(temperature=0.7, top_k=20),
    SamplingParams(temperature=1.3, top_p=0.9),
    SamplingParams(temperature=1, top_k=50, top_p=0.8, min_p=0.05),
    SamplingParams(temperature=1, min_p=0.2),
    SamplingParams(temperature=0, repetition_penalty=1.5, presence_penalty=1, frequency_penalty=0.5),
    SamplingParams(temperature=1, logit_bias={7: 5.0, 0: -3.0}),
    SamplingParams(temperature=0.9, min_tokens=4, stop_token_ids=[5, 6]),
]


def test_a_row_draws_the_same_alone_and_in_any_batch(device: str, logits: torch.Tensor) -> None:
    params = [MIXED[i % len(MIXED)] for i in range(64)]
    seeds = [i * 7919 for i in range(64)]
    outputs = [[i, i, i + 1] if i % 2 else [] for i in range(64)]
    together = draw(device, logits, params, seeds=seeds, outputs=outputs)
    alone = [draw(device, logits[i : i + 1], [params[i]], seeds=[seeds[i]], outputs=[outputs[i]])[0] for i in range(64)]
    assert together == alone
    order = torch.randperm(64, generator=torch.Generator().manual_seed(3)).tolist()
    shuffled = draw(device, logits[order], [params[i] for i in order], seeds=[seeds[i] for i in order], outputs=[outputs[i] for i in order])
    assert shuffled == [together[i] for i in order]


def test_draws_depend_on_seed_and_position(device: str, logits: torch.Tensor) -> None:
    flat = torch.zeros(64, VOCAB)
    p = [SamplingParams(temperature=1)] * 64
    a = draw(device, flat, p, seeds=[1] * 64, positions=list(range(64)))
    assert a == draw(device, flat, p, seeds=[1] * 64, positions=list(range(64)))
    assert len(set(a)) > 55  # 64 draws of 1000 equally likely ids
    assert a != draw(device, flat, p, seeds=[2] * 64, positions=list(range(64)))


def test_random_bits_are_fixed_values(device: str) -> None:
    def reference(seed: int, position: int, number: int) -> int:
        mask, g = (1 << 64) - 1, 0x9E3779B97F4A7C15

        def mix(x: int) -> int:
            x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
            x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
            return x ^ (x >> 31)

        return mix((mix((mix((seed + g) & mask) + position * g) & mask) + number * g) & mask)

    seeds, positions = [0, 1, 2**63 - 1, 123456789], [0, 1, 131071, 5]
    for number in (0, 1, 7):
        got = random_bits(torch.tensor(seeds, device=device), torch.tensor(positions, device=device), number).tolist()
        assert [g & (2**64 - 1) for g in got] == [reference(s, p, number) for s, p in zip(seeds, positions, strict=True)]


def test_uniform_fills_the_unit_interval() -> None:
    u = uniform(random_bits(torch.full((100_000,), 5), torch.arange(100_000), 0))
    assert u.min() >= 0 and u.max() < 1
    assert abs(float(u.mean()) - 0.5) < 0.005
    counts = torch.histc(u, 100, 0, 1)
    assert float(((counts - 1000) ** 2 / 1000).sum()) < 160  # chi-square of 99 degrees: mean 99, deviation 14


@pytest.mark.parametrize("params", [{}, {"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.1}, {"top_k": 4, "top_p": 0.9}])
def test_frequencies_follow_the_filtered_distribution(device: str, params: dict[str, float]) -> None:
    m, temperature = 20_000, 0.8
    row = torch.tensor([2.0, 1.0, 0.5, 0.5, -1.0, -2.0, 3.0, 1.5])
    probs = torch.softmax(row / temperature, 0).double()
    order = probs.argsort(descending=True, stable=True)
    keep = torch.ones(8, dtype=torch.bool)
    if "top_k" in params:
        keep[order[int(params["top_k"]) :]] = False
    if "top_p" in params:
        kept = torch.where(keep, probs, 0) / probs[keep].sum()
        before = kept[order].cumsum(0) - kept[order]
        keep[order[before >= params["top_p"]]] = False
    if "min_p" in params:
        keep &= probs >= params["min_p"] * probs.max()
    expected = torch.where(keep, probs, 0) / probs[keep].sum()
    p = SamplingParams(temperature=temperature, **params)  # type: ignore[arg-type]
    got = draw(device, row.repeat(m, 1), [p] * m, seeds=[9] * m, positions=list(range(m)))
    share = torch.bincount(torch.tensor(got), minlength=8).double() / m
    assert torch.all((share > 0) <= keep)
    assert float((share - expected).abs().max()) < 0.015


def test_greedy_ties_go_to_the_lowest_id(device: str) -> None:
    row = torch.zeros(1, VOCAB)
    row[0, [17, 400, 999]] = 5.0
    assert draw(device, row, [SamplingParams(temperature=0)]) == [17]
    assert draw(device, row, [SamplingParams(temperature=1, top_k=1)]) == [17]


def test_top_k_keeps_the_lowest_ids_among_ties(device: str) -> None:
    row = torch.zeros(200, VOCAB)
    got = draw(device, row, [SamplingParams(temperature=1, top_k=3)] * 200, positions=list(range(200)))
    assert set(got) == {0, 1, 2}


def test_wide_top_p_over_more_candidates_than_are_looked_at_first(device: str) -> None:
    row = torch.randn(1, 5000, generator=torch.Generator().manual_seed(5)) * 0.01
    p = [SamplingParams(temperature=1, top_p=0.95)] * 400
    got = set(draw(device, row.repeat(400, 1), p, positions=list(range(400))))
    order = row[0].argsort(descending=True)
    kept = set(order[: int(5000 * 0.95) + 60].tolist())
    assert got <= kept and len(got) > 350


def test_penalties_follow_their_formulas(device: str) -> None:
    row = torch.full((1, VOCAB), -5.0)
    row[0, 10], row[0, 20], row[0, 30] = 4.0, 3.0, 2.5
    greedy = SamplingParams(temperature=0)
    assert draw(device, row, [greedy], prompt=[10]) == [10]
    assert draw(device, row, [greedy.clone(repetition_penalty=1.5)], prompt=[10]) == [20]  # 4 / 1.5 < 3
    assert draw(device, row, [greedy.clone(presence_penalty=1.1)], prompt=[10]) == [10]  # the prompt does not count
    assert draw(device, row, [greedy.clone(presence_penalty=1.1)], outputs=[[10]]) == [20]
    assert draw(device, row, [greedy.clone(frequency_penalty=0.6)], outputs=[[10]]) == [10]
    assert draw(device, row, [greedy.clone(frequency_penalty=0.6)], outputs=[[10, 10]]) == [20]
    negative = torch.full((1, VOCAB), -9.0)
    negative[0, 10], negative[0, 20] = -1.0, -1.5
    assert draw(device, negative, [greedy.clone(repetition_penalty=2.0)], prompt=[10]) == [20]  # −1 · 2 < −1.5


def test_bias_and_masks(device: str) -> None:
    row = torch.zeros(1, VOCAB)
    row[0, 3], row[0, 4] = 2.0, 1.0
    greedy = SamplingParams(temperature=0)
    assert draw(device, row, [greedy.clone(logit_bias={4: 1.5})]) == [4]
    assert draw(device, row, [greedy.clone(logit_bias={3: -100.0})]) == [4]
    assert draw(device, row, [greedy.clone(min_tokens=2)], eos=(3,)) == [4]
    assert draw(device, row, [greedy.clone(min_tokens=2, max_tokens=9)], eos=(3,), outputs=[[8]]) == [4]
    assert draw(device, row, [greedy.clone(min_tokens=2)], eos=(3,), outputs=[[8, 8]]) == [3]
    assert draw(device, row, [greedy.clone(min_tokens=2, stop_token_ids=[4])], eos=(3,)) == [0]
    assert draw(device, row, [greedy], bad_words=((3,),)) == [4]
    assert draw(device, row, [greedy], bad_words=((8, 3),), outputs=[[8]]) == [4]
    assert draw(device, row, [greedy], bad_words=((8, 3),), outputs=[[9]]) == [3]
    assert draw(device, row, [greedy], bad_words=((7, 8, 3), (4,)), outputs=[[7, 8]]) == [0]
    assert draw(device, row, [greedy], bad_words=((7, 8, 3), (4,)), outputs=[[8]]) == [3]


def test_state_written_at_admission_equals_state_built_token_by_token(device: str) -> None:
    """A preempted sequence comes back with the state it left with."""
    p = SamplingParams(temperature=0, repetition_penalty=1.3, frequency_penalty=0.2)
    row = RowSampling(p, 0, [1, 2], (), ((5, 6, 7), (9,)))
    dev = torch.device(device)
    grown, fresh = SamplingState(3, VOCAB, dev), SamplingState(3, VOCAB, dev)
    output = [5, 5, 6, 8, 5]
    grown.admit(1, row, [])
    for token in output:
        grown.observe(torch.tensor([1], device=dev), torch.tensor([token], device=dev), int(grown.flags[1]))
    fresh.admit(1, RowSampling(p, 0, [3, 4], (), ((7, 7, 7, 7),)), [1, 2, 3])  # another owner before it
    fresh.admit(1, row, output)
    assert grown.counts is not None and fresh.counts is not None and grown.in_prompt is not None and fresh.in_prompt is not None
    assert torch.equal(grown.counts[1], fresh.counts[1]) and torch.equal(grown.in_prompt[1], fresh.in_prompt[1])
    assert torch.equal(grown.recent[1], fresh.recent[1, -2:])


@pytest.mark.parametrize("least", [0, 3])
def test_a_slot_forgets_its_former_owner(least: int, device: str) -> None:
    """Lists of the sequence that had the slot before must not touch the one that has it now, which has none: not even ids that end it."""
    state = SamplingState(3, VOCAB, torch.device(device))
    rich = SamplingParams(temperature=0, logit_bias={4: 50.0}, min_tokens=3, stop_token_ids=[3])
    state.admit(1, RowSampling(rich, 0, [1], (), ((3,),)), [])
    state.admit(2, RowSampling(rich, 0, [1], (), ((3,),)), [])
    state.admit(1, RowSampling(SamplingParams(temperature=0, presence_penalty=0.1, min_tokens=least), 0, [1]), [])
    state.table = torch.from_numpy(state.host).to(device)
    logits = torch.zeros(2, VOCAB, device=device)
    logits[:, 3] = 1.0
    both = torch.tensor([0, 1], device=device)
    rows = SampleRows(both + 1, both + 1, int(state.flags[1] | state.flags[2]) & EDITS | MIN_LENGTH, edit=both)
    assert Sampler(state, VOCAB)(logits, rows).tolist() == [3, 4]


def test_ranked_order_does_not_depend_on_how_many_are_asked(device: str) -> None:
    x = torch.randint(0, 50, (4, VOCAB), generator=torch.Generator().manual_seed(2)).float().to(device)  # many ties
    full = ranked(x, VOCAB)
    assert torch.equal(full, falling_keys(x).argsort(dim=-1, descending=True))
    for count in (1, 7, 200, 900):
        assert torch.equal(ranked(x, count), full[:, :count])
    y = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(2)).to(device)
    assert torch.equal(ranked(y, 20), y.argsort(dim=-1, descending=True)[:, :20])


@pytest.mark.parametrize("vocab", [1, 2, 1000, 49152, 151936])
def test_weights_of_a_whole_vocabulary_add_exactly(vocab: int) -> None:
    scale = weight_scale(vocab)
    assert vocab * scale <= 2.0**53 and (vocab == 1 or 2 * vocab * scale > 2.0**53 / 2)


def test_logits_without_any_choice_left_give_the_first_id(device: str) -> None:
    row = torch.full((3, VOCAB), -torch.inf)
    assert draw(device, row, [SamplingParams(temperature=1), SamplingParams(temperature=1, top_k=3), SamplingParams(temperature=0)]) == [
        0,
        0,
        0,
    ]


def test_logprobs_are_the_log_softmax_of_raw_logits(device: str, logits: torch.Tensor) -> None:
    x = logits.to(device)
    tokens = torch.arange(64, device=device)
    found = gather_logprobs(x, tokens, 5).to_host(pinned=False) if device == "cpu" else gather_logprobs(x, tokens, 5).to_host(True)
    if device != "cpu":
        torch.cuda.synchronize()
    want = torch.log_softmax(logits.double(), -1)
    assert found.ids[:, 0].tolist() == list(range(64))
    np.testing.assert_allclose(found.values[:, 0], want[torch.arange(64), torch.arange(64)], atol=1e-5)
    top = want.topk(5, -1)
    assert found.ids[:, 1:].tolist() == top.indices.tolist()
    np.testing.assert_allclose(found.values[:, 1:], top.values, atol=1e-5)
    assert found.rank.tolist() == [(want[i] > want[i, i]).sum().item() + 1 for i in range(64)]
    one = gather_logprobs(x[3:4], tokens[3:4], 2)
    assert one.values[0, 0].item() == found.values[3, 0]  # the same bits in a batch of one
