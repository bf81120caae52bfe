"""A step as its layers see it: rows, angles, windows, caches, and what one layer hands to later ones.

Everything here is made once a step from the batch. No layer changes it, except that selections and candidates are added by the
layers that make them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F

from ...kernels.cache_rows import PagedRows, StepRows
from ...kernels.linear import row_bucket
from ...kernels.rope import RopeTable
from ...kernels.state_replica import save_replica
from ...kernels.window_rows import WindowPlan
from ..base import ForwardBatch, StateRows
from .caches import CachePlan

Angles = tuple[torch.Tensor, torch.Tensor]
"""cos and sin ``[T, rope / 2]``."""


@dataclass(frozen=True)
class RopeTables:
    """Angles of layers that read their window only, and of all others."""

    main: RopeTable
    compress: RopeTable


@dataclass(frozen=True)
class LayerRows:
    """Rows that a run of layers works on: all of a step, or those the decoder runs."""

    step: StepRows
    window: WindowPlan
    main: Angles
    compress: Angles
    real: int
    """Rows that are not padding; they are the first ones."""
    image: torch.Tensor | None = None
    """bool ``[T]``: rows of images; None = there are none."""

    @classmethod
    def make(cls, step: StepRows, real: int, floor: torch.Tensor, caches: CachePlan, window: int, ropes: RopeTables) -> LayerRows:
        """``floor`` int64 ``[T]``: no row sees window rows below it."""
        return cls(
            step=step,
            window=WindowPlan(step, window, caches.ring, floor),
            main=ropes.main.pair_cos_sin(step.pos),
            compress=ropes.compress.pair_cos_sin(step.pos),
            real=real,
        )


@dataclass
class Step:
    """See the module's note. ``T`` padded rows, ``n`` sequences."""

    ids: torch.Tensor
    """int64 ``[T]``."""
    slots: Mapping[int, torch.Tensor]
    """By entries of a page: KV slot of each row int64 ``[T]``, 0 = writes to the null page."""
    encoder: LayerRows
    decoder: LayerRows
    chosen: torch.Tensor | None
    """int64 ``[D]``: rows of the step that the decoder runs, padded with row 0; None = all."""
    kv: Mapping[str, torch.Tensor]
    state: Mapping[str, torch.Tensor]
    """Fields of the state, ``[slots, ...]``."""
    block_table: torch.Tensor
    max_len: int
    selections: dict[int, torch.Tensor] = field(default_factory=dict)
    """int32 ``[rows, k]`` by the layer that selected."""
    pool: torch.Tensor | None = None
    """Candidate blocks bool ``[rows, blocks]``."""

    def mark_images(self, image: torch.Tensor) -> None:
        """Notes which of all rows, bool ``[T]``, are those of images."""
        self.encoder = replace(self.encoder, image=image)
        self.decoder = replace(self.decoder, image=image if self.chosen is None else image.index_select(0, self.chosen))

    def entries(self, layer: int, caches: CachePlan) -> PagedRows:
        """Compressed entries of a source."""
        return PagedRows(self.kv[f"layers.{layer}.kv"], self.block_table, caches.entry)

    def index_keys(self, layer: int, caches: CachePlan) -> PagedRows:
        """Index keys of a source."""
        return PagedRows(self.kv[f"layers.{layer}.index"], self.block_table, caches.index_key)


def _pad(x: torch.Tensor, rows: int) -> torch.Tensor:
    missing = rows - x.shape[0]
    return F.pad(x, (0, missing)) if missing else x


def _rows(pos: torch.Tensor, row_seq: torch.Tensor, cu_q: torch.Tensor, state_row: torch.Tensor, rows: int) -> StepRows:
    """Padded to ``rows``; padding belongs to sequence 0 at position 0 and is never stored."""
    return StepRows(pos=_pad(pos, rows), row_seq=_pad(row_seq, rows), cu_q=cu_q, state_row=state_row)


def _decoder_floor(state: StateRows, step: StepRows) -> torch.Tensor:
    """int64 ``[T]``: rows at ``decoder_from`` or above see nothing below it, those below keep windows of their own."""
    exists = state.floor[:, 1].long().index_select(0, step.row_seq)
    whole = state.decoder_from.long().index_select(0, step.row_seq)
    return torch.where(step.pos >= whole, torch.maximum(exists, whole), exists)


def make_step(batch: ForwardBatch, kv: Mapping[str, torch.Tensor], caches: CachePlan, window: int, ropes: RopeTables, quantum: int) -> Step:
    """From a batch with state; rows are padded as ``kernels.linear`` wants them, to a multiple of ``quantum``."""
    state = batch.state
    if state is None:
        raise ValueError("a model with state needs a batch that says where it is (ForwardBatch.state)")
    real = batch.ids.shape[0]
    rows = row_bucket(real, quantum)
    step = _rows(batch.pos, state.row_seq, batch.cu_q, state.state_row, rows)
    encoder = LayerRows.make(step, real, state.floor[:, 0].long().index_select(0, step.row_seq), caches, window, ropes)
    part, chosen = step, None
    if state.decoder_rows is not None and state.decoder_cu_q is not None:
        real = state.decoder_rows.shape[0]
        kept = row_bucket(real, quantum)
        pos, row_seq = (x.index_select(0, state.decoder_rows) for x in (batch.pos, state.row_seq))
        part = _rows(pos, row_seq, state.decoder_cu_q, state.state_row, kept)
        chosen = _pad(state.decoder_rows, kept)
    sizes = list(dict.fromkeys(entries for _, entries in caches.sources))
    return Step(
        ids=_pad(batch.ids, rows),
        slots={entries: _pad(slots.clamp_min(0), rows) for entries, slots in zip(sizes, batch.slots, strict=True)},
        encoder=encoder,
        decoder=LayerRows.make(part, real, _decoder_floor(state, part), caches, window, ropes),
        chosen=chosen,
        kv=kv,
        state=caches.views(kv["state0"]),
        block_table=batch.block_table,
        max_len=batch.max_len,
    )


def save_states(batch: ForwardBatch, rejected: torch.Tensor | None, state: torch.Tensor, caches: CachePlan) -> None:
    """Copies the state of sequences that passed a page's boundary to its replica, see ``models.base.StatefulModel.end_step``.

    ``state`` uint8 ``[slots, bytes]``.
    """
    rows = batch.state
    if rows is None or not rows.crossing.shape[0]:
        return
    mine = rows.crossing
    end = batch.seq_len.index_select(0, mine)
    start = end - (batch.cu_q[1:] - batch.cu_q[:-1]).index_select(0, mine)
    if rejected is not None:
        end = end - rejected.index_select(0, mine)
    slots = rows.state_row.index_select(0, mine)
    save_replica(caches.replica_rings(state), slots, start, end, caches.page_tokens, caches.backtracking)
