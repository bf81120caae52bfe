"""Experts spread over ranks: the bits of one rank, whatever the others have to do."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from deepinfer.distributed import spread_experts
from deepinfer.distributed.experts import NOWHERE, share
from deepinfer.errors import ConfigError
from deepinfer.kernels.block_formats import FP8_ROWS
from deepinfer.kernels.experts import expert_mlp, pack_experts
from deepinfer.kernels.experts import packed as experts_module

HIDDEN, INNER, EXPERTS, CHOSEN = 64, 32, 8, 3


class Board:
    """Where ranks of one process meet."""

    def __init__(self, size: int) -> None:
        self.size, self.given, self.barrier = size, [None] * size, threading.Barrier(size, timeout=20)

    def exchange(self, rank: int, value: Any) -> list[Any]:
        self.given[rank] = value
        self.barrier.wait()
        found = list(self.given)
        self.barrier.wait()
        return found


class ThreadExpertGroup:
    """The exchange as its contract says it, in plain terms: the oracle of the real one, too."""

    def __init__(self, board: Board, rank: int) -> None:
        self.board, self.rank, self.size, self.most = board, rank, board.size, 0
        self.exchanges = self.banks = 0

    def begin(self, rows: int) -> None:
        self.most = rows

    def dispatch(self, rows: torch.Tensor, places: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        self.exchanges += 1
        empty = self.most - rows.shape[0]
        mine = (
            torch.cat((rows, rows.new_zeros(empty, rows.shape[1]))),
            torch.cat((places, places.new_full((empty, places.shape[1]), NOWHERE))),
            torch.cat((weights, weights.new_zeros(empty, weights.shape[1]))),
        )
        return tuple(torch.cat(parts) for parts in zip(*self.board.exchange(self.rank, mine), strict=True))

    def combine(self, made: torch.Tensor, owner: torch.Tensor) -> torch.Tensor:
        self.exchanges += 1
        first = self.rank * self.most
        theirs = torch.stack([m[first : first + owner.shape[0]] for m in self.board.exchange(self.rank, made)])
        rows, choices = torch.meshgrid(torch.arange(owner.shape[0]), torch.arange(owner.shape[1]), indexing="ij")
        return theirs[owner, rows, choices]

    def close(self) -> None:
        pass


def on_ranks(size: int, work: Callable[[int, ThreadExpertGroup], Any]) -> list[Any]:
    """What ``work`` gives on every rank, in threads."""
    board, found, errors = Board(size), [None] * size, []

    def run(rank: int) -> None:
        try:
            found[rank] = work(rank, ThreadExpertGroup(board, rank))
        except BaseException as e:
            errors.append(e)
            board.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return found


def random_rows(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def choices(rows: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.rand(rows, EXPERTS, generator=torch.Generator().manual_seed(seed)).argsort(-1)[:, :CHOSEN]
    return ids, torch.rand(rows, CHOSEN, generator=torch.Generator().manual_seed(seed + 1))


@pytest.fixture(params=["dense", "gathered"])
def form_of_experts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "gathered":
        monkeypatch.setattr(experts_module, "DENSE_EXPERTS", 0)
    return str(request.param)


@pytest.mark.parametrize("weight_first", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rows_bits_do_not_depend_on_the_number_of_ranks(form_of_experts: str, ranks: int, dtype: torch.dtype, weight_first: bool) -> None:
    gate_up = (random_rows(EXPERTS, 2 * INNER, HIDDEN, seed=1) * 0.3).to(dtype)
    down = (random_rows(EXPERTS, HIDDEN, INNER, seed=2) * 0.3).to(dtype)
    counts = (13, 1, 8, 40)[:ranks]  # one rank has hardly anything, none as many rows as another
    physical = random_rows(EXPERTS, seed=9).argsort().tolist()
    alone = pack_experts([gate_up[physical.index(p)] for p in range(EXPERTS)], [down[physical.index(p)] for p in range(EXPERTS)])
    form = FP8_ROWS if dtype is torch.bfloat16 else None

    def rows(rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return random_rows(counts[rank], HIDDEN, seed=20 + rank).to(dtype), *choices(counts[rank], 40 + rank)

    def work(rank: int, group: ThreadExpertGroup) -> torch.Tensor:
        here = share(group, EXPERTS)
        mine = [physical.index(p) for p in here]
        with spread_experts(group):
            bank = pack_experts(gate_up[mine], down[mine], EXPERTS)
        assert bank.here == here and bank.count == EXPERTS
        group.begin(max(counts))
        u, ids, weights = rows(rank)
        found = expert_mlp(u, ids, weights, bank, 2.0, physical, form, weight_first)
        assert group.exchanges == 2
        return found

    for rank, found in enumerate(on_ranks(ranks, work)):
        u, ids, weights = rows(rank)
        want = expert_mlp(u, ids, weights, alone, 2.0, physical, form, weight_first)
        assert torch.equal(found, want), rank


def test_weights_of_all_experts_are_cut_to_the_ranks_own(form_of_experts: str) -> None:
    gate_up, down = random_rows(EXPERTS, 2 * INNER, HIDDEN, seed=1), random_rows(EXPERTS, HIDDEN, INNER, seed=2)
    whole = pack_experts(gate_up, down)
    u, (ids, weights) = random_rows(5, HIDDEN, seed=3), choices(5, 4)

    def work(rank: int, group: ThreadExpertGroup) -> torch.Tensor:
        with spread_experts(group):
            bank = pack_experts(list(gate_up), list(down))
        kept = len(bank.products) if bank.stacked is None else len(bank.stacked[0])
        assert kept == EXPERTS // 2
        group.begin(5)
        return bank(u, ids, weights)

    for found in on_ranks(2, work):
        assert torch.equal(found, whole(u, ids, weights))


def test_experts_that_do_not_come_out_even_are_refused() -> None:
    group = ThreadExpertGroup(Board(3), 1)
    with spread_experts(group), pytest.raises(ConfigError, match="8 experts cannot be spread evenly over 3 ranks"):
        pack_experts(random_rows(EXPERTS, 2 * INNER, HIDDEN, seed=1), random_rows(EXPERTS, HIDDEN, INNER, seed=2))
    with spread_experts(ThreadExpertGroup(Board(2), 0)), pytest.raises(ValueError, match="8 experts were given, but 4 of 8"):
        pack_experts(random_rows(EXPERTS, 2 * INNER, HIDDEN, seed=1), random_rows(EXPERTS, HIDDEN, INNER, seed=2), EXPERTS)
