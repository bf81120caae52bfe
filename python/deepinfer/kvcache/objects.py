"""Objects of the KV store: 128 tokens of a sequence's pages as bytes, and the copies between them and the device.

Owns: where each page lies in an object, and both directions of the copy. Never touches: names, when copies may run: they are work of the
device queue.

An object is a payload of `kvcache.layout` for 128 tokens without state. Some of them lie one behind the other in host memory; a copy moves
all of them in one operation for each tensor, which on a GPU reads and writes page-locked memory over the bus by itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from deepinfer.errors import ConfigError
from deepinfer.kvcache.block_tier import KEY_BYTES
from deepinfer.kvcache.layout import KvLayout
from deepinfer.platforms.host_memory import empty_on_host, seen_by_device
from deepinfer.worker.kv_cache import KVCache

GRAIN = 128
"""``KVSTORE_GRAIN``: tokens of an object."""


class ObjectForm:
    """Where pages lie in an object of a layout.

    Attributes:
        num_bytes: of an object; ``blocks``: the engine's blocks in it; ``pages``: of each paged group.

    Raises:
        ConfigError: blocks do not divide an object.
    """

    def __init__(self, layout: KvLayout) -> None:
        if GRAIN % layout.block_tokens:
            raise ConfigError(f"the KV store keeps {GRAIN} tokens an object, which blocks of {layout.block_tokens} do not divide")
        paged = KvLayout(layout.identity, layout.paged, ())
        self.sections = paged.sections(GRAIN)
        self.num_bytes = paged.num_bytes(GRAIN)
        self.blocks = GRAIN // layout.block_tokens
        self.pages = [GRAIN // group.page_tokens for group in layout.paged]

    def names(self, chain: bytes, objects: int) -> bytes:
        """Names of the first objects, from the hashes of a chain's blocks: those of their last ones."""
        size = self.blocks * KEY_BYTES
        return b"".join(chain[i - KEY_BYTES : i] for i in range(size, min(objects * size, len(chain)) + 1, size))


class Staging:
    """Host memory for some objects on their way, uint8 ``[count, bytes of an object]``, and the same bytes as the device sees them."""

    def __init__(self, form: ObjectForm, count: int, device: torch.device) -> None:
        self.host = empty_on_host((count, form.num_bytes), device)
        self.seen = seen_by_device(self.host, device)


def read_objects(kv: KVCache, form: ObjectForm, pages: Sequence[torch.Tensor], into: torch.Tensor) -> None:
    """Copies pages to objects.

    Args:
        pages: page ids of each paged group, int64 ``[n, pages of an object]`` on the KV's device.
        into: the first ``n`` objects of a `Staging`, as the device sees them. On a GPU the copies are queued.
    """
    for tensor, ids, part in _parts(kv, form, pages, into):
        part.copy_(tensor.index_select(0, ids.flatten()).view(part.shape))


def write_objects(kv: KVCache, form: ObjectForm, pages: Sequence[torch.Tensor], source: torch.Tensor) -> None:
    """Copies objects to pages. What goes to page 0 goes nowhere: the null page of every group.

    Args: as of `read_objects`; on a GPU ``source`` must stay as it is until the queued copies have run.
    """
    for tensor, ids, part in _parts(kv, form, pages, source):
        tensor.index_put_((ids,), part)


def _parts(
    kv: KVCache, form: ObjectForm, pages: Sequence[torch.Tensor], objects: torch.Tensor
) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """For each tensor: itself as ``[pages, words]``, ids ``[n, rows]``, and its part of the objects, ``[n, rows, words]``."""
    found = []
    for s in form.sections:
        if not s.row_bytes:
            continue
        tensor = kv.groups[s.group][s.member]
        rows = tensor.view(tensor.shape[0], -1).view(torch.uint8)
        part = objects[:, s.offset : s.end]
        if s.row_bytes % 8 == 0:  # sections begin at multiples of 64 bytes
            rows, part = rows.view(torch.int64), part.view(torch.int64)
        found.append((rows, pages[s.group], part.unflatten(1, (s.rows, -1))))
    return found
