"""The second part of a step of a model that drafts: behind its tokens it makes the drafts of every sequence that drew one.

Drafts are drawn as the model's own tokens are: under the request's bias, penalties, temperature and filters, with the random number of
their position. The same number picks the same token from distributions that agree, so that drafts of sampled requests are right about as
often as the two agree, and what is verified stays what a run without drafts draws.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from deepinfer.kernels.sample.columns import TOP_K
from deepinfer.models.base import Drafter, ForwardBatch, Model, NewTokens, RunLogitsModel
from deepinfer.models.contract import check_logits
from deepinfer.worker.device_drafts import Chosen, DraftTable
from deepinfer.worker.input_batch import SampledRows
from deepinfer.worker.kv_cache import KVCache
from deepinfer.worker.sampler import Sampler, SampleRows
from deepinfer.worker.sampling_state import DRAWS, EDITS, RANKED, SamplingState
from deepinfer.worker.step_ring import FLAG_GRAMMAR, FLAG_SAMPLES, Header, RingSlot


@dataclass(frozen=True)
class RanStep:
    """A step whose tokens are drawn: ``hidden`` ``[T', d]``, ``tokens`` int32 ``[r]``, ``accepted`` int32 ``[n]`` (``None`` = each sampling
    row made its token)."""

    batch: ForwardBatch
    hidden: torch.Tensor
    sampled: SampledRows
    slot: RingSlot
    header: Header
    tokens: torch.Tensor
    accepted: torch.Tensor | None


@dataclass(frozen=True)
class Places:
    """Counts of the ring fields of :meth:`ModelDrafts.fields`, and what the sampler asks of the host."""

    count: int
    flags: int
    edit: int
    plain: int
    ranked: int
    max_top_k: int


def choose_places(slot: RingSlot, header: Header, sampling: SamplingState) -> Places | None:
    """Which sequences of a step to draft behind, and which of them need more than a maximum; ``None`` = nobody draws a token."""
    a = slot.a
    # masks of a grammar come from the host, which does not know the drafts
    drawing = np.flatnonzero(a["seq_flags"][: header.seqs] & (FLAG_SAMPLES | FLAG_GRAMMAR) == FLAG_SAMPLES)
    count = len(drawing)
    if not count:
        return None
    a["draft_seq"][:count] = drawing
    slots = a["state_row"][drawing]
    flags = sampling.flags[slots]
    ranked = np.flatnonzero(flags & RANKED)
    edit, plain = np.flatnonzero(flags & EDITS), np.flatnonzero(((flags & DRAWS) != 0) & ((flags & RANKED) == 0))
    for name, rows in (("draft_edit", edit), ("draft_plain", plain), ("draft_ranked", ranked)):
        a[name][: len(rows)] = rows
    top_k = int(sampling.host[slots[ranked], TOP_K].max()) if len(ranked) else 0
    return Places(count, int(np.bitwise_or.reduce(flags)), len(edit), len(plain), len(ranked), top_k)


def head_logits(model: Model, hidden: torch.Tensor, narrow: bool) -> torch.Tensor:
    """Logits ``[R, vocab]`` of ``hidden`` ``[R, d]``, checked: float32, or as the model's head gives them if that is enough
    (``narrow``)."""
    if narrow and isinstance(model, RunLogitsModel):
        logits = model.run_logits(hidden)
        check_logits(model, logits, len(hidden), model.dtype)
    else:
        logits = model.logits(hidden)
        check_logits(model, logits, len(hidden))
    return logits


def sampling_logits(
    model: Model, hidden: torch.Tensor, slot: RingSlot, header: Header, chosen: Chosen | None, narrow: bool = False
) -> torch.Tensor:
    """Logits ``[r, vocab]`` of a step's sampling rows (see ``head_logits``), ``hidden`` ``[T', d]`` of the rows that ran; a row that did
    not run has those of some other row."""
    sample_row, r = slot.d["sample_row"], header.samples
    if chosen is None:
        # Where every row samples, they are the rows themselves, in order.
        return head_logits(model, hidden if r == header.rows else hidden.index_select(0, sample_row[:r]), narrow)
    decoding = int(slot.a["cu_q"][header.decodes])  # rows of decoding sequences as planned: each of them samples
    ran, all_ran = decoding - header.cut, r - header.cut
    rows = torch.cat([torch.arange(ran, device=hidden.device), sample_row[decoding:r].long() - header.cut])
    logits = head_logits(model, hidden.index_select(0, rows), narrow)
    return logits.index_select(0, torch.cat([chosen.place[:decoding], torch.arange(ran, all_ran, device=hidden.device)]))


class ModelDrafts:
    """One model's drafts.

    Args:
        model: must be a :class:`~deepinfer.models.base.Drafter`; ``TypeError`` otherwise.
        count: drafts of a sequence and step.
        temperatures: of the confidence in each draft; empty = 1.
        slots: state slots, the null slot included.
        device: where drafts are kept.
    """

    def __init__(self, model: Model, count: int, temperatures: tuple[float, ...], slots: int, device: torch.device) -> None:
        if not isinstance(model, Drafter):
            raise TypeError(f"{type(model).__name__} makes no drafts")
        self._model, self._count = model, count
        self.table = DraftTable(slots, count, temperatures, device)

    @staticmethod
    def fields(seqs: int) -> list[tuple[str, int]]:
        """Fields of the ring that :func:`choose_places` fills."""
        return [(name, seqs) for name in ("draft_seq", "draft_edit", "draft_plain", "draft_ranked")]

    def make(self, step: RanStep, places: Places, kv: KVCache, sampler: Sampler) -> None:
        """Makes and keeps the drafts of ``places``, behind everything else of the step."""
        d, accepted, header = step.slot.d, step.accepted, step.header
        sequence = d["draft_seq"][: places.count].long()
        borders = d["sample_off"][: header.seqs + 1].long()
        newest = borders[sequence + 1] - 1
        if accepted is not None:
            newest = borders[sequence] + accepted[sequence].long() - 1
        position = step.sampled.rng_pos[newest]
        row = d["sample_row"][newest].long()
        row = row if step.sampled.chosen is None else step.sampled.chosen.place[row]
        slots = d["state_row"][sequence].long()

        def picked(name: str, count: int) -> torch.Tensor | None:
            return d[name][:count].long() if count else None

        def draw(logits: torch.Tensor, nth: int, before: torch.Tensor) -> torch.Tensor:
            if not places.flags:
                return sampler.greedy(logits).long()
            rows = SampleRows(
                slots=slots,
                positions=position + 1 + nth,
                flags=places.flags,
                edit=picked("draft_edit", places.edit),
                plain=picked("draft_plain", places.plain),
                ranked=picked("draft_ranked", places.ranked),
                max_top_k=places.max_top_k,
            )
            return sampler.draw(logits, rows, before)

        new = NewTokens(sequence, step.tokens[newest].long(), position, row)
        made = self._model.draft(step.batch, step.hidden, new, kv.tensors, draw, self._count)
        self.table.put(slots, position + 1, made.ids, made.confidence)
