"""Blocks that share a row: answers do not tell how many they are, and bad data does not part them."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from deepinfer.kernels.sample.cuda import ROW_BLOCKS, Draws, Logprobs
from deepinfer.kernels.toolchain import KernelStore, Program, shape_config
from deepinfer.kernels.toolchain.driver import Launchable
from deepinfer.kernels.toolchain.loading import require
from deepinfer.kernels.toolchain.program import constants_of
from deepinfer.sampling import SamplingParams
from deepinfer.worker.device_sampler import DeviceSampler
from deepinfer.worker.logprobs import gather_logprobs
from kernel_kit import KERNEL_PLACES, device_of, kernels_at, lowered, need_tilelang, random_rows
from sampling_kit import INF, NAN, Batch, batch, device_sampler, hard_logits, random_params

VOCAB, ROWS = 5003, 26
F32 = torch.float32


class _OfBlocks:
    """A kernel for another number of blocks a row than its operator launches."""

    def __init__(self, kernel: Launchable, blocks: int) -> None:
        self._kernel, self._blocks = kernel, blocks

    def launch(self, grid: tuple[int, ...], *args: torch.Tensor | int | float) -> None:
        self._kernel.launch((grid[0] // ROW_BLOCKS * self._blocks,), *args)


def _of_blocks(place: str, program: Program, blocks: int) -> Launchable:
    """The kernel of few rows with ``blocks`` of a row."""
    other = replace(program, constants=shape_config(**{**constants_of(program), "blocks": blocks}))
    kernels = kernels_at(place, [other]) or require([other], device_of(place), after=True)
    return _OfBlocks(kernels[0], blocks)


def _batch(place: str) -> Batch:
    rng = random.Random(3)
    params = [random_params(rng, VOCAB, edits=False) for _ in range(ROWS)]
    return batch(device_of(place), hard_logits(ROWS, VOCAB, 5), params, 3)


@pytest.mark.parametrize("place", KERNEL_PLACES)
@pytest.mark.parametrize("blocks", [2, 4])
def test_any_number_of_blocks_draws_the_same(place: str, blocks: int) -> None:
    need_tilelang()
    device, b = device_of(place), _batch(place)
    by = device_sampler(place, VOCAB, {F32: F32}, ROWS, few_rows=0)
    wanted = b.drawn(by)
    assert wanted == b.drawn(None)
    plain, few, many = Draws.programs(VOCAB, "float32")
    kernels = kernels_at(place, [plain, many]) or require([plain, many], device, after=True)
    draws = Draws(VOCAB, F32, ROWS, device, kernels=[kernels[0], _of_blocks(place, few, blocks), kernels[1]], few_rows=ROWS)
    argmax, edits = by._by_dtype[F32].argmax, by._edits
    few, many = Logprobs.programs(VOCAB)
    shared = Logprobs(VOCAB, device, kernels=[_of_blocks(place, few, blocks)] * 2, few_rows=ROWS)
    assert b.drawn(DeviceSampler(edits, {F32: (argmax, draws)}, shared)) == wanted
    tokens = torch.arange(ROWS, device=device)
    for count in (0, 20, 1024):
        alone, together = (gather_logprobs(b.logits, tokens, count, kernel) for kernel in (by.logprobs, shared))
        assert torch.equal(alone.ids, together.ids) and torch.equal(alone.rank, together.rank)
        assert torch.equal(alone.values.view(torch.int32), together.values.view(torch.int32))


@pytest.mark.parametrize("place", KERNEL_PLACES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("offset", [1, 3])
def test_rows_that_begin_anywhere(place: str, dtype: str, offset: int) -> None:
    """Logits whose rows are not at multiples of 16 bytes."""
    vocab = 4096
    kept = getattr(torch, dtype) if place == "cuda" else F32
    x = random_rows(9, vocab, place=place).to(kept)
    flat = torch.cat([x.new_zeros(offset), x.flatten()])
    moved = flat[offset:].view(9, vocab)
    assert moved.data_ptr() % 16 and moved.is_contiguous()
    params = [SamplingParams(max_tokens=9, temperature=1.0, top_k=300, top_p=0.9)] * 9
    b = batch(device_of(place), x, params)
    for few_rows in (0, 9):
        by = device_sampler(place, vocab, {kept: getattr(torch, dtype)}, 9, few_rows)
        wanted = by.draw(x, b.rows, None, b.state).tolist()
        assert wanted == b.drawn(None) if kept == F32 else len(set(wanted)) > 1
        assert by.draw(moved, b.rows, None, b.state).tolist() == wanted


@pytest.mark.parametrize("place", KERNEL_PLACES)
def test_bad_data_does_not_part_blocks(place: str) -> None:
    """Logits that are no numbers under a finite maximum, which no step has: a launch ends, and rows beside them are as ever. On the CPU
    target blocks that part end the process."""
    b = _batch(place)
    device = b.logits.device
    assert b.rows.ranked is not None
    which = b.rows.ranked[:8]
    few = device_sampler(place, VOCAB, {F32: F32}, ROWS, few_rows=ROWS)
    draws = few._by_dtype[F32].draws
    largest = torch.where(b.logits.max(-1).values.isfinite(), b.logits.max(-1).values, 1.0)
    good = torch.zeros(ROWS, dtype=torch.int32, device=device)
    draws.ranked(b.logits, which, b.rows.slots, b.state.table, b.rows.positions, largest, good)
    for bad in (NAN, INF, -INF):
        logits, tokens = b.logits.clone(), torch.zeros_like(good)
        logits[which[::2], 1::3] = bad
        logits[which[0]] = bad
        draws.ranked(logits, which, b.rows.slots, b.state.table, b.rows.positions, largest, tokens)
        assert torch.equal(tokens[which[1::2]], good[which[1::2]])
        assert bool(((tokens >= 0) & (tokens < VOCAB)).all())
        found = gather_logprobs(logits, tokens.long(), 20, few.logprobs)
        assert torch.equal(found.ids[which[1::2]], gather_logprobs(b.logits, tokens.long(), 20, few.logprobs).ids[which[1::2]])


def test_a_row_is_read_once_where_it_fits() -> None:
    """Room for a block's share of 16-bit and of float32 logits, for none of a very large vocabulary."""
    for vocab, dtype, room in (
        (128256, "bfloat16", 32064),
        (128256, "float32", 64128),
        (50257, "bfloat16", 12576),
        (400_000, "float32", 4),
    ):
        found = lowered(Draws.programs(vocab, dtype)[1])
        assert (found.shared, found.cluster) == (room, ROW_BLOCKS)
    assert all(lowered(p).shared <= 4 for p in (Draws.programs(128256, "float32")[2], Logprobs.programs(128256)[1]))


def test_few_rows_are_stored_as_a_cluster(tmp_path: Path) -> None:
    need_tilelang()
    pytest.importorskip("cuda.bindings", reason="kernels are compiled by NVRTC: pip install 'deepinfer[cuda]'")
    built = KernelStore(tmp_path).build(Draws.programs(128256, "float32")[1])
    assert built.cluster == ROW_BLOCKS and built.shared_bytes <= (227 << 10) // 2, "two blocks at a time on a multiprocessor"
