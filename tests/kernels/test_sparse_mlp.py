"""Sparse feed-forward block: the experts chosen, what they make, and bits that do not depend on the batch."""

from __future__ import annotations

import pytest
import torch

from deepinfer.kernels.sparse_mlp import PackedExperts, pack_experts, softmax_top_k
from invariance_kit import depends_on_batch

HIDDEN, WIDTH, EXPERTS, CHOSEN = 64, 48, 6, 2


def random(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device=device, dtype=dtype)


def weights(dtype: torch.dtype, device: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    gate_up = [random(2 * WIDTH, HIDDEN, dtype=dtype, device=device, seed=10 + e) * HIDDEN**-0.5 for e in range(EXPERTS)]
    return gate_up, [random(HIDDEN, WIDTH, dtype=dtype, device=device, seed=20 + e) * WIDTH**-0.5 for e in range(EXPERTS)]


@pytest.mark.parametrize("renormalise", [True, False])
@pytest.mark.parametrize("chosen", [1, 2, 3, EXPERTS])
def test_the_likeliest_experts_share_the_row(chosen: int, renormalise: bool, device: str) -> None:
    logits = random(50, EXPERTS, device=device)
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_equal_a_plain_sum(dtype: torch.dtype, device: str) -> None:
    gate_up, down = weights(dtype, device)
    x = random(40, HIDDEN, dtype=dtype, device=device, seed=2)
    experts, shares = softmax_top_k(random(40, EXPERTS, device=device, seed=3), CHOSEN)
    found = pack_experts(gate_up, down)(x, experts, shares)
    want = torch.zeros(40, HIDDEN, dtype=torch.float64)
    for row in range(40):
        for place in range(CHOSEN):
            expert = int(experts[row, place])
            gate, up = (gate_up[expert].double() @ x[row].double()).cpu().split(WIDTH)
            made = down[expert].double().cpu() @ (gate * torch.sigmoid(gate) * up)
            want[row] += shares[row, place].double().cpu() * made
    assert found.dtype == torch.float32
    # bfloat16 rounds after the first product, after the activation and after the second: a few of its 2^-9 steps of values near 1
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(found.double().cpu(), want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_does_not_depend_on_the_batch(dtype: torch.dtype, device: str) -> None:
    packed = pack_experts(*weights(dtype, device))
    router = random(EXPERTS, HIDDEN, dtype=torch.float64, device=device, seed=4)

    def block(rows: torch.Tensor) -> torch.Tensor:
        logits = (rows.double()[:, None] * router).sum(-1)  # per row by construction
        return packed(rows, *softmax_top_k(logits, CHOSEN))

    assert depends_on_batch(block, random(256, HIDDEN, dtype=dtype, device=device, seed=5)) == []


def test_shares_do_not_depend_on_the_batch(device: str) -> None:
    counts = (1, 2, 3, 5, 8, 9, 33, 64, 129) if device == "cpu" else (32, 64, 128)  # as in a model, where rows come padded
    for chosen in (2, 5):
        op = lambda rows, k=chosen: softmax_top_k(rows, k)[1]  # noqa: E731
        assert depends_on_batch(op, random(256, 8, device=device), counts) == []


def test_the_order_in_which_experts_were_chosen_does_not_matter(device: str) -> None:
    packed = pack_experts(*weights(torch.float32, device))
    x = random(20, HIDDEN, device=device)
    experts, shares = softmax_top_k(random(20, EXPERTS, device=device, seed=1), 3)
    assert torch.equal(packed(x, experts, shares), packed(x, experts.flip(-1), shares.flip(-1)))


def test_an_expert_that_overflows_spoils_only_the_rows_that_chose_it(device: str) -> None:
    gate_up, down = weights(torch.float32, device)
    sane = pack_experts(gate_up, down)
    mad = pack_experts(gate_up, [*down[:-1], torch.full_like(down[-1], float("inf"))])
    x = random(30, HIDDEN, device=device)
    experts, shares = softmax_top_k(random(30, EXPERTS, device=device, seed=1), CHOSEN)
    hit = (experts == EXPERTS - 1).any(-1)
    assert hit.any() and not hit.all()
    assert torch.equal(mad(x, experts, shares)[~hit], sane(x, experts, shares)[~hit])


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


def test_packed_experts_are_what_the_name_says() -> None:
    assert isinstance(pack_experts(*weights(torch.float32, "cpu")), PackedExperts)
