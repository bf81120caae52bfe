"""No operator of a ragged step makes the host wait: neither for a value nor for a copy of one.

On a fake device everywhere, and unchanged on a GPU with ``--device cuda -m "gpu or not gpu"``.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from deepinfer.errors import HiddenSyncError
from deepinfer.kernels.block_formats import FP4_ROWS, FP8_ROWS, MXFP4_ROWS
from deepinfer.kernels.cache_rows import PagedRows, RowKind, StepRows
from deepinfer.kernels.compressor import PoolPlan, compress, pool_windows
from deepinfer.kernels.engram_gate import engram_gate
from deepinfer.kernels.experts import expert_mlp, pack_experts, route, softmax_top_k
from deepinfer.kernels.indexer import select_entries
from deepinfer.kernels.linear import pack_linear
from deepinfer.kernels.rope import RopeParameters, RopeTable, rotate_pairs
from deepinfer.kernels.sparse_attention import full_attention, two_source_attention
from deepinfer.kernels.state_replica import ReplicaRing, save_replica
from deepinfer.kernels.stream_mix import collapse, expand, head_coefficients, mix_coefficients
from deepinfer.kernels.window_rows import WindowPlan, WindowRows
from deepinfer.worker.sync_guard import forbid_device_sync
from fake_cuda import watched_cuda

SEQUENCES, WINDOW, RING = 3, 8, 14


@pytest.fixture(params=["fake", pytest.param("gpu", marks=pytest.mark.gpu)])
def guard(request: pytest.FixtureRequest) -> Iterator[None]:
    """A device called "cuda", whose waits are told from operations."""
    with watched_cuda(request.param):
        yield


def whole(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype, device="cuda")


def real(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full(shape, 0.5, dtype=dtype, device="cuda")


def some_step(rows: int) -> StepRows:
    return StepRows(whole(rows), whole(rows), whole(SEQUENCES + 1, dtype=torch.int32), whole(SEQUENCES))


def pages(kind: RowKind) -> PagedRows:
    return PagedRows(torch.zeros(9, 8, *kind.shape, dtype=kind.dtype, device="cuda"), whole(SEQUENCES, 40, dtype=torch.int32), kind)


@pytest.mark.parametrize("rows", [3, 40])
@pytest.mark.parametrize("packed", [True, False])
def test_attention_over_caches(packed: bool, rows: int, guard: None) -> None:
    dtype = torch.uint8 if packed else torch.bfloat16
    window, entry, key = (RowKind(32, form, packed, dtype) for form in (FP8_ROWS, FP4_ROWS, MXFP4_ROWS))
    ring, pending = torch.zeros(5, RING, *window.shape, dtype=dtype, device="cuda"), real(5, 8, 2, 32)
    table = RopeTable(RopeParameters(16), torch.device("cuda"))
    with forbid_device_sync():
        step = some_step(rows)
        q = rotate_pairs(real(rows, 6, 32), *table.pair_cos_sin(step.pos))
        layer = WindowRows(WindowPlan(step, WINDOW, RING, whole(rows)), ring, window.store(real(rows, 32)), window)
        latent = compress(real(rows, 32), real(rows, 32), WindowPlan(step, 2, 8), pending)
        index_q, weights = key.load(key.store(real(rows, 16, 32))), real(rows, 16)
        selected, pool = select_entries(index_q, weights, pages(key), step, 2, 300, 5, 4, 6)
        again, _ = select_entries(index_q, weights, pages(key), step, 2, 300, 5, 4, blocks=pool)
        few, _ = select_entries(index_q, weights, pages(key), step, 2, 4, 5, 4, 6)
        out = two_source_attention(q, layer, pages(entry), selected, real(6), 0.1)
        ended = PoolPlan(step, 4, True, 13)
        pooled = pool_windows(real(rows, 64), real(rows, 64), ended, real(5, 13, 2, 64))
        ends = ended.at_ends(whole(rows))
        everything = full_attention(q, layer, pages(entry), 4, 300, real(6), 0.1)
        layer.store()
        alone = two_source_attention(q, WindowRows(WindowPlan(step, WINDOW, RING, own=False), ring, None, window), None, None, real(6), 0.1)
    assert latent.shape == (rows, 32) and out.shape == alone.shape == everything.shape == q.shape
    assert pooled.shape == (rows // 4 + SEQUENCES, 32) and ends.shape == pooled.shape[:1]
    assert pool is not None and pool.shape == (rows, 75) and again.shape == few.shape == (rows, 5)


@pytest.mark.parametrize("rows", [3, 40])
def test_the_rest_of_a_layer(rows: int, guard: None) -> None:
    head, fn, gate, bank = (
        pack_linear(real(4, 128)),
        pack_linear(real(24, 128)),
        pack_linear(real(8, 32)),
        pack_experts(real(8, 32, 32), real(8, 32, 16)),
    )
    many = pack_experts(real(40, 32, 32), real(40, 32, 16))
    with forbid_device_sync():
        x = real(rows, 4, 32, dtype=torch.bfloat16)
        pre, post, comb = mix_coefficients(x, fn, real(24), real(3), 1e-20, 20, 1e-6)
        u = collapse(x, pre, torch.float32)
        last = head_coefficients(x, head, real(4), real(1), 1e-20, 1e-6)
        ids, weights = route(u, gate, real(8), 2, True, 1.5)
        y = expert_mlp(u, ids, weights, bank, 10.0, physical=[7, 6, 5, 4, 3, 2, 1, 0], form=None)
        y += bank(u, *softmax_top_k(real(rows, 8), 2))
        y += expert_mlp(u, ids, weights, many, physical=list(range(40)))
        grown = engram_gate(expand(y, x, post, comb), real(rows, 160), real(4, 32), real(4, 32), 1e-20, whole(rows, dtype=torch.bool))
    assert grown.shape == x.shape and last.shape == pre.shape


def test_saving_replicas(guard: None) -> None:
    live, kept = (torch.zeros(5, RING, 4, dtype=torch.uint8, device="cuda") for _ in range(2))
    with forbid_device_sync():
        lengths = whole(SEQUENCES, dtype=torch.int32)
        save_replica([ReplicaRing(live, kept, WINDOW)], whole(SEQUENCES), lengths, lengths + 3, 16, 6)


def test_a_value_that_is_read_is_found(guard: None) -> None:
    """Negative control."""
    with pytest.raises((HiddenSyncError, RuntimeError)), forbid_device_sync():
        real(3).sum().item()
    with pytest.raises((HiddenSyncError, RuntimeError)), forbid_device_sync():
        real(3)[whole(3, dtype=torch.bool)]
