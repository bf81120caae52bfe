"""Engram's gate against a plain loop in float64: signs, the least dot, dead rows, and bits under every batch."""

from __future__ import annotations

import math

import pytest
import torch

from deepinfer.kernels.engram_gate import engram_gate
from invariance_kit import depends_on_batch

STREAMS, EPS = 4, 1e-20


def random_rows(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gate_equals_a_plain_loop(dtype: torch.dtype, device: str) -> None:
    width = 48
    x, kv = random_rows(10, STREAMS, width).to(dtype), random_rows(10, (STREAMS + 1) * width, seed=1).to(dtype)
    qw, kw = random_rows(STREAMS, width, seed=2), random_rows(STREAMS, width, seed=3)
    x[1] = 0  # the dot is +0 and the gate sigmoid(0.001)
    kv[2, : STREAMS * width] = 0
    x[3] *= 1e4
    x[4] *= 1e-9
    x[5, 0, 0] = 2e4
    dead = torch.tensor([row == 6 for row in range(10)])
    kv[6] = torch.nan
    out = engram_gate(x.to(device), kv.to(device), qw.to(device), kw.to(device), EPS, dead.to(device)).cpu()
    assert out.dtype == dtype and torch.equal(out[6], x[6])
    for row in range(10):
        if row == 6:
            continue
        for stream in range(STREAMS):
            a, key = x[row, stream].double(), kv[row, stream * width : (stream + 1) * width].double()
            dot = float((a * qw[stream] * kw[stream] * key).sum())
            dot *= (float(a.square().mean()) + EPS) ** -0.5 * (float(key.square().mean()) + EPS) ** -0.5 * width**-0.5
            gate = 1 / (1 + math.exp(-math.copysign(math.sqrt(max(abs(dot), 1e-6)), dot)))
            exact = a + gate * kv[row, STREAMS * width :].double()
            tolerance = 1e-5 if dtype == torch.float32 else 1e-2
            torch.testing.assert_close(out[row, stream].double(), exact, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [32, 300])
def test_rows_do_not_depend_on_the_batch(width: int, dtype: torch.dtype, device: str) -> None:
    qw, kw = random_rows(STREAMS, width, seed=2).to(device), random_rows(STREAMS, width, seed=3).to(device)
    both = random_rows(160, (2 * STREAMS + 1) * width).to(device=device, dtype=dtype)

    def op(rows: torch.Tensor) -> torch.Tensor:
        x, kv = rows.split([STREAMS * width, (STREAMS + 1) * width], 1)
        return engram_gate(x.unflatten(1, (STREAMS, width)), kv, qw, kw, EPS)

    # rows come padded on the way through a model: that is part of how a GPU keeps the bits of a mean
    assert depends_on_batch(op, both, (1, 2, 3, 7, 8, 31, 64, 129) if device == "cpu" else (32, 64, 128)) == []
