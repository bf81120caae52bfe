"""Slices of states that also go to the store: the near tier is asked and told as ever, and what is new there is offered onwards.

Owns: that a slice is offered once. Never touches: the near tier's slices, when they reach the store.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from deepinfer.kvcache.state_slices import SliceTier, Told

Offered = Callable[[bytes, bytes], None]


class StoredSlices:
    """A `SliceTier` in front of a store.

    Args:
        near: where slices are kept for this engine, and those that are fetched are put.

    Attributes:
        offered: called with key and bytes of each slice that the engine has made; on its step thread.
    """

    def __init__(self, near: SliceTier) -> None:
        self.near = near
        self.offered: Offered | None = None

    @property
    def kind(self) -> Literal["host", "store"]:
        """See `SliceTier.kind`."""
        return self.near.kind

    def put(self, key: bytes, data: bytes) -> bool:
        """See `SliceTier.put`. One that the near tier has no room for goes to the store all the same."""
        known = self.near.has(key)
        kept = self.near.put(key, data)
        if not known and self.offered is not None:
            self.offered(key, data)
        return kept

    def get(self, key: bytes) -> bytes | None:
        """See `SliceTier.get`."""
        return self.near.get(key)

    def has(self, key: bytes) -> bool:
        """See `SliceTier.has`."""
        return self.near.has(key)

    def watch(self, told: Told) -> Callable[[], None]:
        """See `SliceTier.watch`."""
        return self.near.watch(told)
