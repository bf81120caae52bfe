"""RMSNorm, plain and with the residual sum: right values, rows that do not depend on their batch, machine code without spills."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from deepinfer.errors import KernelBuildError
from deepinfer.kernels.rms_norm import rms_norm
from deepinfer.kernels.rms_norm.cuda import AddRmsNorm, RmsNorm, block_of, programs_for
from deepinfer.kernels.toolchain import Program
from deepinfer.kernels.toolchain.shapes import LLAMA_8B, SMOLLM2_135M, run_dtype
from invariance_kit import depends_on_batch
from kernel_kit import (
    KERNEL_PLACES,
    ONE_ROUNDING,
    PLACES,
    check_machine_code,
    device_of,
    kept_as,
    kernels_at,
    lowered,
    machine_accesses,
    random_rows,
    read_before_waiting,
    replayed,
)

EPS = 1e-5
REAL_WIDTHS = (576, 896, 960, 1536, 2048, 2560, 3072, 3584, 4096, 5120, 8192, 16384)


def normed(
    place: str, dtype: torch.dtype, x: torch.Tensor, weight: torch.Tensor, delta: torch.Tensor | None = None, after: bool = True
) -> torch.Tensor:
    """``y``; ``x`` has become the sum."""
    hidden = x.shape[1]
    if place == "reference":
        if delta is not None:
            x += delta
        return rms_norm(x, weight, EPS, dtype)
    out = torch.empty(x.shape, device=x.device, dtype=kept_as(place, dtype))
    if delta is None:
        kernels = kernels_at(place, RmsNorm.programs(hidden, run_dtype(dtype)))
        RmsNorm(hidden, EPS, dtype, x.device, after, kernels)(x, weight, out)
    else:
        kernels = kernels_at(place, AddRmsNorm.programs(hidden, run_dtype(dtype)))
        AddRmsNorm(hidden, EPS, dtype, x.device, after, kernels)(x, delta, weight, out)
    return out


@pytest.mark.parametrize(("hidden", "dtype"), [(576, torch.bfloat16), (576, torch.float16), (2048, torch.bfloat16)])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("place", PLACES)
def test_values(place: str, residual: bool, hidden: int, dtype: torch.dtype) -> None:
    x, weight = random_rows(7, hidden, place=place), random_rows(hidden, place=place, seed=1)
    delta = random_rows(7, hidden, place=place, dtype=dtype, seed=2) if residual else None
    total = x.clone() if delta is None else x + delta.float()
    out = normed(place, dtype, x, weight, delta)
    assert out.dtype == kept_as(place, dtype)
    assert torch.equal(x, total), "the residual is exact"
    wide = total.double()
    exact = wide / torch.sqrt(wide.square().mean(-1, keepdim=True) + EPS) * weight.double()
    # float32 sums and products, then one rounding
    torch.testing.assert_close(out.double(), exact, rtol=ONE_ROUNDING[out.dtype] + 2e-6, atol=1e-6)


@pytest.mark.parametrize("hidden", [576, 2048])
@pytest.mark.parametrize("place", KERNEL_PLACES)
def test_rows_do_not_depend_on_the_batch(place: str, hidden: int) -> None:
    both = torch.stack((random_rows(256, hidden, place=place), random_rows(256, hidden, place=place, seed=1)), 1)
    weight = random_rows(hidden, place=place, seed=2)

    def op(rows: torch.Tensor) -> torch.Tensor:
        x, delta = rows[:, 0].clone(), rows[:, 1].to(kept_as(place, torch.bfloat16)).contiguous()
        y = normed(place, torch.bfloat16, x, weight, delta)
        return torch.cat((x, y, normed(place, torch.bfloat16, x, weight)), 1)

    assert depends_on_batch(op, both, (1, 3, 64)) == []


@pytest.mark.parametrize("place", KERNEL_PLACES)
def test_padding_rows_do_not_leak(place: str) -> None:
    x, weight = random_rows(8, 576, place=place), random_rows(576, place=place, seed=1)
    delta = random_rows(8, 576, place=place, dtype=torch.bfloat16, seed=2)
    clean = normed(place, torch.bfloat16, x.clone(), weight, delta)
    x[5:], delta[6:] = float("nan"), float("inf")
    assert torch.equal(normed(place, torch.bfloat16, x, weight, delta)[:5], clean[:5])
    assert x[5:].isnan().all()


def test_a_block_holds_a_row_of_any_real_width() -> None:
    for hidden in range(4, 20000, 4):
        steps, threads = block_of(hidden)
        assert threads % 32 == 0 and threads <= 256
        assert hidden <= 4 * steps * threads < hidden + 4 * 32 * steps, "no warp idle in all steps"
    with pytest.raises(KernelBuildError, match="16 bytes"):
        RmsNorm.programs(574, "bfloat16")


@pytest.mark.parametrize("hidden", REAL_WIDTHS)
def test_every_real_width_is_lowered(hidden: int) -> None:
    (program,) = AddRmsNorm.programs(hidden, "bfloat16")
    assert lowered(program).threads == block_of(hidden)[1]


@pytest.mark.parametrize(
    "hidden", [pytest.param(hidden, marks=[] if hidden in (576, 5120) else pytest.mark.nightly) for hidden in REAL_WIDTHS]
)
def test_accesses_are_wide(hidden: int) -> None:
    steps, _ = block_of(hidden)
    (program,) = AddRmsNorm.programs(hidden, "bfloat16")
    assert machine_accesses(program) == {"LDG": [64] * steps + [128] * 2 * steps, "STG": [64] * steps + [128] * steps}


@pytest.mark.parametrize("program", [p for shape in (SMOLLM2_135M, LLAMA_8B) for p in programs_for(shape)], ids=lambda p: p.name)
def test_machine_code(program: Program, tmp_path: Path) -> None:
    check_machine_code(program, tmp_path)
    assert read_before_waiting(program) == {"weight"}


@pytest.mark.gpu
def test_a_chain_of_overlapping_launches_gives_the_bits_of_separate_ones() -> None:
    device = device_of("cuda")
    weight = random_rows(4096, place="cuda", seed=1)
    answers = []
    for after in (True, False):
        op = AddRmsNorm(4096, EPS, torch.bfloat16, device, after)
        x, one = random_rows(256, 4096, place="cuda"), random_rows(256, 4096, place="cuda", dtype=torch.bfloat16, seed=2)
        two = torch.empty_like(one)

        def chain(op: AddRmsNorm = op, x: torch.Tensor = x, one: torch.Tensor = one, two: torch.Tensor = two) -> None:
            for _ in range(50):
                op(x, one, weight, two)
                op(x, two, weight, one)

        chain()
        answers.append((x.clone(), one.clone()))
        x.copy_(random_rows(256, 4096, place="cuda"))
        one.copy_(random_rows(256, 4096, place="cuda", dtype=torch.bfloat16, seed=2))
        start = x.clone(), one.clone()
        replay = replayed(chain)
        x.copy_(start[0])
        one.copy_(start[1])
        replay()
        answers.append((x, one))
    for x, y in answers[1:]:
        assert torch.equal(x, answers[0][0]) and torch.equal(y, answers[0][1])
