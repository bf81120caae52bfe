"""Steps with prompts as graphs: which steps are, and what the host writes for one (docs/architecture.md, "Prompt graphs").

Owns: the recorded steps of a runner, the rows and units they work on. Never touches: what else a step does before and after.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch

from deepinfer.errors import ModelContractError
from deepinfer.kernels.begin_step import DecodeFields, StepWords, begin_step_on
from deepinfer.kernels.begin_step.words import DELTAS, HEAD, IDS, POS, ROWS, SLOTS, SOURCE
from deepinfer.kernels.paged_attention.units import most_units, unit_arrays
from deepinfer.models.base import Model, PromptGraphModel, PromptRows
from deepinfer.models.contract import check_hidden
from deepinfer.worker.graphs import Recorder, Replay, record_all
from deepinfer.worker.step import Step
from deepinfer.worker.step_ring import KIND_MIXED, KIND_PREFILL, RingSlot, StepRing

_WORDS, _FIRST, _COUNT, _ROW = "prompt_words", "unit_first", "unit_count", "unit_row"


def prompt_buckets(model: Model, max_rows: int) -> Sequence[int]:
    """Row counts to record steps with prompts for, where the model's decode steps could be recorded; none where it wants none.

    Raises:
        ModelContractError: the model gives something else than ascending row counts.
    """
    if not isinstance(model, PromptGraphModel):
        return []
    buckets = model.prompt_rows(max_rows)
    if list(buckets) != sorted(set(buckets)) or (buckets and buckets[0] < 1) or (len(buckets) > 1 and buckets[-2] >= max_rows):
        raise ModelContractError(
            f"{type(model).__name__}.prompt_rows({max_rows}) must give ascending row counts from 1 on, at most one of them {max_rows} or "
            f"more; found {list(buckets)}"
        )
    return buckets


class PromptLayout:
    """Where the words of such a step are in a ring slot: rows as ``begin_step`` takes them, and units.

    Args:
        buckets: row counts, ascending.
        maps: slot maps of a step.
        max_seqs: most sequences of a step.
        unit_rows: most rows of a unit.
    """

    def __init__(self, buckets: Sequence[int], maps: int, max_seqs: int, unit_rows: int) -> None:
        self.words = StepWords(buckets[-1], maps, 0)
        self.unit_rows = unit_rows
        self.units = {rows: most_units(rows, max_seqs, unit_rows) for rows in buckets}

    @property
    def fields(self) -> list[tuple[str, int]]:
        """Fields of the ring as (name, words); rows of the table are int64."""
        most = max(self.units.values())
        return [(_FIRST, most), (_COUNT, most), (_ROW, 2 * most), (_WORDS, self.words.total)]


class PromptGraphs:
    """The recorded steps with prompts of one runner.

    Args:
        model: what computes.
        buckets: row counts, ascending; ``layout`` is theirs, its fields are ``ring``'s.
        table: int32 ``[state slots, W]``, the block table; ``kv``: the KV tensors by name.
        newest: int32 ``[m]``, where the newest tokens are; shared with the recorded decode steps.
        recorder: makes the graphs.
        device: where all of it lives.

    Attributes:
        buckets: row counts, ascending.
        replays: replays so far.
    """

    def __init__(
        self,
        model: PromptGraphModel,
        buckets: Sequence[int],
        layout: PromptLayout,
        ring: StepRing,
        table: torch.Tensor,
        kv: dict[str, torch.Tensor],
        newest: torch.Tensor,
        recorder: Recorder,
        device: torch.device,
    ) -> None:
        self._model, self._layout, self._table, self._kv = model, layout, table, kv
        self._newest, self._recorder = newest, recorder
        self.buckets = list(buckets)
        self._input = ring.slots[0].d
        self._fields = DecodeFields.make(layout.words, device)
        self._begin_step = begin_step_on(device)
        self._hidden: torch.Tensor | None = None
        self._replays: dict[int, Replay] = {}
        self._host = [_HostWords(slot, layout.words) for slot in ring.slots]
        self.replays = 0

    def counts(self) -> dict[str, int]:
        """``buckets`` of rows, and ``replays`` so far."""
        return {"buckets": len(self.buckets), "replays": self.replays}

    # Recording

    def record(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Records every bucket, the largest first, on padding alone; part of the device's work, before any step.

        ``progress``: called with (recorded, in all).
        """
        self._replays = record_all(self._recorder, {rows: partial(self._run, rows) for rows in reversed(self.buckets)}, progress)

    @torch.inference_mode()
    def _run(self, count: int) -> None:
        """One step of ``count`` rows, up to hidden states."""
        self._begin_step(self._input[_WORDS], self._layout.words, self._newest, self._table, self._fields, count, 0)
        wide, units = self._fields.wide[:, :count], self._layout.units[count]
        rows = PromptRows(
            ids=wide[0],
            pos=wide[POS - IDS],
            slots=list(wide[SLOTS - IDS :]),
            block_table=self._table,
            unit_first=self._input[_FIRST][:units],
            unit_count=self._input[_COUNT][:units],
            unit_row=self._input[_ROW].view(torch.int64)[:units],
        )
        hidden = self._model.prompt_step(rows, self._kv)
        check_hidden(self._model, hidden, count)
        if self._hidden is None:
            self._hidden = hidden.new_zeros((self.buckets[-1], hidden.shape[1]))
        self._hidden[:count].copy_(hidden)

    # The launching thread's part

    def bucket(self, step: Step) -> int:
        """Rows of the graph that the step is; 0 = none."""
        h = step.header
        if h.kind not in (KIND_PREFILL, KIND_MIXED) or h.draft_rows or step.images or not 0 < h.rows <= self.buckets[-1]:
            return 0
        return self.buckets[bisect_left(self.buckets, h.rows)]

    def fill(self, step: Step) -> None:
        """Writes the words of a step of which ``bucket`` said that it is a graph, once it is known where its newest tokens are."""
        h, a, host = step.header, step.slot.a, self._host[step.index]
        n, rows = h.seqs, h.rows
        host.head[ROWS], host.head[DELTAS] = rows, 0
        host.fields[SOURCE, :rows] = -1
        for field, name in host.taken:
            host.fields[field, :rows] = a[name][:rows]
        borders = a["cu_q"][: n + 1]
        if h.unresolved:
            drawn = np.flatnonzero(a["prev_seq"][:n] >= 0)
            host.fields[SOURCE, borders[drawn]] = a["source_row"][drawn]
        first, count, sequence = unit_arrays(borders, self._layout.unit_rows)
        units = len(first)
        host.first[:units], host.count[:units], host.row[:units] = first, count, a["state_row"][sequence]
        host.count[units : self._layout.units[step.prompts]] = 0

    # The device's part

    def replay(self, step: Step) -> torch.Tensor:
        """The graph of a step whose words have been uploaded; gives hidden states ``[T, hidden]``, which the next replay overwrites."""
        before = None if step.before is None else step.before.left
        if step.header.unresolved and before is not None and before.tokens is not self._newest:
            self._newest[: len(before.tokens)].copy_(before.tokens)
        self._replays[step.prompts]()
        self.replays += 1
        assert self._hidden is not None
        return self._hidden[: step.header.rows]


class _HostWords:
    """Views of what one ring slot's host memory has for a graph."""

    __slots__ = ("count", "fields", "first", "head", "row", "taken")

    def __init__(self, slot: RingSlot, layout: StepWords) -> None:
        words = slot.a[_WORDS]
        self.head = words[:HEAD]
        self.fields = words[HEAD : layout.first_delta].reshape(layout.num_fields, layout.stride)
        self.first, self.count, self.row = slot.a[_FIRST], slot.a[_COUNT], slot.a[_ROW].view(np.int64)
        self.taken = [(IDS, "ids"), (POS, "pos"), *((SLOTS + j, f"slots{j}") for j in range(layout.maps))]
