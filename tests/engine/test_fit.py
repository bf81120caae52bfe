"""What fits a machine that is only described."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from deepinfer.engine.fit import Fit, Machine, fit
from deepinfer.errors import ConfigError
from deepinfer.models.base import PagedGroup, Source, StateGroup
from deepinfer.models.sizes import ModelSizes, PartSize

GB = 10**9
BLOCK = 64 * 2 * 2 * 8 * 4
SCRATCH = 6 * 16 * 100 * 4 + (256 << 20)
SIZES = ModelSizes(
    architecture="Any",
    parts=(PartSize("weights", 5 * GB, 10 * GB),),
    weight_bytes={"packed": 3 * GB, "bfloat16": 10 * GB},
    table_bytes=20 * GB,
    paged=(PagedGroup(64, (Source(("k", "v"), 64, (2, 8), torch.float32),)),),
    state=(StateGroup(stored=1000, dropped=500, replicas=1),),
    vocab=100,
    max_position=1000,
)


def one(gpus: int = 1, gpu: int = 8, host: int | None = None, form: str = "packed", **more: int) -> Fit:
    return fit(SIZES, Machine(gpus, gpu * GB, None if host is None else host * GB, 0.5), form, 16, **more)


def test_kv_gets_what_the_rest_leaves() -> None:
    found = one()
    states = 17 * 2500
    assert found.state_bytes == states and found.weight_bytes == 3 * GB
    assert found.kv_bytes == 4 * GB - 3 * GB - states - SCRATCH
    assert found.blocks == found.kv_bytes // BLOCK - 1 and found.tokens == found.blocks * 64
    assert found.full_sequences == found.blocks // 16 and found.fits and found.least_places == 1  # 1000 tokens are 16 blocks
    assert one(length=10).full_sequences == found.blocks


def test_weights_are_spread_and_sequences_are_not() -> None:
    found = one(gpus=3, form="bfloat16")
    assert found.weight_bytes == -(-10 * GB // 3)
    assert found.tokens == 3 * 64 * found.blocks and found.full_sequences == 3 * (found.blocks // 16)


def test_weights_that_do_not_fit_name_the_number_that_does() -> None:
    found = one(form="bfloat16")
    assert not found.fits and found.blocks == 0 and found.kv_bytes < 0 and found.least_places == 3
    assert one(gpus=3, form="bfloat16").fits and not one(gpus=2, form="bfloat16").fits
    # little is left of half a gigabyte beside the sampler's copies
    assert one(gpu=1, gpus=9).least_places == 13 and one(gpu=1, gpus=13).blocks >= 1 and one(gpu=1, gpus=12).blocks == 0
    assert fit(SIZES, Machine(1, 100, None), "packed", 16).least_places == 0  # no number of those


def test_tables_are_kept_in_a_host_that_holds_them() -> None:
    assert [one(host=host).tables_in_host for host in (None, 39, 40)] == [False, False, True]
    assert not fit(replace(SIZES, table_bytes=0), Machine(1, GB, 100 * GB), "packed", 16).tables_in_host


def test_a_host_alone_holds_weights_tables_and_kv() -> None:
    small, large = one(gpus=0, host=40, form="bfloat16"), one(gpus=0, host=70, form="bfloat16")
    states = 17 * 2500
    assert not small.tables_in_host and small.kv_bytes == 20 * GB - 10 * GB - states
    assert large.tables_in_host and large.kv_bytes == 35 * GB - 10 * GB - 20 * GB - states
    assert small.places == 1


@pytest.mark.parametrize(
    ("machine", "form", "length", "says"),
    [
        ((1, GB, None), "float8", None, "packed or bfloat16"),
        ((1, GB, None), "packed", 1001, "not within the 1000"),
        ((1, GB, None), "packed", 0, "not within"),
        ((0, 0, None), "packed", None, "how many GPUs"),
        ((-1, GB, None), "packed", None, "number of GPUs"),
        ((1, 0, None), "packed", None, "memory above 0"),
        ((1, GB, 0), "packed", None, "memory of the host"),
        ((1, GB, None, 1.5), "packed", None, "fraction"),
    ],
)
def test_questions_without_an_answer(machine: tuple[int, ...], form: str, length: int | None, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        fit(SIZES, Machine(*machine), form, 16, length)  # type: ignore[arg-type]
