"""From a ring slot to what a forward takes: the device block table and views of the step's rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from deepinfer.models.base import ForwardBatch, StateRows
from deepinfer.worker.device_drafts import Chosen, DraftTable
from deepinfer.worker.resolve import SlotMap, StepRows, StepTokens, owner, resolve
from deepinfer.worker.state_places import StateCounts, state_rows
from deepinfer.worker.step_ring import Header, RingSlot


@dataclass(frozen=True)
class SampledRows:
    """What sampling needs of a step's rows as they were planned; tensors on the device.

    ``ids`` ``[T]``: resolved, drafts in place; ``rng_pos`` int64, position of the token that each sampling row draws; ``chosen``: which
    rows run, ``None`` = all.
    """

    ids: torch.Tensor
    rng_pos: torch.Tensor
    chosen: Chosen | None = None


class InputBatch:
    """Keeps the block table ``int32 [slots, columns]`` on the device and builds each step's :class:`ForwardBatch`.

    Args:
        num_slots: state slots, the null slot included; a sequence's row is its state slot.
        columns: columns of the table over all groups.
        page_tokens: tokens of a page when there is one paged group; the gathered table is then cut to the longest context.
        slot_maps: one per `slots{j}` field of a step.
        device: where the table lives.
    """

    def __init__(self, num_slots: int, columns: int, page_tokens: int | None, slot_maps: Sequence[SlotMap], device: torch.device) -> None:
        self.table = torch.zeros((num_slots, columns), dtype=torch.int32, device=device)
        self._page_tokens = page_tokens
        self._slot_maps = list(slot_maps)
        self._counting = np.arange(num_slots, dtype=np.int32)

    def apply_deltas(self, slot: RingSlot, header: Header) -> None:
        """Stores this step's (row, column, page) triples; no cell is named twice in a step, so their order is free."""
        if header.deltas:
            row, column, page = slot.d["table_delta"][: 3 * header.deltas].view(-1, 3).unbind(1)
            self.table[row.long(), column.long()] = page

    def build(
        self,
        slot: RingSlot,
        header: Header,
        before: StepTokens | None = None,
        counts: StateCounts | None = None,
        drafts: DraftTable | None = None,
    ) -> tuple[ForwardBatch, SampledRows]:
        """The forward's arguments of a step whose inputs have been uploaded and whose deltas have been applied, and what sampling
        needs of it. ``before``: what the preceding step left, for what is unresolved; ``counts``: of the step's own fields, of a
        model with state; ``drafts``: those of a model that makes them.
        """
        d, rows, n = slot.d, header.rows, header.seqs
        table = self.table.index_select(0, d["state_row"][:n])
        if self._page_tokens is not None:
            table = table[:, : max(1, -(-header.max_len // self._page_tokens))]
        step = StepRows(
            ids=d["ids"][:rows],
            pos=d["pos"][:rows].long(),
            slots=[d[f"slots{j}"][:rows].long() for j in range(len(self._slot_maps))],
            seq_len=d["seq_len"][:n],
            rng_pos=d["rng_pos"][: header.samples].long() if header.samples else d["pos"].new_empty(0, dtype=torch.int64),
            table=table,
        )
        if header.unresolved:
            offsets = d["cu_q"][: n + 1], d["sample_off"][: n + 1]
            in_order = rows == n and np.array_equal(slot.a["source_row"][:n], self._counting[:n])
            resolve(step, before, d["prev_seq"][:n], d["source_row"][:n], *offsets, self._slot_maps, in_order)
        cu_q, row = d["cu_q"][: n + 1], None
        chosen: Chosen | None = None
        if drafts is not None and header.draft_rows:
            row, slots = owner(cu_q, rows), d["state_row"][:n].long()
            step.ids = drafts.fill(step.ids, step.pos, slots.index_select(0, row))
            if header.cut:
                chosen = drafts.choose(step, cu_q, slots, header.decodes, header.cut)
        sampled = SampledRows(step.ids, step.rng_pos, chosen)
        if chosen is not None:
            row, cu_q = owner(chosen.cu_q, rows - header.cut), chosen.cu_q
            step = StepRows(
                ids=step.ids.index_select(0, chosen.rows),
                pos=step.pos.index_select(0, chosen.rows),
                slots=[slots.index_select(0, chosen.rows) for slots in step.slots],
                seq_len=step.seq_len - chosen.cuts,
                rng_pos=step.rng_pos,
                table=table,
            )
        batch = ForwardBatch(
            ids=step.ids.long(),
            pos=step.pos,
            slots=step.slots,
            cu_q=cu_q,
            seq_len=step.seq_len,
            block_table=table,
            num_decodes=header.decodes,
            max_q=header.max_q,
            max_len=header.max_len,
            cu_q_host=slot.a["cu_q"][: n + 1].tolist(),
            seq_len_host=slot.a["seq_len"][:n].tolist(),
        )
        if counts is not None:
            batch.state = state_rows(slot, header, counts, owner(cu_q, len(step.ids)) if row is None else row, header.cut, cu_q)
        return batch, sampled


def one_sequence(
    ids: Sequence[int],
    page_tokens: Sequence[int],
    columns: Sequence[int],
    slot_maps: Sequence[tuple[int, int]],
    device: torch.device,
    state: bool = False,
) -> ForwardBatch:
    """A batch of one whole sequence on pages 1, 2, 3, … of every group and state slot 1, for a forward outside the running batch.

    Args:
        ids: the sequence.
        page_tokens: tokens of a page, per paged group.
        columns: block-table columns, per paged group; a longer sequence gets more of them if there is one group only.
        slot_maps: per slot map its (group, entries of a page).
        state: whether the model has state groups; nothing is truncated then.
    """
    n = len(ids)
    pos = torch.arange(n)
    slots = []
    for group, e in slot_maps:
        t = page_tokens[group]
        ratio = t // e
        slot = (pos // t + 1) * e + (pos % t) // ratio
        slots.append(torch.where((pos + 1) % ratio == 0, slot, -1).to(device))
    sections = []
    for t, width in zip(page_tokens, columns, strict=True):
        pages = torch.arange(1, -(-n // t) + 1, dtype=torch.int32)
        pad = 0 if len(page_tokens) == 1 else max(0, width - len(pages))
        sections.append(torch.nn.functional.pad(pages, (0, pad)))
    table = torch.cat(sections).unsqueeze(0)
    return ForwardBatch(
        ids=torch.tensor(ids, dtype=torch.int64, device=device),
        pos=pos.to(device),
        slots=slots,
        cu_q=torch.tensor([0, n], dtype=torch.int32, device=device),
        seq_len=torch.tensor([n], dtype=torch.int32, device=device),
        block_table=table.to(device),
        num_decodes=0,
        max_q=n,
        max_len=n,
        cu_q_host=[0, n],
        seq_len_host=[n],
        state=_one_state(n, device) if state else None,
    )


def _one_state(rows: int, device: torch.device) -> StateRows:
    return StateRows(
        row_seq=torch.zeros(rows, dtype=torch.int64, device=device),
        state_row=torch.ones(1, dtype=torch.int64, device=device),
        floor=torch.zeros((1, 2), dtype=torch.int32, device=device),
        decoder_from=torch.zeros(1, dtype=torch.int32, device=device),
        crossing=torch.empty(0, dtype=torch.int64, device=device),
    )
