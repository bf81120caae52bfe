"""Rows of the embedding table: exact, and never read out of bounds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from deepinfer.errors import KernelBuildError
from deepinfer.kernels.embedding import embedding
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


def rows_of(place: str, dtype: torch.dtype, ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    if place == "reference":
        return embedding(ids, table)
    out = torch.empty(ids.shape[0], table.shape[1], device=table.device)
    kernels = kernels_at(place, Embedding.programs(*table.shape, run_dtype(dtype)))
    Embedding(*table.shape, dtype, table.device, kernels=kernels)(ids, table, out)
    return out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [576, 2048])
@pytest.mark.parametrize("place", PLACES)
def test_rows_are_those_of_the_table(place: str, hidden: int, dtype: torch.dtype) -> None:
    table = random_rows(300, hidden, place=place, dtype=dtype)
    ids = torch.randint(0, 300, (256,), generator=torch.Generator().manual_seed(0)).to(table.device)
    found = rows_of(place, dtype, ids, table)
    assert found.dtype == torch.float32
    assert torch.equal(found, table[ids].float())
    for count in (1, 3):
        assert torch.equal(rows_of(place, dtype, ids[:count].contiguous(), table), found[:count])


@pytest.mark.parametrize("place", PLACES)
def test_ids_out_of_the_table_give_its_nearest_row(place: str) -> None:
    table = random_rows(40, 576, place=place, dtype=torch.float16)[10:30]
    ids = torch.tensor([-1, 0, 19, 20, 2**31, 2**40, -(2**63), 2**63 - 1], device=device_of(place))
    assert torch.equal(rows_of(place, torch.float16, ids, table), table[[0, 0, 19, 19, 19, 19, 0, 19]].float())


@pytest.mark.parametrize("shape", [SMOLLM2_135M, LLAMA_8B], ids=lambda s: str(s.hidden))
def test_machine_code(shape: ModelShape, tmp_path: Path) -> None:
    (program,) = programs_for(shape)
    check_machine_code(program, tmp_path)
    assert read_before_waiting(program) == set()
    assert machine_accesses(program) == {"LDG": [64, 128], "STG": [128, 128]}
    with pytest.raises(KernelBuildError, match="16 bytes"):
        Embedding.programs(100, 580, "bfloat16")


@pytest.mark.gpu
def test_a_captured_launch_reads_the_ids_of_its_replay() -> None:
    table = random_rows(1000, 4096, place="cuda", dtype=torch.bfloat16)
    ids = torch.zeros(64, dtype=torch.int64, device=table.device)
    out = torch.empty(64, 4096, device=table.device)
    op = Embedding(1000, 4096, torch.bfloat16, table.device)
    replay = replayed(lambda: op(ids, table, out))
    for seed in range(3):
        ids.copy_(torch.randint(0, 1000, (64,), generator=torch.Generator().manual_seed(seed)))
        replay()
        assert torch.equal(out, table[ids].float())
