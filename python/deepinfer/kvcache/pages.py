"""Copies between the device's pages and a payload in host memory.

Owns: the two directions of the copy. Never touches: when they may run: they are work of the device queue, behind the step that wrote
the pages and ahead of the one that reads them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from deepinfer.kvcache.layout import KvLayout, Section
from deepinfer.platforms import to_device
from deepinfer.worker.kv_cache import KVCache

Pages = Sequence[Sequence[int]]
"""Page ids of a sequence in each paged group, first page first."""


def host_buffer(num_bytes: int, pinned: bool) -> torch.Tensor:
    """Host memory for a payload, uint8 ``[num_bytes]``; what no copy writes (alignment, cut state) is zero."""
    return torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=pinned)


def read_pages(
    kv: KVCache, layout: KvLayout, tokens: int, pages: Pages, state_slot: int, into: torch.Tensor, cut: slice | None = None
) -> None:
    """Copies a sequence's pages and state row to a payload.

    Args:
        kv: the device's tensors.
        layout: of that device.
        tokens: computed positions; whole pages are copied, what lies behind the last position means nothing.
        pages: at least as many as ``tokens`` need.
        state_slot: row of the state groups.
        into: uint8 ``[layout.num_bytes(tokens)]`` in host memory. On a GPU the copies are queued: wait for the stream before reading.
        cut: bytes of each state row to copy; ``None`` = all.
    """
    indices = [_indices(kv, group, layout.num_blocks(tokens) * per) for group, per in zip(pages, _per_block(layout), strict=True)]
    for s in layout.sections(tokens):
        if not s.rows or not s.row_bytes:
            continue
        if s.group < 0:
            row, part = kv.states[s.member][state_slot], cut or slice(None)
            _bytes(into, s)[0][part].copy_(row[part], non_blocking=True)
            continue
        tensor = _rows(kv, s)
        target = _bytes(into, s)
        if tensor.device.type == "cpu":
            torch.index_select(tensor, 0, indices[s.group], out=target)
        else:
            target.copy_(tensor.index_select(0, indices[s.group]), non_blocking=True)


def write_pages(kv: KVCache, layout: KvLayout, tokens: int, pages: Pages, state_slot: int, payload: torch.Tensor, present: int = 0) -> None:
    """Copies a payload to pages and a state row.

    Args:
        kv, layout, tokens, state_slot: as for :func:`read_pages`.
        pages: where the positions go; pages of the ``present`` leading positions are left alone.
        payload: uint8 ``[layout.num_bytes(tokens)]`` in host memory; on a GPU it must stay until the queued copies have run.
        present: leading positions that are in place already, a multiple of the block's tokens.
    """
    skip = [present // layout.block_tokens * per for per in _per_block(layout)]
    counts = [layout.num_blocks(tokens) * per for per in _per_block(layout)]
    indices = [_indices(kv, group[:count][first:], count - first) for group, first, count in zip(pages, skip, counts, strict=True)]
    for s in layout.sections(tokens):
        if not s.rows or not s.row_bytes:
            continue
        source = _bytes(payload, s)
        if s.group < 0:
            kv.states[s.member][state_slot].copy_(source[0], non_blocking=True)
        elif skip[s.group] < s.rows:
            tensor = _rows(kv, s)
            tensor.index_copy_(0, indices[s.group], source[skip[s.group] :].to(tensor.device, non_blocking=True))


def _per_block(layout: KvLayout) -> list[int]:
    return [layout.block_tokens // g.page_tokens for g in layout.paged]


def _indices(kv: KVCache, pages: Sequence[int], count: int) -> torch.Tensor:
    """Page ids on the KV's device, int64 ``[count]``."""
    host = torch.tensor(list(pages[:count]), dtype=torch.int64)
    if len(host) != count:
        raise ValueError(f"{len(host)} pages were given and {count} are needed")
    device = next(iter(kv.tensors.values())).device
    return to_device(host, device)


def _rows(kv: KVCache, section: Section) -> torch.Tensor:
    """A paged tensor as uint8 ``[pages, bytes of a page]``."""
    tensor = kv.groups[section.group][section.member]
    return tensor.view(tensor.shape[0], -1).view(torch.uint8)


def _bytes(payload: torch.Tensor, section: Section) -> torch.Tensor:
    """A section of a payload as uint8 ``[rows, row_bytes]``."""
    return payload[section.offset : section.end].view(section.rows, section.row_bytes)
