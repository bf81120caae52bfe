"""What a step does to pages and states before its forward: copies to and from host memory, clones, slots to clear.

Owns: the KV tensors, their host pages and snapshots, and the order of the commands on them. Never touches: which ones a step has (the
core's plan says), sampling values, the block table.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from deepinfer.models.base import PagedGroup, StateGroup
from deepinfer.worker.host_pages import HostPages, HostSnapshots, sort_commands
from deepinfer.worker.kv_cache import KVCache
from deepinfer.worker.step import Step
from deepinfer.worker.step_ring import Header, RingSlot


class PageMoves:
    """Carries out the page and state commands of steps.

    Args:
        paged: the model's paged groups, ``num_pages`` their pages, ``state`` its state groups; ``num_slots``: rows of states.
        host_pages: host pages of each paged group for swapping, empty = none; ``host_slots``: host slots of state.
        snapshot_places: host places for snapshots of states.
        device: where the tensors are; ``pinned``: whether host buffers are page-locked.

    Attributes:
        kv: the device's tensors.
        host: host copies of pages and state rows, if there are any.
    """

    def __init__(
        self,
        paged: Sequence[PagedGroup],
        num_pages: Sequence[int],
        state: Sequence[StateGroup],
        num_slots: int,
        host_pages: Sequence[int],
        host_slots: int,
        snapshot_places: int,
        device: torch.device,
        pinned: bool,
    ) -> None:
        self.kv = KVCache(paged, num_pages, state, num_slots, device)
        self.host = HostPages(self.kv, host_pages, host_slots + 1, pinned) if any(host_pages) else None
        replica_at = [group.replica_at for group in state]
        self._snapshots = HostSnapshots(self.kv, replica_at, snapshot_places, pinned) if snapshot_places else None

    def close(self) -> None:
        """Nothing is moved any more."""
        if self.host is not None:
            self.host.close()

    def sort(self, step: Step) -> None:
        """On the launching thread: orders the swap commands for the copies, and counts their bytes."""
        h, a = step.header, step.slot.a
        if self.host is None or not (h.swap_out or h.swap_in or h.swap_out_states or h.swap_in_states):
            return
        out, back = a["swap_out"][: 3 * h.swap_out].reshape(-1, 3), a["swap_in"][: 3 * h.swap_in].reshape(-1, 3)
        sort_commands(out, 2)
        sort_commands(back, 1)
        states = h.swap_out_states + h.swap_in_states
        step.result.swapped_bytes = self.host.num_bytes(out, states) + self.host.num_bytes(back, 0)

    def save(self, step: Step) -> None:
        """Copies to the host, before anything of the step writes a page or a state."""
        slot, header = step.slot, step.header
        if step.result.swapped_bytes:
            self._swap_out(slot, header)
        if header.snapshot_out and self._snapshots is not None:  # before whoever was given the slot writes it
            words = 2 * header.snapshot_out
            self._snapshots.out(slot.a["snapshot_out"][:words].reshape(-1, 2), slot.d["snapshot_out"][:words].view(-1, 2))

    def fill(self, step: Step) -> None:
        """Clears, brings back and clones, once the block table is the step's."""
        slot, header = step.slot, step.header
        if header.zeroes:
            self.kv.zero_states(slot.d["zero_states"][: header.zeroes])
        if step.result.swapped_bytes:  # ahead of clones: a fork may begin in the step that brings its parent's pages back
            self._swap_in(slot, header)
        if header.snapshot_in and self._snapshots is not None:
            words = 2 * header.snapshot_in
            self._snapshots.back(slot.a["snapshot_in"][:words].reshape(-1, 2), slot.d["snapshot_in"][:words].view(-1, 2))
        if header.state_clones:
            self.kv.clone_states(slot.d["clone_states"][: 2 * header.state_clones].view(-1, 2))
        if header.block_clones:
            self.kv.clone_blocks(slot.d["clone_blocks"][: 3 * header.block_clones].view(-1, 3))

    def _swap_out(self, slot: RingSlot, header: Header) -> None:
        """Copies of victims, before anything writes the pages they leave."""
        assert self.host is not None
        pages, states = 3 * header.swap_out, 2 * header.swap_out_states
        if pages:
            self.host.swap_out(slot.a["swap_out"][:pages].reshape(-1, 3), slot.d["swap_out"][:pages].view(-1, 3))
        if states:
            self.host.swap_out_states(slot.a["swap_out_states"][:states].reshape(-1, 2), slot.d["swap_out_states"][:states].view(-1, 2))

    def _swap_in(self, slot: RingSlot, header: Header) -> None:
        """Copies back, once the pages are theirs."""
        assert self.host is not None
        pages, states = 3 * header.swap_in, 2 * header.swap_in_states
        if pages:
            self.host.swap_in(slot.a["swap_in"][:pages].reshape(-1, 3), slot.d["swap_in"][:pages].view(-1, 3))
        if states:
            self.host.swap_in_states(slot.a["swap_in_states"][:states].reshape(-1, 2), slot.d["swap_in_states"][:states].view(-1, 2))
