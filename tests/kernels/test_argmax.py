"""Argmax: the same index as torch's whatever the row holds, the type, the width and the number of rows."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from deepinfer.kernels.argmax import argmax
from deepinfer.kernels.argmax.cuda import FEW_ROWS, NOTHING, programs, programs_for
from deepinfer.kernels.argmax.operator import Argmax
from deepinfer.kernels.toolchain import KernelStore
from deepinfer.kernels.toolchain.shapes import QWEN3_8B
from kernels_kit import FORMS, as_stored, device_of, kernels_on

MOST = 300
DTYPES = ["bfloat16", "float16", "float32"]
INF, NAN = float("inf"), float("nan")

Form = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


@cache
def made(form: str, vocab: int, dtype: str) -> Form:
    """Index and value of rows in one form of the operator."""
    if form == "reference":
        return lambda x: (argmax(x), x.float().max(-1).values)
    device = device_of(form)
    operator = Argmax(vocab, MOST, *kernels_on(form, programs(vocab, dtype)), device)

    def run(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        index = torch.full((len(x),), -7, dtype=torch.int32, device=device)
        value = torch.full((len(x),), -7.0, device=device)
        operator(as_stored(x, form), index, value)
        assert (operator._keys == NOTHING).all() and (operator._arrived == 0).all()
        return index.cpu(), value.cpu()

    return run


def hard_rows(vocab: int, dtype: str, seed: int = 0) -> torch.Tensor:
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
    return torch.stack(rows).to(getattr(torch, dtype))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [1, 1000, 8193])
def test_hard_rows(form: str, vocab: int, dtype: str) -> None:
    x = hard_rows(vocab, dtype)
    index, value = made(form, vocab, dtype)(x)
    assert index.dtype == torch.int32
    wanted = torch.argmax(x.float(), -1)
    assert index.tolist() == wanted.tolist()
    assert index.tolist() == torch.argmax(x, -1).tolist(), "widening keeps the order"
    torch.testing.assert_close(value, x.float().gather(1, wanted[:, None])[:, 0], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("form", FORMS[1:])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_do_not_depend_on_the_batch(form: str, dtype: str) -> None:
    vocab = 9001
    g = torch.Generator().manual_seed(3)
    x = (torch.randn(MOST, vocab, generator=g) * 2).to(getattr(torch, dtype))
    run = made(form, vocab, dtype)
    index, value = run(x)
    assert index.tolist() == torch.argmax(x.float(), -1).tolist()
    for rows in (1, 2, FEW_ROWS, FEW_ROWS + 1, 64, 256):
        for first in {0, MOST - rows}:
            some, of = run(x[first : first + rows].contiguous())
            assert torch.equal(some, index[first : first + rows]) and torch.equal(of, value[first : first + rows])
    assert run(x[:0])[0].tolist() == []


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", [2, 31, 4096, 12345, 49152, 128256, 151936, 50257])
@pytest.mark.parametrize("dtype", DTYPES)
def test_whole_vocabularies_on_a_gpu(vocab: int, dtype: str) -> None:
    g = torch.Generator().manual_seed(vocab)
    x = (torch.randn(256, vocab, generator=g) * 3).to(getattr(torch, dtype))
    x[7] = -INF
    x[8] = 0
    x[9, 5] = x[9, -1] = INF
    run = made("gpu", vocab, dtype)
    for rows in (1, 64, 256):
        assert run(x[:rows])[0].tolist() == torch.argmax(x[:rows].float(), -1).tolist()


@pytest.mark.gpu
def test_replays_in_a_graph_with_other_logits() -> None:
    device, vocab, rows = torch.device("cuda"), 49152, 64
    operator = Argmax(vocab, rows, *kernels_on("gpu", programs(vocab, "bfloat16")), device)
    x = torch.randn(rows, vocab, device=device, dtype=torch.bfloat16)
    index = torch.zeros(rows, dtype=torch.int32, device=device)
    value = torch.zeros(rows, device=device)
    operator(x, index, value)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        operator(x, index, value)
    for _ in range(20):
        x.copy_(torch.randn(rows, vocab, device=device).mul_(2))
        graph.replay()
        assert torch.equal(index, torch.argmax(x.float(), -1).int())


def test_compiles_without_spills(tmp_path: Path) -> None:
    pytest.importorskip("tilelang", reason="TileLang is not installed")
    for program, kernel in KernelStore(tmp_path).get_all(programs_for(QWEN3_8B)).items():
        assert not isinstance(kernel, Exception), f"{program.name}: {kernel}"
        assert kernel.resources.registers <= 128, "several blocks fit on a multiprocessor"
