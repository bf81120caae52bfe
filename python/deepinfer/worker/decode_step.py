"""Decode steps as graphs: which steps are, what one consists of, and what the host writes for it (docs/architecture.md, "Decode graphs").

Owns: the recorded steps of a runner, the rows they work on, the newest tokens. Never touches: what else a step does before and after.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch

from deepinfer.distributed import ExpertGroup
from deepinfer.errors import ModelContractError
from deepinfer.kernels.begin_step import DecodeFields, StepWords, begin_step_on
from deepinfer.kernels.begin_step.words import DELTAS, HEAD, IDS, POS, ROWS, SEQ_LEN, SLOTS, SOURCE, TABLE_ROW
from deepinfer.models.base import DecodeRows, GraphModel, GreedyModel, Model, PagedGroup, StateGroup
from deepinfer.models.contract import check_hidden
from deepinfer.worker.graphs import Recorder, Replay, record_all
from deepinfer.worker.resolve import StepTokens
from deepinfer.worker.step import GraphStep, Step
from deepinfer.worker.step_ring import KIND_DECODE, Header, RingSlot, StepRing

BLOCK_FIELD = "decode_words"
"""Ring field of a decode step's words, at the front of a slot."""
POSITIONS_FIELD = "decode_rng_pos"
"""Ring field of the positions whose tokens are drawn, among what sampling reads."""


def unfit(state: Sequence[StateGroup], device_drafts: int, experts: ExpertGroup | None) -> str:
    """Why no step of a model can be recorded, whatever it offers; empty = it can."""
    if state:
        return "the model keeps state beside its pages"
    if device_drafts:
        return "the model drafts"
    return "" if experts is None else "its experts are spread over ranks"


def graph_buckets(
    model: Model, state: Sequence[StateGroup], device_drafts: int, experts: ExpertGroup | None, max_rows: int
) -> tuple[Sequence[int], str]:
    """Row counts to record decode steps for; none of them and why.

    Raises:
        ModelContractError: the model gives something else than ascending row counts.
    """
    why = unfit(state, device_drafts, experts)
    if not isinstance(model, GraphModel):
        why = f"{type(model).__name__} has no decode step that can be recorded"
    if why or not isinstance(model, GraphModel):
        return [], why
    buckets = model.graph_rows(max_rows)
    if not buckets:
        return [], f"{type(model).__name__} wants none here"
    if list(buckets) != sorted(set(buckets)) or buckets[0] < 1 or (len(buckets) > 1 and buckets[-2] >= max_rows):
        raise ModelContractError(
            f"{type(model).__name__}.graph_rows({max_rows}) must give ascending row counts from 1 on, at most one of them "
            f"{max_rows} or more; found {list(buckets)}"
        )
    return buckets, ""


def step_words(paged: Sequence[PagedGroup], maps: int, max_rows: int) -> StepWords:
    """The block's layout: a decoding sequence gets at most one block in a step, so many pages of all groups."""
    pages = sum(paged[0].page_tokens // group.page_tokens for group in paged)
    return StepWords(max_rows, maps, max_rows * pages)


class DecodeGraphs:
    """The recorded decode steps of one runner.

    Args:
        model: a `GraphModel`.
        buckets: row counts, ascending.
        layout: of the block in the ring's field ``BLOCK_FIELD``.
        ring: the step ring.
        table: int32 ``[state slots, W]``, the block table; ``kv``: the KV tensors by name.
        newest: int32 ``[m]``, for the tokens of a step: as many as one draws, drafts included, and as rows of the layout.
        recorder: makes the graphs.
        device: where all of it lives.

    Attributes:
        left: what a step whose tokens are in the buffer of newest ones leaves.
        replays: replays so far.
    """

    def __init__(
        self,
        model: GraphModel,
        buckets: Sequence[int],
        layout: StepWords,
        ring: StepRing,
        table: torch.Tensor,
        kv: dict[str, torch.Tensor],
        newest: torch.Tensor,
        recorder: Recorder,
        device: torch.device,
    ) -> None:
        self._model, self._layout, self._table, self._kv, self._recorder = model, layout, table, kv, recorder
        self._greedy = model.greedy if isinstance(model, GreedyModel) else self._argmax
        self.buckets = list(buckets)
        self._most = self.buckets[-1]
        self._bucket_of = [self.buckets[bisect_left(self.buckets, n)] for n in range(self._most + 1)]
        self._delta_room = [layout.max_deltas // layout.max_rows * b for b in range(self._most + 1)]
        self._newest = newest
        self.left = StepTokens(self._newest)
        self._words = ring.slots[0].d[BLOCK_FIELD]
        self._fields = DecodeFields.make(layout, device)
        self._begin_step = begin_step_on(device)
        self._rows = {count: self._rows_of(count) for count in self.buckets}
        self._hidden: torch.Tensor | None = None
        self._replays: dict[tuple[bool, int], Replay] = {}
        self._front, self._own = ring.front_words, ring.own_words
        self._places = _places(ring.slots[0], layout)
        self._host = [_HostBlock(slot, layout) for slot in ring.slots]
        self._copies: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        self.replays = 0

    def _rows_of(self, count: int) -> DecodeRows:
        wide = self._fields.wide[:, :count]
        return DecodeRows(
            ids=wide[0],
            pos=wide[POS - IDS],
            slots=list(wide[SLOTS - IDS :]),
            seq_len=self._fields.seq_len[:count],
            block_table=self._table,
            table_row=wide[TABLE_ROW - IDS],
        )

    def counts(self) -> dict[str, int]:
        """``buckets`` of rows, and ``replays`` so far."""
        return {"buckets": len(self.buckets), "replays": self.replays}

    # Recording

    def record(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Records every bucket, the largest first, on padding alone; part of the device's work, before any step.

        ``progress``: called with (recorded, in all).
        """
        work = {(drawn, rows): partial(self._run, drawn, rows) for rows in reversed(self.buckets) for drawn in (False, True)}
        self._replays = record_all(self._recorder, work, progress)

    @torch.inference_mode()
    def _run(self, drawn: bool, rows: int) -> None:
        """One decode step of ``rows`` rows; ``drawn``: up to hidden states, else up to tokens."""
        deltas = self._delta_room[rows]
        self._begin_step(self._words, self._layout, self._newest, self._table, self._fields, rows, deltas)
        hidden = self._model.decode(self._rows[rows], self._kv)
        check_hidden(self._model, hidden, rows)
        if not drawn:
            self._greedy(hidden, self._newest[:rows])
            return
        if self._hidden is None:
            self._hidden = hidden.new_zeros((self._most, hidden.shape[1]))
        self._hidden[:rows].copy_(hidden)

    def _argmax(self, hidden: torch.Tensor, tokens: torch.Tensor) -> None:
        tokens.copy_(torch.argmax(self._model.logits(hidden), dim=-1))

    # The launching thread's part

    def takes(self, step: Step) -> bool:
        """Whether the step is a graph's, noted in ``step.graph``; what its rows want when tokens are drawn is not yet known."""
        h = step.header
        n = h.rows
        if h.kind != KIND_DECODE or h.draft_rows or not 0 < n <= self._most or not n == h.seqs == h.samples:
            return False
        bucket = self._bucket_of[n]
        step.graph = GraphStep(bucket, alone=not _moves(h) and h.deltas <= self._delta_room[bucket])
        return True

    def fill(self, step: Step) -> None:
        """Writes the block of a step taken before, once it is known what its rows want and where its newest tokens are."""
        graph, h, block = step.graph, step.header, self._host[step.index]
        assert graph is not None
        n = h.rows
        graph.drawn = bool(step.chosen.flags or step.chosen.masks)
        np.take(block.slot, self._places, out=block.fields, mode="clip")
        if h.unresolved and (step.before is None or step.before.graph is None):  # else a sequence's row is its token's place
            block.source[:n] = step.slot.a["source_row"][:n]
        block.head[ROWS] = n
        deltas = h.deltas if graph.alone else 0  # else they are stored before
        block.head[DELTAS] = deltas
        if deltas:
            block.deltas[: 3 * deltas] = block.table_delta[: 3 * deltas]
        if graph.drawn:
            block.positions[:n] = block.rng_pos[:n]

    # The device's part

    @staticmethod
    def follows(step: Step, before: Step | None) -> bool:
        """Whether what the step takes from ``before`` is there, and as a graph takes it; else it is no graph's."""
        if not step.header.unresolved:
            return True
        left = None if before is None else before.left
        return left is not None and left.accepted is None and left.tokens.numel() > 0

    def replay(self, step: Step, before: Step | None) -> None:
        """The upload, if there has been none, and the graph."""
        graph = step.graph
        assert graph is not None
        if graph.alone:
            step.slot.upload(self._own if graph.drawn else self._front)
        if step.header.unresolved and before is not None and before.left is not None and before.left is not self.left:
            tokens = before.left.tokens
            self._newest[: len(tokens)].copy_(tokens)
        self._replays[graph.drawn, graph.rows]()
        self.replays += 1

    def hidden(self, step: Step) -> torch.Tensor:
        """Hidden states ``[n, hidden]`` of the step that was replayed last."""
        assert self._hidden is not None
        return self._hidden[: step.header.rows]

    def keep(self, tokens: torch.Tensor) -> StepTokens:
        """Puts tokens int ``[r]`` that were drawn behind a graph where the next one takes them."""
        self._newest[: len(tokens)].copy_(tokens)
        return self.left

    def tokens_to_host(self, step: Step) -> None:
        """Starts the copy of a step's tokens to its ring slot."""
        key = (step.index, step.header.rows)
        pair = self._copies.get(key)
        if pair is None:
            pair = self._copies[key] = (step.slot.t["tokens"][: key[1]], self._newest[: key[1]])
        pair[0].copy_(pair[1], non_blocking=True)


class _HostBlock:
    """Views of what one ring slot's host memory has for a graph."""

    __slots__ = ("deltas", "fields", "head", "positions", "rng_pos", "slot", "source", "table_delta")

    def __init__(self, slot: RingSlot, layout: StepWords) -> None:
        words = slot.a[BLOCK_FIELD]
        self.slot = slot.host.numpy()
        self.head = words[:HEAD]
        self.fields = words[HEAD : layout.first_delta].reshape(layout.num_fields, layout.stride)
        self.source = self.fields[SOURCE]
        self.deltas = words[layout.first_delta : layout.total]
        self.positions, self.rng_pos, self.table_delta = slot.a[POSITIONS_FIELD], slot.a["rng_pos"], slot.a["table_delta"]


def _places(slot: RingSlot, layout: StepWords) -> np.ndarray[tuple[int, ...], np.dtype[np.intp]]:
    """Where in a slot the words of the block's fields come from, intp ``[5 + maps, stride]``: one gather fills them. What lies behind a
    field of the slot stands for rows that no step has."""
    names = {SOURCE: "prev_seq", SEQ_LEN: "seq_len", IDS: "ids", POS: "pos", TABLE_ROW: "state_row"}
    names |= {SLOTS + j: f"slots{j}" for j in range(layout.maps)}
    first = [slot.t[names[field]].storage_offset() for field in range(layout.num_fields)]
    return np.add.outer(np.array(first, np.intp), np.arange(layout.stride, dtype=np.intp))


def _moves(h: Header) -> bool:
    """Whether a step's plan holds work for the device besides table deltas and rows."""
    return bool(
        h.admitted
        or h.block_clones
        or h.state_clones
        or h.zeroes
        or h.swap_out
        or h.swap_in
        or h.swap_out_states
        or h.swap_in_states
        or h.snapshot_out
        or h.snapshot_in
    )
