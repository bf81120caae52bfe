"""Bytes of pages and state, in every form of storage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from deepinfer.errors import ConfigError
from deepinfer.models.deepseek_v41.caches import StateRegion, plan_caches
from deepinfer.models.deepseek_v41.topology import read_topology

Load = Callable[..., dict[str, Any]]


def test_released_bytes(load: Load) -> None:
    plan = plan_caches(read_topology(load("full")))
    assert (plan.window.nbytes, plan.entry.nbytes, plan.index_key.nbytes) == (528, 288, 68)
    assert plan.sources == ((2, 64), (8, 64), (14, 64), (20, 128))
    assert plan.bytes_per_token == 890
    assert plan.page_bytes == 113_920
    assert plan.stored.nbytes == 1_415_040
    assert [field.name for field in plan.stored.fields] == [f"layers.{layer}.window" for layer in range(20)]
    assert {field.nbytes for field in plan.stored.fields} == {70_752}
    assert [field.shape[0] for field in plan.dropped.fields if field.name.endswith(".pending")] == [8, 8, 8]
    # 9 ids, three compressors' raw rows, 20 decoder windows and 3 of the draft stages
    assert plan.dropped.nbytes == 9 * 8 + 3 * 8 * 4096 + 23 * 70_752


def test_groups_of_the_release(load: Load) -> None:
    (paged,), (state,) = plan_caches(read_topology(load("full"))).kv_groups()
    assert paged.page_tokens == 128 and paged.page_bytes == 113_920
    assert [(source.tensors[0], source.entries_per_page, source.entry_bytes) for source in paged.sources] == [
        ("layers.2.kv", 64, 288), ("layers.2.index", 64, 68), ("layers.8.kv", 64, 288), ("layers.8.index", 64, 68),
        ("layers.14.kv", 64, 288), ("layers.14.index", 64, 68), ("layers.20.kv", 128, 288), ("layers.20.index", 128, 68),
    ]  # fmt: skip
    assert (state.stored, state.ring, state.cut, state.replicas) == (1_415_040, 134, 128, 1)
    plan = plan_caches(read_topology(load("full")))
    assert plan.state_bytes == 2 * (plan.stored.nbytes + plan.dropped.nbytes)


def test_bfloat16_bytes_of_the_release(load: Load) -> None:
    plan = plan_caches(read_topology(load("full")), "bfloat16")
    assert plan.bytes_per_token == 3200 and plan.page_bytes == 409_600
    assert plan.stored.nbytes == 20 * 137_216
    assert plan.entry.form is not None and plan.entry.dtype == torch.bfloat16
    (paged,), _ = plan.kv_groups()
    assert paged.sources[0].shape == (512,) and paged.sources[0].dtype == torch.bfloat16


@pytest.mark.parametrize(("name", "ring"), [("tiny", 22), ("tiny128", 134)])
@pytest.mark.parametrize("storage", ["packed", "bfloat16", "float32"])
def test_regions_do_not_overlap_and_are_aligned(load: Load, name: str, ring: int, storage: Any) -> None:
    plan = plan_caches(read_topology(load(name)), storage)
    for region in (plan.stored, plan.dropped):
        end = 0
        for field in region.fields:
            assert field.offset >= end and field.offset % field.dtype.itemsize == 0
            assert region.nbytes % field.dtype.itemsize == 0
            end = field.offset + field.nbytes
        assert end <= region.nbytes < end + 8
    assert {field.shape[0] for field in plan.stored.fields} == {ring}


def test_padding_between_fields() -> None:
    region = StateRegion.lay_out([("a", (3,), torch.uint8, 0), ("b", (1,), torch.int64, 0), ("c", (1,), torch.uint8, 0)])
    assert [field.offset for field in region.fields] == [0, 8, 16] and region.nbytes == 24


def test_rounding_is_left_out_where_blocks_do_not_fit(load: Load) -> None:
    odd = read_topology(load("tiny", head_dim=40, index_head_dim=40))
    plan = plan_caches(odd, "bfloat16")
    assert plan.window.form is None and plan.entry.form is None and plan.index_key.form is None
    with pytest.raises(ConfigError, match="40 is no multiple of 32; keep them in bfloat16"):
        plan_caches(odd)


def test_rounding_can_be_switched_off(load: Load) -> None:
    exact = read_topology(load("tiny", x_cache_quant="none"))
    assert plan_caches(exact, "float32").entry.form is None
    with pytest.raises(ConfigError, match="'x_cache_quant' is 'none'"):
        plan_caches(exact)


def test_pages_that_cut_entries_are_refused(load: Load) -> None:
    with pytest.raises(ConfigError, match="pages of 31 tokens cut the entries of layer 2"):
        plan_caches(read_topology(load("tiny")), page_tokens=31)
    assert plan_caches(read_topology(load("tiny")), page_tokens=16).sources == ((2, 8), (4, 8), (5, 16))
