"""Paged attention against a plain softmax in float64, and its bits under every way of cutting and batching."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch

from deepinfer.kernels.paged_attention import make_plan, paged_attention, tree_sum

HEADS, KV_HEADS, DIM = 6, 2, 32
CHUNKS = (1, 2, 3, 7, 16, 64, 100, 1000)


@dataclass
class Stream:
    """Queries, keys and values of one sequence, ``[len, heads, d]``."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor

    def __len__(self) -> int:
        return self.q.shape[0]


def make(length: int, seed: int, dtype: torch.dtype, device: str) -> Stream:
    g = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(length, h, DIM, generator=g).to(device=device, dtype=dtype) for h in (HEADS, KV_HEADS, KV_HEADS))
    return Stream(q, k, v)


class Pool:
    """KV of several sequences in shuffled pages; unwritten entries are NaN."""

    def __init__(self, sequences: Sequence[Stream], block: int, seed: int = 0) -> None:
        pages = [-(-len(s) // block) for s in sequences]
        order = list(range(1, sum(pages) + 1))
        random.Random(seed).shuffle(order)
        first = sequences[0].k
        self.block = block
        self.k = torch.full((len(order) + 1, block, KV_HEADS, DIM), torch.nan, dtype=first.dtype, device=first.device)
        self.v = self.k.clone()
        self.tables = []
        for s, count in zip(sequences, pages, strict=True):
            table = [order.pop() for _ in range(count)]
            self.tables.append(table)
            for position in range(len(s)):
                page, offset = table[position // block], position % block
                self.k[page, offset], self.v[page, offset] = s.k[position], s.v[position]

    def run(
        self, sequences: Sequence[Stream], work: Sequence[tuple[int, int, int]], window: int | None, padding: int = 0
    ) -> list[torch.Tensor]:
        """Rows ``start … end`` of each (sequence, start, end); single rows must come first."""
        device = self.k.device
        width = max(len(table) for table in self.tables)
        table = torch.tensor([self.tables[i] + [0] * (width - len(self.tables[i])) for i, _, _ in work], dtype=torch.int32, device=device)
        cu_q = [0]
        for _, start, end in work:
            cu_q.append(cu_q[-1] + end - start)
        positions = torch.cat([torch.arange(start, end) for _, start, end in work]).to(device)
        q = torch.cat([sequences[i].q[start:end] for i, start, end in work])
        if padding:
            q = torch.cat((q, q.new_zeros(padding, HEADS, DIM)))
        decodes = sum(end - start == 1 for _, start, end in work)
        plan = make_plan(positions, table, cu_q, [end for _, _, end in work], decodes, self.block)
        out = paged_attention(q, self.k, self.v, plan, DIM**-0.5, window)
        assert out.shape == q.shape and not out[cu_q[-1] :].any()
        return [out[a:b] for a, b in itertools.pairwise(cu_q)]


def chunked(sequence: Stream, chunk: int, block: int, window: int | None, first: int = 0) -> torch.Tensor:
    """Rows from ``first`` on, computed ``chunk`` at a time."""
    pool = Pool([sequence], block)
    starts = range(first, len(sequence), chunk)
    return torch.cat([pool.run([sequence], [(0, s, min(s + chunk, len(sequence)))], window)[0] for s in starts])


def exact(s: Stream, window: int | None) -> torch.Tensor:
    q, k, v = s.q.double(), s.k.double().repeat_interleave(HEADS // KV_HEADS, 1), s.v.double().repeat_interleave(HEADS // KV_HEADS, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * DIM**-0.5
    distance = torch.arange(len(s))[:, None] - torch.arange(len(s))[None]
    hidden = (distance < 0) | (distance >= (window or len(s) + 1))
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden.to(scores.device), -torch.inf).softmax(-1), v)


@pytest.mark.parametrize("window", [None, 1, 40, 200])
@pytest.mark.parametrize("length", [1, 63, 64, 65, 500])
def test_equals_softmax_attention(length: int, window: int | None, device: str) -> None:
    s = make(length, 1, torch.float32, device)
    torch.testing.assert_close(chunked(s, 1000, 16, window).double(), exact(s, window), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 40, 200])
def test_chunks_and_block_sizes_do_not_change_bits(dtype: torch.dtype, window: int | None, device: str) -> None:
    """Decoding is chunk 1. The sequence is longer than the ring of the smaller windows."""
    s = make(450, 2, dtype, device)
    whole = chunked(s, 1000, 64, window)
    assert not whole.isnan().any()
    for chunk in CHUNKS:
        first = 0 if chunk > 3 else 350  # small chunks mean many calls
        assert torch.equal(chunked(s, chunk, 16, window, first), whole[first:]), f"chunk {chunk}"
    for block in (16, 32, 64, 128):
        assert torch.equal(chunked(s, 100, block, window), whole), f"block {block}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 40])
def test_batch_mates_do_not_change_bits(dtype: torch.dtype, window: int | None, device: str) -> None:
    """Alone, among up to 64 decoding mates of other lengths, and beside prefill chunks."""
    draw = random.Random(3)
    sequences = [make(draw.choice((1, 9, 64, 130, 300)), i, dtype, device) for i in range(64)] + [make(700, 99, dtype, device)]
    pool = Pool(sequences, 32)
    alone = [pool.run(sequences, [(i, len(s) - 1, len(s))], window)[0] for i, s in enumerate(sequences)]
    for size in (2, 3, 8, 17, 64):
        chosen = draw.sample(range(len(sequences)), size)
        out = pool.run(sequences, [(i, len(sequences[i]) - 1, len(sequences[i])) for i in chosen], window, padding=(-size) % 8)
        for i, rows in zip(chosen, out, strict=True):
            assert torch.equal(rows, alone[i]), f"batch of {size}"
    decoding = [(i, len(sequences[i]) - 1, len(sequences[i])) for i in range(5)]
    mixed = pool.run(sequences, [*decoding, (64, 130, 515), (64, 0, 77)], window)
    for i in range(5):
        assert torch.equal(mixed[i], alone[i])
    whole = chunked(sequences[64], 1000, 32, window)
    assert torch.equal(mixed[5], whole[130:515]) and torch.equal(mixed[6], whole[:77])


def test_a_long_mate_splits_the_bundle_without_changing_bits(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    sequences = [make(n, n, torch.float32, device) for n in (30, 300, 64, 500)]
    pool = Pool(sequences, 16)
    work = [(i, len(s) - 1, len(s)) for i, s in enumerate(sequences)]
    whole = pool.run(sequences, work, None)
    monkeypatch.setattr("deepinfer.kernels.paged_attention.plan._TILE_BUDGET", 8)
    for a, b in zip(pool.run(sequences, work, None), whole, strict=True):
        assert torch.equal(a, b)


def test_draft_rows_equal_single_decodes(device: str) -> None:
    """Several rows of one decoding sequence give what one row at a time gives."""
    s = make(200, 5, torch.float32, device)
    pool = Pool([s], 16)
    table = torch.tensor([pool.tables[0], pool.tables[0]], dtype=torch.int32, device=device)
    positions = torch.tensor([190, 191, 192, 193, 199], device=device)
    plan = make_plan(positions, table, [0, 4, 5], [194, 200], 2, 16)
    out = paged_attention(s.q[positions], pool.k, pool.v, plan, DIM**-0.5)
    assert torch.equal(out, chunked(s, 1, 16, None)[positions.cpu()])


def test_tree_sum_does_not_change_when_zeros_are_appended() -> None:
    x = torch.randn(5, 37, generator=torch.Generator().manual_seed(0))
    padded = torch.cat((x, torch.zeros(5, 27)), 1)
    assert torch.equal(tree_sum(x, 1), tree_sum(padded, 1))
    torch.testing.assert_close(tree_sum(x, 1), x.sum(1))
    assert torch.equal(tree_sum(x[:, :1], 1), x[:, 0])


def test_a_sum_over_the_whole_context_fails_the_same_check() -> None:
    """Negative control: adding tiles with a library's sum instead of the tree changes bits with the number of tiles."""
    x = torch.randn(64, 41, 16, generator=torch.Generator().manual_seed(0))
    plain = x.flatten(1).sum(1)
    longer = (torch.cat((x, x.new_zeros(64, zeros, 16)), 1).flatten(1).sum(1) for zeros in range(1, 40))
    assert any(not torch.equal(total, plain) for total in longer)


def test_prefill_blocks_shrink_where_a_library_mixes_bits(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """A product that computes many rows in another order is found by the census; the blocks it leaves keep the bits."""
    from deepinfer.kernels.paged_attention import census

    group, real = HEADS // KV_HEADS, torch.bmm
    quantum = census.row_quantum(torch.device(device))

    def moody(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        out = real(a, b)
        return out * (1 + 1e-6) if a.shape[1] > 2 * quantum else out

    assert census._census.__wrapped__(torch.device(device), DIM, group, 0) == 128
    monkeypatch.setattr(torch, "bmm", moody)
    assert census._census.__wrapped__(torch.device(device), DIM, group, 0) == 2 * quantum // group
    s = make(150, 6, torch.float32, device)
    pool = Pool([s], 16)
    table = torch.tensor(pool.tables, dtype=torch.int32, device=device)
    positions = torch.arange(150, device=device)
    plan = make_plan(positions, table, [0, 150], [150], 0, 16, 2 * quantum // group)
    assert torch.equal(paged_attention(s.q, pool.k, pool.v, plan, DIM**-0.5), chunked(s, 1, 16, None))
