"""Stream coefficients, collapse and expansion against a plain loop in float64, and their bits under every batch."""

from __future__ import annotations

import math

import pytest
import torch

from deepinfer.kernels.linear import pack_linear
from deepinfer.kernels.stream_mix import collapse, expand, head_coefficients, mix_coefficients
from invariance_kit import depends_on_batch

STREAMS, EPS, ITERATIONS, MIX_EPS = 4, 1e-20, 20, 1e-6


def parameters(width: int, device: str, size: float = 0.02, spread: float = 1.0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(width)
    columns = (2 + STREAMS) * STREAMS
    fn = torch.randn(columns, STREAMS * width, generator=g) * size
    return fn.to(device), (torch.randn(columns, generator=g) * spread).to(device), torch.tensor([0.7, 1.3, 2.0], device=device)


def plainly(
    x: torch.Tensor, fn: torch.Tensor, base: torch.Tensor, scale: torch.Tensor
) -> tuple[list[float], list[float], list[list[float]]]:
    """One row, scalar by scalar."""
    flat, s = x.flatten().double().tolist(), STREAMS
    inverse = 1 / math.sqrt(sum(v * v for v in flat) / len(flat) + EPS)
    m = [sum(a * b for a, b in zip(row, flat, strict=True)) * inverse for row in fn.double().tolist()]
    b, (s0, s1, s2) = base.double().tolist(), scale.double().tolist()

    def sigmoid(v: float) -> float:
        return 1 / (1 + math.exp(-v))

    pre = [sigmoid(m[i] * s0 + b[i]) + MIX_EPS for i in range(s)]
    post = [2 * sigmoid(m[s + i] * s1 + b[s + i]) for i in range(s)]
    comb = [[m[2 * s + j * s + k] * s2 + b[2 * s + j * s + k] for k in range(s)] for j in range(s)]
    for row in comb:
        weights = [math.exp(v - max(row)) for v in row]
        row[:] = [w / sum(weights) + MIX_EPS for w in weights]
    for number in range(ITERATIONS):
        if number:
            for row in comb:
                total = sum(row) + MIX_EPS
                row[:] = [v / total for v in row]
        for k in range(s):
            total = sum(comb[j][k] for j in range(s)) + MIX_EPS
            for j in range(s):
                comb[j][k] /= total
    return pre, post, comb


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_coefficients_equal_a_plain_loop(dtype: torch.dtype, device: str) -> None:
    fn, base, scale = parameters(32, device)
    x = torch.randn(12, STREAMS, 32, generator=torch.Generator().manual_seed(1)).to(device=device, dtype=dtype)
    x[3] *= 1e4
    x[4] *= 1e-8
    x[5] = 0  # eps is all that is left of the mean
    x[6, 1, 7] = 3e4
    pre, post, comb = mix_coefficients(x, pack_linear(fn), base, scale, EPS, ITERATIONS, MIX_EPS)
    for row in range(12):
        wanted = plainly(x[row].cpu(), fn.cpu(), base.cpu(), scale.cpu())
        for found, exact in zip((pre, post, comb), wanted, strict=True):
            torch.testing.assert_close(found[row].double().cpu(), torch.tensor(exact, dtype=torch.float64), rtol=2e-5, atol=2e-6)
    torch.testing.assert_close(comb.sum(1), torch.ones_like(pre), rtol=0, atol=1e-5)  # columns; rows need not


def test_sharp_coefficients_stay_finite(device: str) -> None:
    """Scores far apart leave columns of almost nothing: the eps in every division keeps them from dividing by zero."""
    fn, base, scale = parameters(32, device, size=3.0, spread=50.0)
    x = torch.randn(64, STREAMS, 32, generator=torch.Generator().manual_seed(1)).to(device)
    for found in mix_coefficients(x, pack_linear(fn), base, scale, EPS, ITERATIONS, MIX_EPS):
        assert found.isfinite().all() and (found >= 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_collapse_and_expand(dtype: torch.dtype, device: str) -> None:
    g = torch.Generator().manual_seed(2)
    x = torch.randn(9, STREAMS, 48, generator=g).to(device=device, dtype=dtype)
    y = torch.randn(9, 48, generator=g).to(device=device, dtype=dtype)
    pre, post, comb = (torch.rand(9, *shape, generator=g).to(device) for shape in ((4,), (4,), (4, 4)))
    tolerance = 1e-6 if dtype == torch.float32 else 1e-2
    wide = x.double()
    exact = sum(pre[:, i, None].double() * wide[:, i] for i in range(4))
    torch.testing.assert_close(collapse(x, pre, dtype).double(), exact, rtol=tolerance, atol=tolerance)
    grown = expand(y, x, post, comb)
    assert grown.dtype == dtype
    for k in range(4):
        exact = post[:, k, None].double() * y.double() + sum(comb[:, j, k, None].double() * wide[:, j] for j in range(4))
        torch.testing.assert_close(grown[:, k].double(), exact, rtol=tolerance, atol=tolerance)


def test_a_one_hot_mix_passes_its_stream_through(device: str) -> None:
    x = torch.randn(5, STREAMS, 16, generator=torch.Generator().manual_seed(3)).to(device=device, dtype=torch.bfloat16)
    first = torch.zeros(5, STREAMS, device=device)
    first[:, 0] = 1
    assert torch.equal(collapse(x, first, torch.bfloat16), x[:, 0])
    same = torch.eye(STREAMS, device=device).expand(5, -1, -1)
    assert torch.equal(expand(x[:, 0], x, torch.zeros(5, STREAMS, device=device), same), x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [32, 320])
def test_rows_do_not_depend_on_the_batch(width: int, dtype: torch.dtype, device: str) -> None:
    fn, base, scale = parameters(width, device)
    packed = pack_linear(fn)
    x = torch.randn(160, STREAMS, width, generator=torch.Generator().manual_seed(4)).to(device=device, dtype=dtype)

    def whole(rows: torch.Tensor) -> torch.Tensor:
        pre, post, comb = mix_coefficients(rows, packed, base, scale, EPS, ITERATIONS, MIX_EPS)
        grown = expand(collapse(rows, pre, dtype), rows, post, comb)
        return torch.cat((pre, post, comb.flatten(1), grown.flatten(1).float()), 1)

    # rows come padded on the way through a model: that is part of how a GPU keeps the bits of a mean
    counts = (1, 2, 3, 7, 8, 31, 64, 129) if device == "cpu" else (32, 64, 128)
    assert depends_on_batch(whole, x, counts) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_head_coefficients_equal_a_plain_loop(dtype: torch.dtype, device: str) -> None:
    fn, base, _ = parameters(32, device)
    x = torch.randn(64, STREAMS, 32, generator=torch.Generator().manual_seed(1)).to(device=device, dtype=dtype)
    x[3] *= 1e4
    head, scale = pack_linear(fn[:STREAMS].contiguous()), torch.tensor([0.7], device=device)
    pre = head_coefficients(x, head, base[:STREAMS], scale, EPS, MIX_EPS)
    full_scale = torch.tensor([0.7, 1.0, 1.0])
    for row in range(6):
        exact, _, _ = plainly(x[row], fn.cpu(), base.cpu(), full_scale)
        torch.testing.assert_close(pre[row].double().cpu(), torch.tensor(exact, dtype=torch.float64), rtol=1e-5, atol=1e-6)
    counts = (1, 2, 3, 7, 8, 31) if device == "cpu" else (32,)
    assert depends_on_batch(lambda rows: head_coefficients(rows, head, base[:STREAMS], scale, EPS, MIX_EPS), x, counts) == []
