"""What a step says of the state slots of its sequences."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from deepinfer.worker.input_batch import InputBatch, one_sequence
from deepinfer.worker.resolve import SlotMap
from deepinfer.worker.state_places import StatePlaces, StateRules
from deepinfer.worker.step_ring import Header, RingSlot, StepRing

LAYOUT = [("header", 64), ("ids", 16), ("pos", 16), ("slots0", 16), ("cu_q", 5), ("seq_len", 4), ("state_row", 4)]
LAYOUT += [("swap_out_states", 8), ("swap_in_states", 8), ("clone_states", 8), ("tokens", 4), ("accepted", 4)]


def make(device: str, **rules: Any) -> tuple[StatePlaces, RingSlot]:
    places = StatePlaces(StateRules(**rules), slots=6, host_slots=3, max_seqs=4, max_rows=16)
    return places, StepRing(LAYOUT, places.fields, torch.device(device), pinned=device != "cpu").slots[0]


def fill(slot: RingSlot, sequences: list[tuple[int, int, int]], **header: int) -> Header:
    """A step of sequences (state slot, first position, rows)."""
    cu_q = np.concatenate([[0], np.cumsum([rows for _, _, rows in sequences])])
    n, rows = len(sequences), int(cu_q[-1])
    slot.a["cu_q"][: n + 1] = cu_q
    slot.a["seq_len"][:n] = [first + count for _, first, count in sequences]
    slot.a["state_row"][:n] = [row for row, _, _ in sequences]
    slot.a["pos"][:rows] = [first + i for _, first, count in sequences for i in range(count)]
    values: dict[str, Any] = dict.fromkeys(Header._fields, 0)
    return Header(**{**values, "rows": rows, "seqs": n, "max_len": 40, **header})


def test_decoder_rows_of_a_truncated_prompt_run_in_whichever_chunk_holds_them(device: str) -> None:
    places, slot = make(device, keep_tokens=6, compact=True)
    places.admit(2, prompt_tokens=10)
    places.admit(3, prompt_tokens=5)
    header = fill(slot, [(2, 0, 7), (3, 0, 5)])
    counts = places.describe(slot, header)
    slot.upload()
    batch, _ = InputBatch(6, 2, None, [SlotMap(0, 16, 16)], torch.device(device)).build(slot, header, None, counts)
    state = batch.state
    assert state is not None and state.decoder_rows is not None and state.decoder_cu_q is not None
    assert state.row_seq.tolist() == [0] * 7 + [1] * 5 and state.state_row.tolist() == [2, 3]
    assert state.decoder_from.tolist() == [4, 0] and state.floor.tolist() == [[0, 0], [0, 0]]
    assert state.decoder_rows.tolist() == [4, 5, 6, 7, 8, 9, 10, 11] and state.decoder_cu_q.tolist() == [0, 3, 8]
    header = fill(slot, [(2, 7, 3)])
    assert places.describe(slot, header).decoder_rows is None  # the rest is whole


def test_masking_leaves_no_row_out(device: str) -> None:
    places, slot = make(device, keep_tokens=6)
    places.admit(2, prompt_tokens=10)
    assert places.describe(slot, fill(slot, [(2, 0, 7)])).decoder_rows is None
    assert slot.a["decoder_from"][0] == 4


def test_what_is_known_follows_the_state(device: str) -> None:
    places, slot = make(device, keep_tokens=6)
    places.admit(2, prompt_tokens=106, encoder_floor=16, decoder_floor=32)
    header = fill(slot, [], swap_out_states=1)
    slot.a["swap_out_states"][:2] = [2, 1]
    places.move_out(slot, header)
    places.admit(2, prompt_tokens=3)  # another sequence takes the slot in the same step
    header = fill(slot, [(4, 40, 1), (5, 40, 1), (2, 0, 3)], swap_in_states=1, state_clones=1)
    slot.a["swap_in_states"][:2], slot.a["clone_states"][:2] = [1, 4], [4, 5]
    places.move_in(slot, header)
    places.describe(slot, header)
    assert slot.a["state_floor"][:6].tolist() == [16, 32, 16, 32, 0, 0]
    assert slot.a["decoder_from"][:3].tolist() == [100, 100, 0]


def test_only_sequences_that_may_pass_a_boundary_are_named(device: str) -> None:
    places, slot = make(device, cut=16, max_draft=5)
    for first, rows, unresolved, named in [
        (15, 1, 0, True),  # the row fills the block
        (14, 1, 0, False),
        (16, 1, 0, False),
        (13, 3, 0, True),
        (16, 1, 1, True),  # a draft of the step before may be taken back, so that this row is position 15 or earlier
        (21, 1, 1, False),
        (0, 15, 0, False),
        (2, 14, 0, True),
    ]:
        header = fill(slot, [(1, 40, 1), (2, first, rows)], unresolved=unresolved)
        counts = places.describe(slot, header)
        assert (1 in slot.a["crossing"][: counts.crossing]) is named, (first, rows, unresolved)
        assert 0 not in slot.a["crossing"][: counts.crossing]


def test_a_sequence_by_itself_is_whole(device: str) -> None:
    state = one_sequence([5, 6, 7], [16], [1], [(0, 16)], torch.device(device), state=True).state
    assert state is not None and state.row_seq.tolist() == [0, 0, 0] and state.state_row.tolist() == [1]
    assert state.decoder_rows is None and state.floor.tolist() == [[0, 0]]
    assert one_sequence([5], [16], [1], [(0, 16)], torch.device(device)).state is None
