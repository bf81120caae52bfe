"""Pages and state of one sequence through host memory and back."""

from __future__ import annotations

import pytest
import torch

from deepinfer.kvcache.layout import KvLayout
from deepinfer.kvcache.pages import host_buffer, read_pages, write_pages
from deepinfer.models.base import PagedGroup, Source, StateGroup
from deepinfer.worker.kv_cache import KVCache

PAGED = (
    PagedGroup(16, (Source(("k", "v"), 16, (2, 8), torch.bfloat16), Source(("idx",), 4, (17,), torch.uint8))),
    PagedGroup(8, (Source(("c",), 8, (3,), torch.float32),)),
)
STATE = (StateGroup(stored=40, dropped=8, replicas=1), StateGroup(stored=0, dropped=5))
LAYOUT = KvLayout({"model": "toy"}, PAGED, STATE)


def cache(device: str, fill: bool) -> KVCache:
    kv = KVCache(PAGED, [12, 24], STATE, 5, torch.device(device))
    if fill:
        torch.manual_seed(1)
        for tensor in [*kv.tensors.values()]:
            raw = tensor.view(tensor.shape[0], -1).view(torch.uint8)
            raw.copy_(torch.randint(0, 256, raw.shape, dtype=torch.uint8))
    return kv


def page(kv: KVCache, group: int, member: int, index: int) -> bytes:
    tensor = kv.groups[group][member]
    return tensor.view(tensor.shape[0], -1).view(torch.uint8)[index].cpu().numpy().tobytes()


def read(kv: KVCache, tokens: int, pages: list[list[int]], slot: int, cut: slice | None = None) -> torch.Tensor:
    into = host_buffer(LAYOUT.num_bytes(tokens), pinned=next(iter(kv.tensors.values())).device.type == "cuda")
    read_pages(kv, LAYOUT, tokens, pages, slot, into, cut)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return into


@pytest.mark.parametrize(("tokens", "blocks"), [(1, 1), (16, 1), (17, 2), (40, 3)])
def test_what_is_written_elsewhere_equals_what_was_read(device: str, tokens: int, blocks: int) -> None:
    source, target = cache(device, fill=True), cache(device, fill=False)
    there, here = [7, 2, 9], [4, 1, 11]
    fine = [[2 * b + j for b in ids for j in (0, 1)] for ids in (there, here)]
    payload = read(source, tokens, [there, fine[0]], 3)
    write_pages(target, LAYOUT, tokens, [here, fine[1]], 2, payload)
    for member in range(3):
        for i in range(blocks):
            assert page(target, 0, member, here[i]) == page(source, 0, member, there[i])
    for i in range(2 * blocks):
        assert page(target, 1, 0, fine[1][i]) == page(source, 1, 0, fine[0][i])
    for mine, theirs in zip(target.states, source.states, strict=True):
        assert torch.equal(mine[2], theirs[3]) and not mine[[0, 1, 3, 4]].any()
    untouched = set(range(12)) - set(here[:blocks])
    assert not any(any(page(target, 0, member, i)) for member in range(3) for i in untouched)


def test_positions_that_are_present_are_left_alone(device: str) -> None:
    source, target = cache(device, fill=True), cache(device, fill=False)
    blocks, fine = [1, 2, 3], [2, 3, 4, 5, 6, 7]
    write_pages(target, LAYOUT, 40, [blocks, fine], 1, read(source, 40, [blocks, fine], 1), present=32)
    assert not any(any(page(target, 0, m, i)) for m in range(3) for i in (1, 2))
    assert page(target, 0, 0, 3) == page(source, 0, 0, 3)
    assert [any(page(target, 1, 0, i)) for i in fine] == [False] * 4 + [True] * 2
    assert torch.equal(target.states[0][1], source.states[0][1])  # state is whole whatever is present


def test_a_cut_of_the_state_arrives_with_zeros_around_it(device: str) -> None:
    source, target = cache(device, fill=True), cache(device, fill=True)
    write_pages(target, LAYOUT, 5, [[1], [2, 3]], 1, read(source, 5, [[1], [2, 3]], 1, slice(0, 40)))
    assert torch.equal(target.states[0][1, :40], source.states[0][1, :40]) and not target.states[0][1, 40:].any()


def test_too_few_pages_are_refused(device: str) -> None:
    with pytest.raises(ValueError, match="2 are needed"):
        read(cache(device, fill=True), 17, [[1], [2, 3, 4, 5]], 1)
