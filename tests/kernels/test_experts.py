"""Routing and experts against plain loops, ties, biases and clamps, placement, and bits under every batch."""

from __future__ import annotations

import math

import pytest
import torch

from deepinfer.kernels.block_formats import FP8_ROWS, fake_quantise
from deepinfer.kernels.experts import expert_mlp, gated_mlp, pack_experts, route, softmax_top_k
from deepinfer.kernels.experts import packed as experts_module
from deepinfer.kernels.linear import pack_linear
from invariance_kit import depends_on_batch

HIDDEN, INNER, EXPERTS = 64, 32, 8


@pytest.fixture(params=["dense", "gathered"])
def form_of_experts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways experts are computed, whatever their number."""
    if request.param == "gathered":
        monkeypatch.setattr(experts_module, "DENSE_EXPERTS", 0)
    return str(request.param)


def random_rows(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def weights(dtype: torch.dtype, device: str, experts: int = EXPERTS) -> tuple[torch.Tensor, torch.Tensor]:
    return (
        (random_rows(experts, 2 * INNER, HIDDEN, seed=1) * 0.3).to(device=device, dtype=dtype),
        (random_rows(experts, HIDDEN, INNER, seed=2) * 0.3).to(device=device, dtype=dtype),
    )


@pytest.mark.parametrize("normalise", [True, False])
def test_routing_equals_a_plain_loop(normalise: bool, device: str) -> None:
    u, gate, bias = random_rows(20, HIDDEN), random_rows(EXPERTS, HIDDEN, seed=1) * 0.5, random_rows(20, EXPERTS, seed=2)
    u[3] = 0  # all logits equal: the bias alone decides
    bias[4] = 0
    u[4] = 0  # all equal: the lowest experts
    ids, found = route(u.to(device), pack_linear(gate.to(device)), bias.to(device), 3, normalise, 1.5, 0.7)
    for row in range(20):
        logits = [sum(a * b for a, b in zip(u[row].double().tolist(), g, strict=True)) / 0.7 for g in gate.double().tolist()]
        scores = [math.sqrt(math.log1p(math.exp(v))) for v in logits]
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
def test_experts_equal_a_plain_loop(limit: float, form_of_experts: str, device: str) -> None:
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
def test_rows_do_not_depend_on_the_batch_and_bits_not_on_the_placement(dtype: torch.dtype, form_of_experts: str, device: str) -> None:
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


def test_an_expert_nobody_asked_for_adds_nothing(form_of_experts: str, device: str) -> None:
    """Not even its infinities."""
    w13, w2 = weights(torch.float32, device)
    broken = w2.clone()
    broken[2] = torch.nan
    u, ids = random_rows(6, HIDDEN).to(device), torch.tensor([[0, 1]] * 6, device=device)
    weight = torch.ones(6, 2, device=device)
    assert torch.equal(expert_mlp(u, ids, weight, pack_experts(w13, broken)), expert_mlp(u, ids, weight, pack_experts(w13, w2)))


@pytest.mark.parametrize("renormalise", [True, False])
@pytest.mark.parametrize("chosen", [1, 2, 3, EXPERTS])
def test_the_likeliest_experts_share_the_row(chosen: int, renormalise: bool, device: str) -> None:
    logits = random_rows(50, EXPERTS).to(device)
    experts, shares = softmax_top_k(logits, chosen, renormalise)
    want = logits.double().softmax(-1).topk(chosen, -1)
    assert torch.equal(experts, want.indices) and experts.dtype == torch.int64 and shares.dtype == torch.float32
    exact = want.values / want.values.sum(-1, keepdim=True) if renormalise else want.values
    torch.testing.assert_close(shares.double(), exact, rtol=1e-6, atol=1e-7)


def test_of_equal_experts_the_lower_number_is_taken(device: str) -> None:
    logits = torch.tensor([[0.0, 1.0, 1.0, 1.0], [2.0, 2.0, 2.0, 2.0], [1.0, 0.0, 1.0, 0.0]], device=device)
    experts, shares = softmax_top_k(logits.bfloat16(), 2)
    assert experts.tolist() == [[1, 2], [0, 1], [0, 2]]
    assert shares.tolist() == [[0.5, 0.5]] * 3


def test_shares_do_not_depend_on_the_batch(device: str) -> None:
    counts = (1, 2, 3, 5, 8, 9, 33, 64, 129) if device == "cpu" else (32, 64, 128)  # as in a model, where rows come padded
    for chosen in (2, 5):
        op = lambda rows, k=chosen: softmax_top_k(rows, k)[1]  # noqa: E731
        assert depends_on_batch(op, random_rows(256, 8).to(device), counts) == []


def test_the_order_in_which_experts_were_chosen_does_not_matter(form_of_experts: str, device: str) -> None:
    packed = pack_experts(*weights(torch.float32, device))
    u = random_rows(20, HIDDEN).to(device)
    experts, shares = softmax_top_k(random_rows(20, EXPERTS, seed=1).to(device), 3)
    found = packed(u, experts, shares)
    assert torch.equal(found, packed(u, experts.flip(-1), shares.flip(-1)))
    assert torch.equal(found, expert_mlp(u, experts, shares, packed, weight_first=False))


@pytest.mark.parametrize(
    ("gate_up", "down", "said"),
    [
        ([], [], "must be one"),
        ([(96, 64)], [(64, 48), (64, 48)], "1 gate_up and 2 down"),
        ([(96, 64), (96, 32)], [(64, 48), (64, 48)], r"expert 1 has gate_up \[96, 32\]"),
        ([(48, 64)], [(64, 48)], r"expert 0 has gate_up \[48, 64\]"),
    ],
)
def test_weights_that_do_not_fit_are_refused(gate_up: list[tuple[int, ...]], down: list[tuple[int, ...]], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        pack_experts([torch.zeros(s) for s in gate_up], [torch.zeros(s) for s in down])


@pytest.mark.parametrize("weight_first", [True, False])
def test_many_experts_are_gathered_and_give_what_few_would(weight_first: bool, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """96 experts of which one has most rows, some have one and most have none; in tiles that do not fit at once."""
    from deepinfer.kernels.experts import gathered

    w13, w2 = weights(torch.float32, device, experts=96)
    u, given = random_rows(70, HIDDEN).to(device), torch.rand(70, 3, generator=torch.Generator().manual_seed(3)).to(device)
    ids = torch.tensor([[7, 20 + row % 5, 30 + row % 60] for row in range(70)], device=device)
    many = pack_experts(w13, w2)
    assert many.stacked is not None
    found = expert_mlp(u, ids, given, many, 10.0, form=FP8_ROWS, weight_first=weight_first)
    monkeypatch.setattr(gathered, "_bytes_at_once", lambda _device: 10 * w13[0].numel() * 4)
    assert torch.equal(found, expert_mlp(u, ids, given, many, 10.0, form=FP8_ROWS, weight_first=weight_first))
    assert torch.equal(found[69:], expert_mlp(u[69:], ids[69:], given[69:], many, 10.0, form=FP8_ROWS, weight_first=weight_first))
    monkeypatch.setattr(experts_module, "DENSE_EXPERTS", 96)
    few = expert_mlp(u, ids, given, pack_experts(w13, w2), 10.0, form=FP8_ROWS, weight_first=weight_first)
    torch.testing.assert_close(found, few, rtol=1e-2, atol=1e-2)  # a last bit may turn a rounding of the inner row
    assert float((found - few).abs().median()) < 1e-6
