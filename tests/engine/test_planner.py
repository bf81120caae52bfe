"""What fits, and the setting an impossible wish names."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from deepinfer.engine.config import EngineConfig, RunConfig
from deepinfer.engine.planner import KvPlan, check_weights, plan_kv, report
from deepinfer.errors import CapacityError
from deepinfer.models.base import PagedGroup, Source, StateGroup

GROUP = PagedGroup(64, (Source(("k", "v"), 64, (2, 8), torch.float32),))
BLOCK = 64 * 2 * 2 * 8 * 4


class FixedMemory:
    """A platform with stated memory."""

    device = torch.device("cpu")
    default_dtype = torch.float32
    pinned = False

    def __init__(self, name: str, total: int, free: int) -> None:
        self.name, self._total, self._free = name, total, free

    def describe(self) -> str:
        return f"a {self.name}"

    def prepare(self, num_threads: int | None, batch_invariant: bool = True) -> None: ...

    def memory_total(self) -> int:
        return self._total

    def memory_available(self) -> int:
        return self._free

    def synchronize(self) -> None: ...


def plan(free: int, name: str = "cpu", state: list[StateGroup] | None = None, limit: int = 1000, seqs: int = 8, **settings: Any) -> KvPlan:
    run = RunConfig(FixedMemory(name, 1 << 40, free), torch.float32, seqs, 512, 0.5, None, True)
    return plan_kv(EngineConfig(model="m", **settings), run, [GROUP], state or [], limit, 100)


def test_the_pool_takes_its_share_of_memory() -> None:
    p = plan(200 * BLOCK)
    assert p.num_blocks == 99 and p.tokens == 99 * 64 and p.kv_bytes == 100 * BLOCK  # the null block is paid for too
    assert p.max_model_len == 1000 and p.blocks_per_sequence == 16 and p.num_pages == (100,)


def test_no_more_is_taken_than_all_sequences_need() -> None:
    assert plan(1 << 35).num_blocks == 8 * 16


def test_on_a_gpu_the_fraction_counts_what_is_in_use() -> None:
    run = RunConfig(FixedMemory("cuda", 1000 << 20, 900 << 20), torch.float32, 8, 512, 0.8, None, True)
    p = plan_kv(EngineConfig(model="m"), run, [GROUP], [], 10_000_000, 100)
    budget = int(0.8 * (1000 << 20)) - (100 << 20) - (6 * 8 * 100 * 4 + (256 << 20))
    assert p.num_blocks == budget // BLOCK - 1


def test_given_blocks_are_obeyed() -> None:
    p = plan(1 << 30, num_kv_blocks=3)
    assert p.num_blocks == 3 and p.max_model_len == 1000 and p.full_sequences == 3 / 16


def test_an_open_length_is_lowered_to_what_fits() -> None:
    assert plan(10 * BLOCK).max_model_len == 4 * 64


def test_state_slots_are_paid_for() -> None:
    state = [StateGroup(stored=3 * BLOCK, dropped=BLOCK)]
    with_state, without = plan(2000 * BLOCK, state=state, limit=10_000, seqs=9), plan(2000 * BLOCK, limit=10_000, seqs=9)
    assert with_state.state_bytes == 10 * 4 * BLOCK and without.num_blocks - with_state.num_blocks == 40


@pytest.mark.parametrize(
    ("free", "settings", "names"),
    [
        (BLOCK, {}, ["kv_memory_fraction"]),
        (0, {}, ["kv_memory_fraction"]),
        (10 * BLOCK, {"max_model_len": 900}, ["max_model_len", "256", "kv_memory_fraction"]),
        (1 << 30, {"max_model_len": 1001}, ["max_model_len", "1000"]),
        (10 * BLOCK, {"num_kv_blocks": 10}, ["num_kv_blocks", "at most 9"]),
    ],
)
def test_what_cannot_fit_names_the_setting(free: int, settings: dict[str, Any], names: list[str]) -> None:
    with pytest.raises(CapacityError) as e:
        plan(free, **settings)
    assert all(n in str(e.value) for n in names), str(e.value)


def test_weights_larger_than_memory_are_refused_before_loading() -> None:
    run = RunConfig(FixedMemory("cpu", 1 << 40, 1 << 30), torch.float32, 8, 512, 0.5, None, True)
    check_weights(run, 1 << 29)
    with pytest.raises(CapacityError, match=r"2\.00 GiB.*1\.00 GiB"):
        check_weights(run, 1 << 31)


def test_pages_of_further_groups_follow_the_block() -> None:
    small = replace(GROUP, page_tokens=16, sources=(Source(("w",), 16, (4,), torch.float32),))
    run = RunConfig(FixedMemory("cpu", 1 << 40, 1 << 30), torch.float32, 8, 512, 0.5, None, True)
    p = plan_kv(EngineConfig(model="m", num_kv_blocks=5), run, [GROUP, small], [], 100, 100)
    assert p.num_pages == (6, 21) and p.block_bytes == BLOCK + 4 * small.page_bytes


def test_the_report_says_what_fits_and_what_to_change() -> None:
    run = RunConfig(FixedMemory("cpu", 1 << 40, 1 << 30), torch.float32, 8, 512, 0.5, None, True)
    text = report(run, plan(1 << 30, num_kv_blocks=24), "tiny", 3 << 20)
    for part in ("tiny on a cpu", "weights 3.0 MiB", "1,536 tokens in 24 blocks of 64", "1.5 at the full length of 1,000", "num_kv_blocks"):
        assert part in text


def test_the_report_of_several_engines_says_that_sizes_are_of_one() -> None:
    run = RunConfig(FixedMemory("cpu", 1 << 40, 1 << 30), torch.float32, 8, 512, 0.5, None, True)
    one, two = (report(run, plan(1 << 30, num_kv_blocks=24), "tiny", 3 << 20, engines=n).splitlines() for n in (1, 2))
    assert two[0] == f"{one[0]}: 2 engines (data_parallel_size), each with:" and two[1:] == one[1:]
