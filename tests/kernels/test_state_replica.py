"""Copies at a boundary: bytes of a run that stopped there, whatever came after it in the step."""

from __future__ import annotations

import itertools

import pytest
import torch

from deepinfer.kernels.state_replica import ReplicaRing, save_replica

CUT, WINDOW, REACH = 16, 8, 6
RING = WINDOW + REACH


class State:
    """Three fields in one byte row per slot, live and replica, seen through typed views as a model sees them."""

    def __init__(self, slots: int, device: str) -> None:
        self.bytes = torch.full((slots, 2 * 512), 255, dtype=torch.uint8, device=device)
        self.live, self.replica = (self._views(start) for start in (0, 512))

    def _views(self, start: int) -> list[torch.Tensor]:
        window = self.bytes[:, start : start + RING * 10].unflatten(1, (RING, 10))
        ids = self.bytes[:, start + 144 : start + 144 + 9 * 8].view(torch.int64)
        pending = self.bytes[:, start + 216 : start + 216 + 8 * 2 * 4 * 4].view(torch.float32).unflatten(1, (8, 2, 4))
        return [window, ids, pending]

    def rings(self) -> list[ReplicaRing]:
        return [ReplicaRing(live, kept, keep) for live, kept, keep in zip(self.live, self.replica, (WINDOW, 3, 0), strict=True)]

    def write(self, slot: int, position: int, value: int) -> None:
        self.live[0][slot, position % RING] = value % 251
        self.live[1][slot, position % 9] = value
        self.live[2][slot, position % 8] = float(value)

    def kept(self, slot: int) -> torch.Tensor:
        return self.bytes[slot, 512:]


def undrafted(boundary: int, device: str) -> torch.Tensor:
    """Replica of a sequence that stopped at ``boundary``, written down from the definition."""
    state = State(1, device)
    state.bytes[:, 512:][:, : RING * 10] = 0
    for view in state.replica:
        view.zero_()
    for position in range(max(0, boundary - WINDOW), boundary):
        state.replica[0][0, position % RING] = (1000 + position) % 251
    for position in range(boundary - 3, boundary):
        state.replica[1][0, position % 9] = 1000 + position
    return state.kept(0)


@pytest.mark.parametrize("first", range(9, 17))
def test_every_accept_pattern_across_a_boundary_keeps_the_same_bytes(first: int, device: str) -> None:
    """Steps of one token and five drafts of which any number is taken: the copy is that of a run without drafts."""
    expected = undrafted(CUT, device)
    for pattern in itertools.product(range(1, 7), repeat=2):
        state = State(3, device)
        for position in range(first):
            state.write(2, position, 1000 + position)
        length = first
        for taken in pattern:
            for offset in range(6):
                state.write(2, length + offset, 1000 + length + offset if offset < taken else 7)
            before, length = length, length + taken
            save_replica(
                state.rings(),
                torch.tensor([2], device=device),
                torch.tensor([before], device=device),
                torch.tensor([length], device=device),
                CUT,
                REACH,
            )
        assert torch.equal(state.kept(2), expected if length >= CUT > first else torch.full_like(expected, 255))


def test_each_sequence_decides_for_itself(device: str) -> None:
    """Crossing, not crossing, at the boundary, too far past it, two boundaries at once, in one call of any order."""
    state = State(8, device)
    spans = {1: (14, 16), 2: (14, 15), 3: (16, 20), 4: (3, 23), 5: (3, 38), 6: (0, 16), 7: (15, 21)}
    for slot, (_, after) in spans.items():
        for position in range(after):
            state.write(slot, position, 1000 + position)
    slots = [5, 2, 7, 1, 4, 6, 3]
    before, after = (torch.tensor([spans[slot][end] for slot in slots], dtype=torch.int32, device=device) for end in (0, 1))
    save_replica(state.rings(), torch.tensor(slots, device=device), before, after, CUT, REACH)
    untouched = torch.full((512,), 255, dtype=torch.uint8, device=device)
    expected = {1: 16, 2: None, 3: None, 4: None, 5: 32, 6: 16, 7: 16}
    for slot, boundary in expected.items():
        assert torch.equal(state.kept(slot), untouched if boundary is None else undrafted(boundary, device)), slot
    assert torch.equal(state.kept(7), state.kept(1))


def test_short_boundaries_and_short_rings(device: str) -> None:
    """A boundary nearer to the start than the window keeps what there is; a ring without room for later rows is refused."""
    state = State(2, device)
    for position in range(4):
        state.write(1, position, 1000 + position)
    one = torch.tensor([1], device=device)
    save_replica(state.rings(), one, one - 1, one + 3, 4, REACH)
    assert torch.equal(state.kept(1), undrafted(4, device))
    narrow = torch.zeros(2, 13, 1, device=device)
    with pytest.raises(ValueError, match="a ring of 13 places cannot keep 8 rows while 6 newer ones are written"):
        save_replica([ReplicaRing(narrow, narrow.clone(), 8)], one, one, one, 4, 6)
