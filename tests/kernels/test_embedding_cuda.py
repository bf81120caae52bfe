"""Rows of the tables of embeddings and rotations: exact, and never read out of bounds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from deepinfer.errors import KernelBuildError
from deepinfer.kernels.embedding import embedding, rotations
from deepinfer.kernels.embedding.cuda import Embedding, programs_for
from deepinfer.kernels.toolchain.shapes import LLAMA_8B, SMOLLM2_135M, ModelShape, run_dtype
from kernel_kit import (
    DTYPES,
    PLACES,
    check_machine_code,
    device_of,
    kernels_at,
    machine_accesses,
    random_rows,
    read_before_waiting,
    replayed,
)


def rows_of(
    place: str, dtype: torch.dtype, ids: torch.Tensor, table: torch.Tensor, position: torch.Tensor, turns: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Embeddings, cosines and sines of the rows."""
    if place == "reference":
        return embedding(ids, table), *rotations(position, *turns)
    rows, half = ids.shape[0], turns[0].shape[1]
    out = torch.full((rows, table.shape[1]), torch.nan, device=table.device)
    turned = torch.full((rows, half), torch.nan, device=table.device), torch.full((rows, half), torch.nan, device=table.device)
    kernels = kernels_at(place, Embedding.programs(*table.shape, 2 * half, run_dtype(dtype)))
    Embedding(*table.shape, 2 * half, dtype, table.device, kernels=kernels)(ids, table, out, position, turns, turned)
    return out, *turned


def turns_of(place: str, positions: int, half: int) -> tuple[torch.Tensor, torch.Tensor]:
    return random_rows(positions, half, place=place, seed=1), random_rows(positions, half, place=place, seed=2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("hidden", "half"), [(576, 32), (2048, 64), (64, 256)])
@pytest.mark.parametrize("place", PLACES)
def test_rows_are_those_of_the_tables(place: str, hidden: int, half: int, dtype: torch.dtype) -> None:
    table, turns = random_rows(300, hidden, place=place, dtype=dtype), turns_of(place, 500, half)
    generator = torch.Generator().manual_seed(0)
    ids, position = (torch.randint(0, most, (256,), generator=generator).to(table.device) for most in (300, 500))
    found = rows_of(place, dtype, ids, table, position, turns)
    assert all(x.dtype == torch.float32 for x in found)
    assert torch.equal(found[0], table[ids].float())
    assert torch.equal(found[1], turns[0][position]) and torch.equal(found[2], turns[1][position])
    for count in (1, 3):
        few = rows_of(place, dtype, ids[:count].contiguous(), table, position[:count].contiguous(), turns)
        assert all(torch.equal(a, b[:count]) for a, b in zip(few, found, strict=True))


@pytest.mark.parametrize("place", PLACES)
def test_what_is_outside_of_a_table_gives_its_nearest_row(place: str) -> None:
    table = random_rows(40, 576, place=place, dtype=torch.float16)[10:30]
    cosines, sines = (x[10:30] for x in turns_of(place, 40, 32))
    ids = torch.tensor([-1, 0, 19, 20, 2**31, 2**40, -(2**63), 2**63 - 1], device=device_of(place))
    nearest = [0, 0, 19, 19, 19, 19, 0, 19]
    x, cos, sin = rows_of(place, torch.float16, ids, table, ids, (cosines, sines))
    assert torch.equal(x, table[nearest].float()) and torch.equal(cos, cosines[nearest]) and torch.equal(sin, sines[nearest])


@pytest.mark.parametrize("shape", [SMOLLM2_135M, LLAMA_8B], ids=lambda s: str(s.hidden))
def test_machine_code(shape: ModelShape, tmp_path: Path) -> None:
    (program,) = programs_for(shape)
    check_machine_code(program, tmp_path)
    assert read_before_waiting(program) == set()
    assert machine_accesses(program) == {"LDG": [64, 64, 128, 128, 128], "STG": [128, 128, 128, 128]}
    for hidden, head_dim in ((580, 64), (576, 36)):
        with pytest.raises(KernelBuildError, match="16 bytes"):
            Embedding.programs(100, hidden, head_dim, "bfloat16")


@pytest.mark.gpu
def test_a_captured_launch_reads_the_ids_and_positions_of_its_replay() -> None:
    table, turns = random_rows(1000, 4096, place="cuda", dtype=torch.bfloat16), turns_of("cuda", 2000, 64)
    ids, position = torch.zeros(64, dtype=torch.int64, device="cuda"), torch.zeros(64, dtype=torch.int64, device="cuda")
    out, turned = torch.empty(64, 4096, device="cuda"), (torch.empty(64, 64, device="cuda"), torch.empty(64, 64, device="cuda"))
    op = Embedding(1000, 4096, 128, torch.bfloat16, table.device)
    replay = replayed(lambda: op(ids, table, out, position, turns, turned))
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        ids.copy_(torch.randint(0, 1000, (64,), generator=generator))
        position.copy_(torch.randint(0, 2000, (64,), generator=generator))
        replay()
        assert torch.equal(out, table[ids].float())
        assert torch.equal(turned[0], turns[0][position]) and torch.equal(turned[1], turns[1][position])
