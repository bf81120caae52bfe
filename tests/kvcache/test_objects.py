"""Objects of 128 tokens: the bytes of a payload, many at once, and back."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from deepinfer.errors import ConfigError
from deepinfer.kvcache.layout import KvLayout
from deepinfer.kvcache.objects import GRAIN, ObjectForm, Staging, read_objects, write_objects
from deepinfer.kvcache.pages import host_buffer, read_pages
from deepinfer.models.base import PagedGroup, Source, StateGroup
from deepinfer.worker.kv_cache import KVCache
from deepinfer.worker.sync_guard import forbid_device_sync
from fake_cuda import watched_cuda

STATE = (StateGroup(stored=40, dropped=8),)


def paged(block: int) -> tuple[PagedGroup, ...]:
    """Two tensors of whole words, one of odd bytes, and a group of smaller pages."""
    odd = Source(("idx",), block // 4, (17,), torch.uint8)
    return (
        PagedGroup(block, (Source(("k", "v"), block, (2, 8), torch.bfloat16), odd)),
        PagedGroup(block // 2, (Source(("c",), block // 2, (3,), torch.float32),)),
    )


@pytest.mark.parametrize("block", [16, 64, 128])
def test_objects_have_the_bytes_of_payloads_and_come_back(device: str, block: int) -> None:
    layout, per = KvLayout({"model": "toy"}, paged(block), STATE), GRAIN // block
    form = ObjectForm(layout)
    assert (form.blocks, form.pages) == (per, [per, 2 * per])
    source, target = (KVCache(paged(block), [1 + 5 * per, 2 * (1 + 5 * per)], STATE, 2, torch.device(device)) for _ in range(2))
    torch.manual_seed(block)
    for tensor in source.tensors.values():
        raw = tensor.view(tensor.shape[0], -1).view(torch.uint8)
        raw.copy_(torch.randint(1, 256, raw.shape, dtype=torch.uint8))
    order = torch.randperm(5 * per) + 1
    blocks = order[: 3 * per].view(3, per)
    fine = torch.stack([2 * blocks, 2 * blocks + 1], 2).flatten(1)
    pages = [ids.to(device) for ids in (blocks, fine)]
    staging = Staging(form, 4, torch.device(device))
    read_objects(source, form, pages, staging.seen[:3])
    if device != "cpu":
        torch.cuda.synchronize()
    whole = KvLayout(layout.identity, layout.paged, ())
    for i in range(3):
        payload = host_buffer(whole.num_bytes(GRAIN), device != "cpu")
        read_pages(source, whole, GRAIN, [blocks[i].tolist(), fine[i].tolist()], 0, payload)
        if device != "cpu":
            torch.cuda.synchronize()
        mine = torch.cat([staging.host[i, s.offset : s.end] for s in form.sections])
        assert torch.equal(mine, torch.cat([payload[s.offset : s.end] for s in form.sections]))
    # Elsewhere, the first block left alone: its pages go to page 0.
    there = order[: 3 * per].flip(0).view(3, per)
    kept = int(there[0, 0])
    ids = [there.clone(), torch.stack([2 * there, 2 * there + 1], 2).flatten(1)]
    ids[0][0, 0] = 0
    ids[1][0, :2] = 0
    write_objects(target, form, [t.to(device) for t in ids], staging.seen[:3])
    for name in ("k", "v", "idx"):
        moved, wanted = (kv.tensors[name].cpu().view(torch.uint8) for kv in (target, source))
        assert torch.equal(moved[there.flatten()[1:]], wanted[blocks.flatten()[1:]]) and not moved[kept].any()
        untouched = sorted(set(range(1, 5 * per + 1)) - set(there.flatten().tolist()))
        assert not moved[untouched].any()
    moved, wanted = (kv.tensors["c"].cpu().view(torch.uint8) for kv in (target, source))
    assert torch.equal(moved[ids[1].flatten()[2:]], wanted[fine.flatten()[2:]]) and not moved[2 * kept].any()


@pytest.mark.parametrize("kind", ["fake", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_copies_of_many_objects_are_few_operations_and_make_nobody_wait(kind: str) -> None:
    """One gather or scatter for each tensor, however many objects and pages there are."""

    class Operations(TorchDispatchMode):
        seen: Counter[str] = Counter()

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if not func.is_view and func.namespace == "aten":
                self.seen[func.name().removeprefix("aten::").split(".")[0]] += 1
            return func(*args, **(kwargs or {}))

    form = ObjectForm(KvLayout({"model": "toy"}, paged(16), ()))
    with watched_cuda(kind):
        kv = KVCache(paged(16), [99, 200], (), 1, torch.device("cuda"))
        objects = torch.zeros(12, form.num_bytes, dtype=torch.uint8, device="cuda")
        pages = [torch.arange(12 * per, device="cuda").view(12, per) for per in form.pages]
        with forbid_device_sync(), Operations() as operations:
            write_objects(kv, form, pages, objects)
            assert operations.seen == {"index_put_": 4}
            operations.seen.clear()
            read_objects(kv, form, pages, objects)
            assert operations.seen == {"index_select": 4, "copy_": 4}


def test_blocks_that_do_not_divide_an_object_are_refused() -> None:
    with pytest.raises(ConfigError, match="128 tokens an object, which blocks of 96"):
        ObjectForm(KvLayout({}, (PagedGroup(96, (Source(("k",), 96, (1,), torch.uint8),)),), ()))
