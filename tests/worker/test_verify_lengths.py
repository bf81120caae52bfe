"""The choice of drafts to verify: against every possible choice, and at the edges."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch

from deepinfer.worker.verify_lengths import survival, verify_lengths


def best_by_hand(conf: list[list[float]], drafted: list[int], budget: int) -> float:
    """Largest expected number of accepted drafts over every choice of prefix lengths within the budget."""
    best = 0.0
    for lengths in product(*(range(d + 1) for d in drafted)):
        if sum(lengths) <= budget:
            best = max(best, value(conf, list(lengths)))
    return best


def value(conf: list[list[float]], lengths: list[int]) -> float:
    return math.fsum(math.prod(row[: k + 1]) for row, n in zip(conf, lengths, strict=True) for k in range(n))


def test_no_choice_of_lengths_is_better(device: str) -> None:
    g = torch.Generator().manual_seed(3)
    for case in range(300):
        n, most = int(torch.randint(1, 5, (), generator=g)), int(torch.randint(1, 5, (), generator=g))
        conf = torch.rand(n, most, generator=g)
        if case % 3 == 0:
            conf = (conf * 4).round() / 4  # many ties, zeros and ones
        drafted = torch.randint(0, most + 1, (n,), generator=g)
        budget = int(torch.randint(0, n * most + 2, (), generator=g))
        got = verify_lengths(conf.to(device), drafted.to(device), budget)
        lengths = got.lengths.tolist()
        assert sum(lengths) == min(budget, int(drafted.sum()))
        assert all(0 <= a <= b for a, b in zip(lengths, drafted.tolist(), strict=True))
        want = best_by_hand(conf.tolist(), drafted.tolist(), budget)
        assert value(conf.tolist(), lengths) == pytest.approx(want, abs=1e-5)
        again = verify_lengths(conf.to(device), drafted.to(device), torch.tensor(budget, device=device))
        assert torch.equal(again.lengths, got.lengths)


def test_rows_are_a_permutation_with_no_row_twice(device: str) -> None:
    g = torch.Generator().manual_seed(4)
    conf = torch.rand(40, 6, generator=g).to(device)
    drafted = torch.randint(0, 7, (40,), generator=g).to(device)
    for budget in (0, 1, 57, 10_000):
        got = verify_lengths(conf, drafted, budget)
        used = sorted(r for r in got.rows.view(-1).tolist() if r >= 0)
        assert used == list(range(int(got.lengths.sum()) + 40))
        assert got.offsets.tolist()[-1] == len(used)
        for r in range(40):
            length = int(got.lengths[r])
            start = int(got.offsets[r])
            assert got.rows[r].tolist() == [*range(start, start + length + 1), *[-1] * (6 - length)]


def test_ties_go_to_earlier_drafts_then_to_earlier_sequences(device: str) -> None:
    ones, all_drafted = torch.ones(3, 3, device=device), torch.full((3,), 3, device=device)
    shared = [verify_lengths(ones, all_drafted, b).lengths.tolist() for b in range(10)]
    assert shared[1:5] == [[1, 0, 0], [1, 1, 0], [1, 1, 1], [2, 1, 1]]
    assert shared[0] == [0, 0, 0]
    assert shared[9] == [3, 3, 3]


def test_values_that_are_no_probability(device: str) -> None:
    nan, inf = float("nan"), float("inf")
    conf = torch.tensor([[nan, 1, 1], [0.5, nan, 1], [2.0, inf, 0.25], [-1.0, 1, 1]], device=device)
    drafted = torch.tensor([3, 3, 3, 3], device=device)
    assert survival(conf, drafted).tolist() == [[0, 0, 0], [0.5, 0, 0], [1, 1, 0.25], [0, 0, 0]]
    assert verify_lengths(conf, drafted, 4).lengths.tolist() == [0, 1, 3, 0]
    everything = verify_lengths(conf, drafted, 12)
    assert everything.lengths.tolist() == [3, 3, 3, 3]


def test_nothing_drafted_and_no_sequences(device: str) -> None:
    none = verify_lengths(torch.ones(2, 4, device=device), torch.zeros(2, dtype=torch.int64, device=device), 8)
    assert none.lengths.tolist() == [0, 0]
    assert none.offsets.tolist() == [0, 1, 2]
    empty = verify_lengths(torch.ones(0, 4, device=device), torch.zeros(0, dtype=torch.int64, device=device), 8)
    assert empty.offsets.tolist() == [0]
    narrow = verify_lengths(torch.ones(2, 0, device=device), torch.zeros(2, dtype=torch.int64, device=device), 8)
    assert narrow.rows.tolist() == [[0], [1]]


def test_lengths_do_not_depend_on_what_comes_later_in_a_row(device: str) -> None:
    """Whether draft k is verified may know conf[.., k] and earlier values of its row only, beside other rows."""
    g = torch.Generator().manual_seed(9)
    conf, drafted = torch.rand(6, 4, generator=g), torch.full((6,), 4)
    for k in range(3):
        changed = conf.clone()
        changed[2, k + 1 :] = torch.rand(3 - k, generator=g)
        a, b = (verify_lengths(c.to(device), drafted.to(device), 9).lengths[2] for c in (conf, changed))
        assert min(int(a), k + 1) == min(int(b), k + 1)
