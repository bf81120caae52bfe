"""What a token weighs, and the sampler's kernels as machine code; the tokens they draw are compared in
``worker/test_device_sampler.py``."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from deepinfer.kernels.sample import weight_power, weights
from deepinfer.kernels.sample.cuda import CHUNK, chunk_of, programs_for
from deepinfer.kernels.toolchain import Program
from deepinfer.kernels.toolchain.shapes import QWEN3_8B
from kernel_kit import check_machine_code, read_before_waiting

POWER = weight_power(49152)


def weigh(y: torch.Tensor) -> torch.Tensor:
    """Weights of exponents, ``y`` float32 ``[n]``."""
    one = torch.ones(1, 1, device=y.device)
    return weights(y[None], one * 0, one, POWER)[0]


def test_weights_are_the_exponential(device: str) -> None:
    y = torch.cat([torch.linspace(-26, 0, 1_000_001), -torch.logspace(-10, 2, 10_000)]).to(device)
    got, exact = weigh(y).double(), y.double().exp() * 2.0**POWER
    missing = exact - got
    error = 1.5 * 2.0**-24 * exact  # found: 1.31
    assert bool(((missing >= -error) & (missing <= error + 1)).all()), "cut to whole numbers"
    assert torch.equal(got, got.floor()) and float(got.max()) == 2.0**POWER


def test_weights_at_the_ends(device: str) -> None:
    y = torch.tensor([0.0, -0.0, -torch.inf, -1e30, -64.0, -1e-45], device=device)
    assert weigh(y).tolist() == [2.0**POWER, 2.0**POWER, 0, 0, 0, 2.0**POWER]
    assert weights(torch.zeros(1, 1), torch.zeros(1, 1), torch.ones(1, 1), 53).item() == 2.0**53
    flat = weights(torch.full((1, 3), -torch.inf), torch.full((1, 1), -torch.inf), torch.ones(1, 1), POWER)
    assert flat.isnan().all(), "a row without a finite logit has no weights"


def test_weights_never_grow_as_logits_fall(device: str) -> None:
    falling = -torch.arange(0, 27, 2.0**-16, device=device)
    assert bool((weigh(falling).diff() <= 0).all())


@pytest.mark.gpu
def test_weights_have_the_same_bits_on_a_gpu() -> None:
    bits = torch.arange(0, 2**31 - 2**23, 97, dtype=torch.int64).to(torch.int32)
    y = -bits.view(torch.float32)
    assert torch.equal(weigh(y.cuda()).cpu(), weigh(y))


def test_blocks_of_a_row_can_be_searched_at_once() -> None:
    assert chunk_of(49152) == chunk_of(151936) == CHUNK
    for vocab in (1, CHUNK * 1024, CHUNK * 1024 + 1, 10**7):
        assert -(-vocab // chunk_of(vocab)) <= 1024


@pytest.mark.parametrize("program", programs_for(QWEN3_8B), ids=lambda p: p.name)
def test_machine_code(program: Program, tmp_path: Path) -> None:
    check_machine_code(program, tmp_path)
    assert read_before_waiting(program) == set()
