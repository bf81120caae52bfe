"""Sigmoid, SiLU and softplus: right values, with bits that do not depend on where a number stands."""

from __future__ import annotations

import pytest
import torch

from deepinfer.kernels.activations import sigmoid, silu, softplus


@pytest.mark.parametrize("function", [sigmoid, silu, softplus])
def test_activations_give_a_number_the_same_bits_wherever_it_stands(function: object, device: str) -> None:
    assert callable(function)
    x = torch.randn(40000, generator=torch.Generator().manual_seed(0)) * 20
    x[:6] = torch.tensor([0.0, -0.0, 300.0, -300.0, 20.0, 20.001])
    x = x.to(device)
    whole = function(x)
    exact = {sigmoid: torch.sigmoid, silu: torch.nn.functional.silu, softplus: torch.nn.functional.softplus}[function](x.double())
    torch.testing.assert_close(whole.double(), exact, rtol=1e-6, atol=1e-30 if function is not softplus else 1e-7)
    for start, count in ((0, 1), (1, 2), (3, 5), (7, 31), (0, 33), (5, 1000), (123, 33000)):
        assert torch.equal(function(x[start : start + count].clone()), whole[start : start + count])
