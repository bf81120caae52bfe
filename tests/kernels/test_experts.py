"""Routing and experts against plain loops, ties, biases and clamps, placement, and bits under every batch."""

from __future__ import annotations

import math

import pytest
import torch

from deepinfer.kernels.activations import sigmoid, silu, softplus
from deepinfer.kernels.block_formats import FP8_ROWS, fake_quantise
from deepinfer.kernels.experts import expert_mlp, gated_mlp, pack_experts, route
from deepinfer.kernels.linear import pack_linear
from invariance_kit import depends_on_batch

HIDDEN, INNER, EXPERTS = 64, 32, 8


def random_rows(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def weights(dtype: torch.dtype, device: str, experts: int = EXPERTS) -> tuple[torch.Tensor, torch.Tensor]:
    return (
        (random_rows(experts, 2 * INNER, HIDDEN, seed=1) * 0.3).to(device=device, dtype=dtype),
        (random_rows(experts, HIDDEN, INNER, seed=2) * 0.3).to(device=device, dtype=dtype),
    )


@pytest.mark.parametrize("function", [sigmoid, silu, softplus])
def test_activations_give_a_number_the_same_bits_wherever_it_stands(function: object, device: str) -> None:
    assert callable(function)
    x = random_rows(40000) * 20
    x[:6] = torch.tensor([0.0, -0.0, 300.0, -300.0, 20.0, 20.001])
    x = x.to(device)
    whole = function(x)
    exact = {sigmoid: torch.sigmoid, silu: torch.nn.functional.silu, softplus: torch.nn.functional.softplus}[function](x.double())
    torch.testing.assert_close(whole.double(), exact, rtol=1e-6, atol=1e-30 if function is not softplus else 1e-7)
    for start, count in ((0, 1), (1, 2), (3, 5), (7, 31), (0, 33), (5, 1000), (123, 33000)):
        assert torch.equal(function(x[start : start + count].clone()), whole[start : start + count])


@pytest.mark.parametrize("scoring", ["sqrtsoftplus", "softmax"])
@pytest.mark.parametrize("normalise", [True, False])
def test_routing_equals_a_plain_loop(scoring: str, normalise: bool, device: str) -> None:
    u, gate, bias = random_rows(20, HIDDEN), random_rows(EXPERTS, HIDDEN, seed=1) * 0.5, random_rows(20, EXPERTS, seed=2)
    u[3] = 0  # all logits equal: the bias alone decides
    bias[4] = 0
    u[4] = 0  # all equal: the lowest experts
    assert scoring in ("sqrtsoftplus", "softmax")
    ids, found = route(u.to(device), pack_linear(gate.to(device)), bias.to(device), 3, normalise, 1.5, 0.7, scoring)  # type: ignore[arg-type]
    for row in range(20):
        logits = [sum(a * b for a, b in zip(u[row].double().tolist(), g, strict=True)) / 0.7 for g in gate.double().tolist()]
        scores = [math.sqrt(math.log1p(math.exp(v))) for v in logits]
        if scoring == "softmax":
            scores = [math.exp(v) / sum(math.exp(o) for o in logits) for v in logits]
        biased = [s + b for s, b in zip(scores, bias[row].tolist(), strict=True)]
        best = sorted(sorted(range(EXPERTS), key=lambda e: (-biased[e], e))[:3])
        assert ids[row].tolist() == best
        total = sum(scores[e] for e in best) if normalise else 1.0
        assert found[row].tolist() == pytest.approx([scores[e] / total * 1.5 for e in best], rel=1e-5)
    assert ids[4].tolist() == [0, 1, 2]


def test_fixed_experts_are_weighed_by_their_scores(device: str) -> None:
    u, gate = random_rows(9, HIDDEN).to(device), pack_linear(random_rows(EXPERTS, HIDDEN, seed=1).to(device))
    ids, weighed = route(u, gate, None, 3, True, 2.0)
    again, same = route(u, gate, None, 3, True, 2.0, ids=ids.flip(1))
    assert torch.equal(ids, again) and torch.equal(weighed, same)
    torch.testing.assert_close(weighed.sum(1), torch.full((9,), 2.0, device=device))


def plain_expert(u: list[float], w13: torch.Tensor, w2: torch.Tensor, limit: float, weight: float) -> torch.Tensor:
    inner = []
    for channel in range(INNER):
        gate = sum(a * b for a, b in zip(w13[channel].tolist(), u, strict=True))
        up = sum(a * b for a, b in zip(w13[INNER + channel].tolist(), u, strict=True))
        if limit:
            gate, up = min(gate, limit), max(min(up, limit), -limit)
        inner.append(gate / (1 + math.exp(-gate)) * up * weight)
    return w2 @ torch.tensor(inner, dtype=torch.float64)


@pytest.mark.parametrize("limit", [0.0, 1.5])
def test_experts_equal_a_plain_loop(limit: float, device: str) -> None:
    w13, w2 = weights(torch.float32, device)
    bank = pack_experts(w13, w2)
    u, ids = random_rows(5, HIDDEN).to(device), torch.tensor([[0, 3], [6, 7], [1, 2], [0, 7], [4, 5]], device=device)
    given = torch.rand(5, 2, generator=torch.Generator().manual_seed(3)).to(device)
    for weight_first in (True, False):
        found = expert_mlp(u, ids, given, bank, limit, weight_first=weight_first)
        for row in range(5):
            exact = sum(
                plain_expert(u[row].double().tolist(), w13[e].double().cpu(), w2[e].double().cpu(), limit, w)
                for e, w in zip(ids[row].tolist(), given[row].tolist(), strict=True)
            )
            torch.testing.assert_close(found[row].double().cpu(), exact, rtol=1e-4, atol=1e-4)
    # w2 as the identity shows whether the clamp bites and the inner row is rounded
    eye = pack_linear(torch.eye(INNER, device=device))
    inner = gated_mlp(u * 100, pack_linear(w13[0]), eye, limit)
    assert bool(inner.abs().max() > 100) == (limit == 0)
    assert torch.equal(
        gated_mlp(u, pack_linear(w13[0]), eye, limit, form=FP8_ROWS), fake_quantise(gated_mlp(u, pack_linear(w13[0]), eye, limit), FP8_ROWS)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_do_not_depend_on_the_batch_and_bits_not_on_the_placement(dtype: torch.dtype, device: str) -> None:
    w13, w2 = weights(dtype, device)
    bank, gate, bias = (
        pack_experts(w13, w2),
        pack_linear(random_rows(EXPERTS, HIDDEN, seed=4).to(device)),
        random_rows(EXPERTS, seed=5).to(device),
    )
    u = random_rows(160, HIDDEN).to(device=device, dtype=dtype)

    def whole(rows: torch.Tensor) -> torch.Tensor:
        ids, weight = route(rows, gate, bias, 3, True, 1.5)
        return torch.cat((ids.float(), weight, expert_mlp(rows, ids, weight, bank, 10.0)), 1)

    assert depends_on_batch(whole, u) == []
    ids, weight = route(u, gate, bias, 3, True, 1.5)
    places = [5, 0, 7, 1, 2, 6, 4, 3]
    order = torch.tensor(places, device=device).argsort()
    moved = pack_experts(w13[order], w2[order])
    assert torch.equal(expert_mlp(u, ids, weight, moved, 10.0, physical=places), expert_mlp(u, ids, weight, bank, 10.0))
    with pytest.raises(ValueError, match="experts are placed at 0 … 8, but the bank has 8 places"):
        expert_mlp(u, ids, weight, bank, physical=[0, 8])


def test_an_expert_nobody_asked_for_adds_nothing(device: str) -> None:
    """Not even its infinities."""
    w13, w2 = weights(torch.float32, device)
    broken = w2.clone()
    broken[2] = torch.nan
    u, ids = random_rows(6, HIDDEN).to(device), torch.tensor([[0, 1]] * 6, device=device)
    weight = torch.ones(6, 2, device=device)
    assert torch.equal(expert_mlp(u, ids, weight, pack_experts(w13, broken)), expert_mlp(u, ids, weight, pack_experts(w13, w2)))
