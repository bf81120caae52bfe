"""Copies of pages as work of the device.

Owns: their place in the device's order (behind what was launched, ahead of what will be), and the wait for them from another thread.
Never touches: which pages.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from deepinfer.kvcache.layout import KvLayout
from deepinfer.kvcache.pages import Pages, host_buffer, read_pages, write_pages

if TYPE_CHECKING:
    from deepinfer.worker.runner import ModelRunner


class PageCopies:
    """Copies between a runner's pages and host memory. Calls come from the step thread and do not wait.

    Args:
        runner: whose KV.
        layout: of that KV.
    """

    def __init__(self, runner: ModelRunner, layout: KvLayout) -> None:
        self._runner, self._layout = runner, layout
        self._pinned = runner.device.type == "cuda"

    def buffer(self, tokens: int) -> torch.Tensor:
        """Host memory for a payload of so many positions."""
        return host_buffer(self._layout.num_bytes(tokens), self._pinned)

    def read(self, tokens: int, pages: Pages, state_slot: int, cut: slice | None) -> Callable[[], torch.Tensor]:
        """Starts a copy to the host; the result waits for it, on any thread, and gives the payload."""
        into = self.buffer(tokens)
        wait = self._runner.in_order(lambda: read_pages(self._runner.kv, self._layout, tokens, pages, state_slot, into, cut))

        def result() -> torch.Tensor:
            wait()
            return into

        return result

    def write(self, tokens: int, pages: Pages, state_slot: int, payload: torch.Tensor, present: int) -> Callable[[], None]:
        """Starts a copy to the device, ahead of the next step; the result waits for it, on any thread, and raises what it raised."""
        return self._runner.in_order(lambda: write_pages(self._runner.kv, self._layout, tokens, pages, state_slot, payload, present))
