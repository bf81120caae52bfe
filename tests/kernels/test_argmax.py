"""Argmax: the same index as torch's whatever the row holds, the type, the width and the number of rows."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from deepinfer.kernels.argmax import argmax
from deepinfer.kernels.argmax.cuda import FEW_ROWS, NOTHING, Argmax, programs_for
from deepinfer.kernels.toolchain import Program
from deepinfer.kernels.toolchain.driver import Launchable
from deepinfer.kernels.toolchain.shapes import QWEN3_8B
from kernel_kit import (
    KERNEL_PLACES,
    PLACES,
    check_machine_code,
    device_of,
    kept_as,
    kernels_at,
    narrowest_access,
    read_before_waiting,
    replayed,
)

MOST = 300
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
INF, NAN = float("inf"), float("nan")

Form = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


@cache
def made(place: str, vocab: int, dtype: torch.dtype) -> Form:
    """Index and value of rows in one place."""
    if place == "reference":
        return lambda x: (argmax(x), x.float().max(-1).values)
    device = device_of(place)
    kernels = kernels_at(place, Argmax.programs(vocab, str(dtype).removeprefix("torch.")))
    operator = Argmax(vocab, dtype, MOST, device, kernels=kernels)

    def run(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        index = torch.full((len(x),), -7, dtype=torch.int32, device=device)
        value = torch.full((len(x),), -7.0, device=device)
        operator(x.to(device, kept_as(place, dtype)).contiguous(), index, value)
        assert (operator._keys == NOTHING).all() and (operator._arrived == 0).all()
        return index.cpu(), value.cpu()

    return run


def hard_rows(vocab: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Rows with few values, many ties, both zeros, infinities and NaN of both signs."""
    g = torch.Generator().manual_seed(seed)
    some = torch.tensor([0.0, -0.0, 1.0, -1.0, INF, -INF, NAN, -NAN, 1e-30, -1e-30, 65504.0, 6e-8, -6e-8])
    rows = [torch.full((vocab,), v) for v in some.tolist()]
    rows += [some[torch.randint(0, n, (vocab,), generator=g)] for n in (2, 3, 4, 5, 6, 7, 8, 13)]
    rows += [torch.randn(vocab, generator=g).mul(s).round() for s in (0.3, 3.0, 30.0)]
    rows += [-torch.randn(vocab, generator=g).abs() * 10, torch.randn(vocab, generator=g) * 1e-3]
    for at in (0, vocab // 2, vocab - 1):
        for value in (5.0, INF, NAN, -NAN):
            row = torch.randn(vocab, generator=g)
            row[at] = value
            rows.append(row)
        row = torch.full((vocab,), -INF)
        row[at] = -65504.0
        rows.append(row)
    return torch.stack(rows).to(dtype)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [1, 1000, 8193])
def test_hard_rows(place: str, vocab: int, dtype: torch.dtype) -> None:
    x = hard_rows(vocab, dtype)
    index, value = made(place, vocab, dtype)(x)
    assert index.dtype == torch.int32
    wanted = torch.argmax(x.float(), -1)
    assert index.tolist() == wanted.tolist()
    assert index.tolist() == torch.argmax(x, -1).tolist(), "widening keeps the order"
    torch.testing.assert_close(value, x.float().gather(1, wanted[:, None])[:, 0], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("place", KERNEL_PLACES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_do_not_depend_on_the_batch(place: str, dtype: torch.dtype) -> None:
    vocab = 9001
    g = torch.Generator().manual_seed(3)
    x = (torch.randn(MOST, vocab, generator=g) * 2).to(dtype)
    run = made(place, vocab, dtype)
    index, value = run(x)
    assert index.tolist() == torch.argmax(x.float(), -1).tolist()
    for rows in (1, 2, FEW_ROWS, FEW_ROWS + 1, 64, 256):
        for first in {0, MOST - rows}:
            some, of = run(x[first : first + rows].contiguous())
            assert torch.equal(some, index[first : first + rows]) and torch.equal(of, value[first : first + rows])
    assert run(x[:0])[0].tolist() == []


class Whole:
    """A kernel that is given rows as it reads them, from a multiple of 16 bytes on."""

    def __init__(self, kernel: Launchable) -> None:
        self._kernel = kernel

    def launch(self, grid: tuple[int, ...], x: torch.Tensor, *args: torch.Tensor | int) -> None:
        assert x.data_ptr() % 16 == 0
        self._kernel.launch(grid, x, *args)


@pytest.mark.parametrize("place", KERNEL_PLACES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_may_begin_anywhere(place: str, dtype: torch.dtype) -> None:
    device, kept, vocab = device_of(place), kept_as(place, dtype), 4096
    kernels = kernels_at(place, Argmax.programs(vocab, str(dtype).removeprefix("torch.")))
    operator = Argmax(vocab, dtype, MOST, device, kernels=kernels)
    operator._few, operator._many = Whole(operator._few), Whole(operator._many)
    x = torch.randn(2, vocab, generator=torch.Generator().manual_seed(4)).to(dtype).to(device, kept)
    moved = torch.cat([x.new_zeros(1), x.flatten()])[1:].view(2, vocab)
    assert moved.data_ptr() % 16 and moved.is_contiguous()
    index, value = torch.zeros(2, dtype=torch.int32, device=device), torch.zeros(2, device=device)
    operator(moved, index, value)
    assert index.tolist() == x.argmax(-1).tolist() and value.tolist() == x.float().amax(-1).tolist()


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", [2, 31, 4096, 12345, 49152, 128256, 151936, 50257])
@pytest.mark.parametrize("dtype", DTYPES)
def test_whole_vocabularies_on_a_gpu(vocab: int, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(vocab)
    x = (torch.randn(256, vocab, generator=g) * 3).to(dtype)
    x[7] = -INF
    x[8] = 0
    x[9, min(5, vocab - 1)] = x[9, -1] = INF
    run = made("cuda", vocab, dtype)
    for rows in (1, 64, 256):
        assert run(x[:rows])[0].tolist() == torch.argmax(x[:rows].float(), -1).tolist()


@pytest.mark.gpu
@pytest.mark.parametrize("after", [False, True])
def test_replays_in_a_graph_with_other_logits(after: bool) -> None:
    device, vocab, rows = torch.device("cuda"), 49152, 64
    operator = Argmax(vocab, torch.bfloat16, rows, device, after)
    x = torch.randn(rows, vocab, device=device, dtype=torch.bfloat16)
    index, value = torch.zeros(rows, dtype=torch.int32, device=device), torch.zeros(rows, device=device)
    replay = replayed(lambda: operator(x, index, value))
    for _ in range(20):
        x.copy_(torch.randn(rows, vocab, device=device).mul_(2))
        replay()
        assert torch.equal(index, torch.argmax(x.float(), -1).int())


@pytest.mark.parametrize("program", programs_for(QWEN3_8B), ids=lambda p: p.name)
def test_machine_code(program: Program, tmp_path: Path) -> None:
    check_machine_code(program, tmp_path)
    assert read_before_waiting(program) == set()
    assert narrowest_access(program, "x") == 16
