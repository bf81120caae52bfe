"""The device side of a step in two halves, the forward and the sampling of its tokens, handed to the device's queue in order.

What looks at the core's plan or at requests is done by the launching thread before work is handed over; nothing in the work itself
is read back on the host. The one wait of a step is at its end, for the tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from deepinfer.distributed import ExpertGroup
from deepinfer.kernels.linear import row_bucket, row_quantum
from deepinfer.kernels.sample.columns import NUM_COLUMNS
from deepinfer.models.base import GraphModel, Model, PagedGroup, PromptGraphModel, RunLogitsModel, StatefulModel, StateGroup
from deepinfer.models.contract import check_hidden
from deepinfer.platforms import to_device
from deepinfer.worker import graphs as recording
from deepinfer.worker.decode_step import BLOCK_FIELD, POSITIONS_FIELD, DecodeGraphs, step_words
from deepinfer.worker.device_queue import DeviceQueue, Handed, StepTimes, Ticket, run_in_order
from deepinfer.worker.device_sampler import DeviceSampler
from deepinfer.worker.grammar import MaskBuffers
from deepinfer.worker.image_rows import ImageRows, without_images
from deepinfer.worker.input_batch import InputBatch, SampledRows, one_sequence
from deepinfer.worker.kv_cache import KVCache
from deepinfer.worker.logprobs import gather_logprobs
from deepinfer.worker.model_drafts import ModelDrafts, RanStep, choose_places, head_logits, sampling_logits
from deepinfer.worker.page_moves import PageMoves
from deepinfer.worker.prompt_step import PromptGraphs, PromptLayout
from deepinfer.worker.resolve import SlotMap, StepTokens
from deepinfer.worker.row_choice import choose_prompts, choose_rows
from deepinfer.worker.sampler import Sampler, SampleRows
from deepinfer.worker.sampling_state import RowSampling, SamplingState
from deepinfer.worker.state_places import StatePlaces, StateRules
from deepinfer.worker.step import Admitted, GraphStep, PromptLogprobs, PromptPiece, Step, StepResult
from deepinfer.worker.step_ring import ADMITTED_WORDS, START_RERUN, START_SLICE, StepRing
from deepinfer.worker.sync_guard import forbid_device_sync
from deepinfer.worker.verify import accepted_counts, draft_rows

_LOGIT_ROWS = 128  # rows whose logits over the whole vocabulary exist at once when a whole prompt wants them

Lookup = Callable[[int, int], tuple[RowSampling, Sequence[int]]]
"""Called with (sequence handle, state slot) when the core has given the slot: its sampling, and tokens generated so far."""

Restore = Callable[[int, int, int, int, int], Callable[[], None] | None]
"""Called with (sequence handle, state slot, positions, end of the hit, kind of start) for a sequence given a slot with positions in place,
before the forward. Gives work for the device between the step's commands and its forward, or ``None``."""


@dataclass(frozen=True)
class RunnerLimits:
    """Sizes of the device side."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_draft: int
    num_slots: int  # state slots, the null slot included
    columns: Sequence[int]  # block-table columns of each paged group
    slot_maps: Sequence[tuple[int, int]]  # per slot map its (group, entries of a page)
    keep_tokens: int | None = None  # of a prompt whose decoder rows are whole, of models that can leave the others out; None = all
    compact: bool = False  # whether they are left out, else they are masked
    device_drafts: int = 0  # drafts that the model makes of each sequence, 0 = none
    draft_temperatures: tuple[float, ...] = ()  # of the confidence in each of them; empty = 1

    @property
    def max_samples(self) -> int:
        """Most sampling rows of a step."""
        return self.max_num_seqs * (self.max_draft + 1)

    def resolved_maps(self, page_tokens: Sequence[int]) -> list[SlotMap]:
        """Slot maps with the first table column of their group, for pages of ``page_tokens`` tokens in each group."""
        first = [sum(self.columns[:g]) for g in range(len(self.columns))]
        return [SlotMap(first[g], page_tokens[g], entries) for g, entries in self.slot_maps]


class ModelRunner:
    """Owns everything on the device for one model.

    Args:
        model: what computes.
        paged: the model's paged groups, ``num_pages`` their pages, ``state`` its state groups.
        limits: sizes, equal to the core's.
        layout: the core's ring fields.
        device: where it runs; ``pinned``: whether host buffers are page-locked.
        lookup: gives a sequence's sampling when the core has given it a slot.
        restore: told of each that begins with positions in place, once the step's page and state commands are queued.
        queue: runs the device half.
        host_pages: host pages of each paged group for swapping, empty = none; ``host_slots``: host slots of state.
        snapshot_places: host places for snapshots of states.
        experts: the ranks that the model's experts are spread over, if they are.
        graph_rows: row counts that decode steps are recorded for (:meth:`record_graphs`), empty = none; ``prompt_rows``: the same for
            steps with prompts.
    """

    def __init__(
        self,
        model: Model,
        paged: Sequence[PagedGroup],
        num_pages: Sequence[int],
        state: Sequence[StateGroup],
        limits: RunnerLimits,
        layout: Sequence[tuple[str, int]],
        device: torch.device,
        pinned: bool,
        lookup: Lookup,
        restore: Restore,
        queue: DeviceQueue,
        ring_slots: int = 3,
        host_pages: Sequence[int] = (),
        host_slots: int = 0,
        snapshot_places: int = 0,
        experts: ExpertGroup | None = None,
        graph_rows: Sequence[int] = (),
        prompt_rows: Sequence[int] = (),
    ) -> None:
        self.model, self.device, self.queue = model, device, queue
        self._pinned, self._lookup, self._restore = pinned, lookup, restore
        self._paged, self._state_groups, self._limits = list(paged), list(state), limits
        samples = limits.max_samples
        own = [(name, samples) for name in ("row_slot", "edit_rows", "plain_rows", "ranked_rows", "logprob_rows", "mask_rows")]
        own += [("params", limits.max_num_seqs * NUM_COLUMNS), ("source_row", limits.max_num_seqs)]
        self._drafts: ModelDrafts | None = None
        if limits.device_drafts:
            self._drafts = ModelDrafts(model, limits.device_drafts, limits.draft_temperatures, limits.num_slots, device)
            own += self._drafts.fields(limits.max_num_seqs)
        self._stateful: StatefulModel | None = None
        self._places: StatePlaces | None = None
        if self._state_groups:
            if not isinstance(model, StatefulModel):
                raise TypeError(f"{type(model).__name__} declares state groups and has no end_step")
            self._stateful = model
            rules = StateRules(
                self._state_groups[0].cut, limits.max_draft, limits.keep_tokens, limits.compact, self._state_groups[0].history
            )
            sizes = (limits.num_slots, host_slots + 1, limits.max_num_seqs, limits.max_num_batched_tokens)
            self._places = StatePlaces(rules, *sizes)
            own += self._places.fields
        words = step_words(paged, len(limits.slot_maps), max([limits.max_num_seqs, *graph_rows]))
        prompts: PromptLayout | None = None
        if prompt_rows and isinstance(model, PromptGraphModel):
            prompts = PromptLayout(prompt_rows, len(limits.slot_maps), limits.max_num_seqs, model.unit_rows)
        front = [(BLOCK_FIELD, words.total)] if graph_rows else []
        own += [(POSITIONS_FIELD, limits.max_num_seqs)] if graph_rows else []
        copied = True if graph_rows or prompts is not None else None
        self.ring = StepRing(layout, own, device, pinned, ring_slots, front, copied, [] if prompts is None else prompts.fields)
        self.moves = PageMoves(paged, num_pages, state, limits.num_slots, host_pages, host_slots, snapshot_places, device, pinned)
        self.kv = self.moves.kv
        one_group = paged[0].page_tokens if len(paged) == 1 else None
        maps = limits.resolved_maps([g.page_tokens for g in paged])
        self.inputs = InputBatch(limits.num_slots, sum(limits.columns), one_group, maps, device)
        self._graphs: DecodeGraphs | None = None  # once they are recorded
        self._prompt_graphs: PromptGraphs | None = None
        self._unrecorded: DecodeGraphs | None = None
        self._unrecorded_prompts: PromptGraphs | None = None
        newest = torch.zeros(max(samples, words.stride), dtype=torch.int32, device=device)
        common = (self.ring, self.inputs.table, self.kv.tensors, newest)
        if graph_rows and isinstance(model, GraphModel):
            recorder = recording.recorder_for(device)
            self._unrecorded = DecodeGraphs(model, graph_rows, words, *common, recorder, device)
        if prompts is not None and isinstance(model, PromptGraphModel):
            recorder = recording.recorder_for(device)
            self._unrecorded_prompts = PromptGraphs(model, prompt_rows, prompts, *common, recorder, device)
        self.sampling = SamplingState(limits.num_slots, model.vocab_size, device)
        self.masks = MaskBuffers(ring_slots, samples, model.vocab_size, device, pinned)
        own_dtype = model.dtype if isinstance(model, RunLogitsModel) else torch.float32
        kernels = DeviceSampler.on(device, model.vocab_size, own_dtype, samples)
        self._sampler = Sampler(self.sampling, model.vocab_size, kernels)
        self._narrow = kernels is not None and own_dtype != torch.float32  # whether the sampler reads what the head gives
        self._prompts: dict[int, RowSampling] = {}
        self._images = ImageRows()
        self._last: Step | None = None
        self._experts = experts

    # Launching: host preparation here, device work through the queue

    def launch_forward(self, index: int, error: Exception | None = None) -> Step:
        """Hands over the first half of the step planned in ring slot ``index``: commands and forward.

        What fails, here or on the device, is raised by :meth:`wait`, never here. ``error``: the step has failed before it began.
        """
        step = Step(index, self.ring.slots[index], self._last)
        self._last = step
        try:
            if error is not None:
                raise error
            graph = self._graph_of(step)
            resumed = None if graph is not None and graph.alone else self._prepare(step)
            if graph is None or step.before is None or step.before.graph is None:  # else rows are in order
                self._find_sources(step)
            choose_rows(step, self.sampling, self._limits.max_draft)
            if graph is not None and self._graphs is not None:
                self._graphs.fill(step)
            elif self._prompt_graphs is not None and (bucket := self._prompt_graphs.bucket(step)):
                step.prompts = bucket
                self._prompt_graphs.fill(step)
            if resumed is not None:
                self._before_forward(step, resumed)
        except Exception as e:
            step.ticket.error = step.ticket.error or e
        run = self._replay if step.graph is not None else self._replay_prompts if step.prompts else self._forward
        self.queue.submit(step.ticket, lambda: run(step), last=False)
        return step

    def launch_sample(self, step: Step) -> None:
        """Hands over the second half: logits, masks, drawing. Rows with a grammar have their masks in ``masks`` by now."""
        graph, header = step.graph, step.header
        if graph is not None:
            step.slot.a["accepted"][: header.seqs] = 1
        elif not header.draft_rows:
            a, n = step.slot.a, header.seqs
            np.subtract(a["sample_off"][1 : n + 1], a["sample_off"][:n], out=a["accepted"][:n])
        sample = self._sample if graph is None or graph.drawn else self._after_replay
        self.queue.submit(step.ticket, lambda: sample(step), last=True)

    def wait(self, step: Step) -> StepResult:
        """Returns when the step's tokens are in its ring slot. Steps are waited for in their order.

        Raises:
            Exception: what went wrong in one of its halves: the KV of its sequences is undefined, the core's ``fail_step`` is due.
        """
        try:
            self.queue.wait(step.ticket)
        finally:
            step.waited = True
            step.before = step.follows = step.batch = step.hidden = step.sampled = None
        return step.result

    def times(self, step: Step) -> StepTimes | None:
        """When a step that has been waited for ran."""
        return self.queue.times(step.ticket, step.before_ticket)

    def drain(self) -> None:
        """Waits until nothing of what was handed over is left to run, for a caller that then fails every step launched so far: their
        failures stay with them, and the next step follows none of them."""
        run_in_order(self.queue, lambda: None)
        self._last = None

    def close(self) -> None:
        """Ends the queue; idempotent."""
        self.queue.close()
        self.moves.close()
        self._last = None

    # Graphs

    @property
    def to_record(self) -> Sequence[int]:
        """Row counts of the decode steps that :meth:`record_graphs` is to record."""
        return [] if self._unrecorded is None else self._unrecorded.buckets

    @property
    def graphs(self) -> DecodeGraphs | None:
        """The recorded decode steps, if there are any."""
        return self._graphs

    @property
    def prompts_to_record(self) -> Sequence[int]:
        """Row counts of the steps with prompts that :meth:`record_prompt_graphs` is to record."""
        return [] if self._unrecorded_prompts is None else self._unrecorded_prompts.buckets

    @property
    def prompt_graphs(self) -> PromptGraphs | None:
        """The recorded steps with prompts, if there are any."""
        return self._prompt_graphs

    def record_prompt_graphs(self, progress: Callable[[int, int], None] | None = None) -> None:
        """:meth:`record_graphs` for steps with prompts."""
        graphs, self._unrecorded_prompts = self._unrecorded_prompts, None
        if graphs is not None:
            run_in_order(self.queue, lambda: graphs.record(progress))
            self._prompt_graphs = graphs

    def record_graphs(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Records decode steps, before any step; later ones are replayed. Without row counts to record, nothing.

        ``progress``: called with (recorded, in all).

        Raises:
            Exception: what the model or the device raised; steps then run as without graphs.
        """
        graphs, self._unrecorded = self._unrecorded, None
        if graphs is not None:
            run_in_order(self.queue, lambda: graphs.record(progress))
            self._graphs = graphs

    # Beside the steps, in the queue's order

    def can_swap(self) -> bool:
        """Whether pages can go to host pages and back without waiting for these to be made ready."""
        return self.moves.host is not None and self.moves.host.ready

    def measure_swap(self, pages: int = 16, repeats: int = 3) -> float:
        """Bytes a second of a copy out and back between the device and its host pages; 0 without them. Waits for the device."""
        host = self.moves.host
        if host is None:
            return 0.0
        ticket, moved = Ticket(), [0]

        def copy() -> None:
            moved[0] = host.copy_some(pages)

        for nth in range(repeats):  # the first one takes memory
            self.queue.submit(ticket, torch.inference_mode()(copy), last=nth == repeats - 1)
        self.queue.wait(ticket)
        times = self.queue.times(ticket, None)
        seconds = 0.0 if times is None else min(times.forward, times.sample)
        return moved[0] / seconds if seconds > 0 else 0.0

    def in_order(self, work: Callable[[], None]) -> Handed:
        """Hands over work behind every step launched so far and ahead of later ones. The result waits for it, on any thread, and
        raises what it raised."""

        @torch.inference_mode()
        def inferring() -> None:
            work()

        ticket = Ticket()
        self.queue.submit(ticket, inferring, last=True)
        return Handed(self.queue, ticket)

    def logits(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """Logits float32 ``[T, vocab]`` of every position of one sequence, on KV pages of its own."""
        return run_in_order(self.queue, lambda: self._logits(token_ids))

    @torch.inference_mode()
    def _logits(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        pages = [-(-len(token_ids) // g.page_tokens) + 1 for g in self._paged]
        kv = KVCache(self._paged, pages, self._state_groups, 2, self.device)
        tokens = [g.page_tokens for g in self._paged]
        batch = one_sequence(token_ids, tokens, self._limits.columns, self._limits.slot_maps, self.device, state=bool(self._state_groups))
        hidden = self.model.forward(batch, kv.tensors)
        out = np.empty((len(token_ids), self.model.vocab_size), np.float32)
        for start in range(0, len(token_ids), _LOGIT_ROWS):
            out[start : start + _LOGIT_ROWS] = self.model.logits(hidden[start : start + _LOGIT_ROWS]).cpu().numpy()
        return out

    # The launching thread's part

    def _graph_of(self, step: Step) -> GraphStep | None:
        if self._graphs is not None:
            self._graphs.takes(step)
        return step.graph

    def _prepare(self, step: Step) -> list[tuple[int, int, int, int, int]]:
        """What is known of the sequences of a step that is not a graph alone; gives what ``restore`` is told."""
        resumed = self._admit(step)
        step.images = self._images.pieces(step.slot, step.header)
        if self._places is not None:
            step.counts = self._places.describe(step.slot, step.header)
        self.moves.sort(step)
        return resumed

    def _before_forward(self, step: Step, resumed: Sequence[tuple[int, int, int, int, int]]) -> None:
        """Hands over what comes before the forward of such a step."""
        if self._drafts is not None:
            step.drafting = choose_places(step.slot, step.header, self.sampling)
        choose_prompts(step, self._prompts, self.model.vocab_size)
        self.queue.submit(step.ticket, lambda: self._commands(step), last=False)
        for handle, *start in resumed:
            work = self._restore(handle, *start)
            if work is not None:
                self.queue.submit(step.ticket, work, last=False)

    def _admit(self, step: Step) -> list[tuple[int, int, int, int, int]]:
        """Notes what sequences that get a slot in this step need; gives what ``restore`` is told of those with positions in place."""
        slot, header = step.slot, step.header
        resumed: list[tuple[int, int, int, int, int]] = []
        if self._places is not None:
            self._places.move_out(slot, header)
        if not header.admitted:
            return resumed
        admitted: list[list[int]] = slot.a["admitted"].reshape(-1, ADMITTED_WORDS)[: header.admitted].tolist()
        for state_slot, index, generation, start, hit, kind in admitted:
            handle = (generation & 0xFFFFFFFF) << 32 | (index & 0xFFFFFFFF)
            if start:
                resumed.append((handle, state_slot, start, hit, kind))
            row, output = self._lookup(handle, state_slot)
            flags = self.sampling.admit_host(state_slot, row)
            step.admitted.append(Admitted(state_slot, row, output, flags))
            self._images.admit(state_slot, row.images)
            self._prompts.pop(state_slot, None)
            if row.params.prompt_logprobs is not None:
                self._prompts[state_slot] = row
            if self._places is not None:
                encoder, decoder = kind == START_RERUN, kind in (START_SLICE, START_RERUN)
                self._places.admit(state_slot, len(row.prompt_ids), start * encoder, start * decoder)
                if decoder:
                    before = _tokens_before(start, row.prompt_ids, output, self._state_groups[0].history)
                    self._places.begin(state_slot, start, without_images(before, start, row.images))
        if self._places is not None:
            self._places.move_in(slot, header)
        params = slot.a["params"].reshape(-1, NUM_COLUMNS)
        params[: header.admitted] = self.sampling.host[[a[0] for a in admitted]]
        return resumed

    def _find_sources(self, step: Step) -> None:
        """Where in the step in flight the tokens are drawn that this one begins with."""
        if step.header.unresolved and step.before is not None:
            a, n = step.slot.a, step.header.seqs
            a["source_row"][:n] = step.before.slot.a["sample_off"][a["prev_seq"][:n] + 1] - 1

    # The device's part, in the queue's order

    @torch.inference_mode()
    @forbid_device_sync()
    def _commands(self, step: Step) -> None:
        """The upload, and what moves or clears pages, states and sampling values before the forward reads or writes any."""
        slot, header = step.slot, step.header
        _check_table(step)
        slot.upload(None if step.prompts else self.ring.usual_words)
        self.moves.save(step)
        for a in step.admitted:
            self.sampling.admit_device(a.slot, a.row, a.output, a.flags)
        if header.admitted:
            slots = slot.d["admitted"].view(-1, ADMITTED_WORDS)[: header.admitted, 0].long()
            if self._drafts is not None:
                self._drafts.table.forget(slots)
            self.sampling.table.index_copy_(0, slots, slot.d["params"].view(-1, NUM_COLUMNS)[: header.admitted])
        self.inputs.apply_deltas(slot, header)
        step.stored = True
        self.moves.fill(step)

    @torch.inference_mode()
    @forbid_device_sync()
    def _forward(self, step: Step) -> None:
        before = None if step.before is None else step.before.left
        step.before = None
        table = None if self._drafts is None else self._drafts.table
        step.batch, step.sampled = self.inputs.build(step.slot, step.header, before, step.counts, table)
        step.batch.images = [replace(piece, row=piece.row - step.header.cut) for piece in step.images] if step.header.cut else step.images
        if self._experts is not None:
            self._experts.begin(row_bucket(step.header.agreed_rows, row_quantum(self.device)))
        step.hidden = self.model.forward(step.batch, self.kv.tensors)
        check_hidden(self.model, step.hidden, step.header.rows - step.header.cut)
        for piece in step.pieces:
            self._prompt_logprobs(step.hidden, piece, step.header.cut, step.result)

    @forbid_device_sync()
    def _replay(self, step: Step) -> None:
        """The forward of a decode step as a graph; as any other if the step before it left nothing that a graph could take."""
        before, graph, graphs = step.before, step.graph, self._graphs
        assert graph is not None and graphs is not None
        if not graphs.follows(step, before):
            if graph.alone:
                self._commands(step)
            self._forward(step)
            return
        step.before = None
        if graph.alone:
            _check_table(step)
        try:
            graphs.replay(step, before)
        except Exception:
            if graph.alone:  # other sequences go on from the table that the graph would have left
                step.slot.upload(self.ring.usual_words)
                self.inputs.apply_deltas(step.slot, step.header)
                step.stored = True
            raise
        step.stored = step.replayed = True

    @torch.inference_mode()
    @forbid_device_sync()
    def _replay_prompts(self, step: Step) -> None:
        """The forward of a step with prompts as a graph; as any other if the step before it left nothing that a graph could take."""
        graphs, d = self._prompt_graphs, step.slot.d
        assert graphs is not None
        if not DecodeGraphs.follows(step, step.before):
            self._forward(step)
            return
        hidden, step.before = graphs.replay(step), None
        positions = d["rng_pos"][: step.header.samples].long()
        step.hidden, step.sampled = hidden, SampledRows(d["ids"][: step.header.rows], positions)
        for piece in step.pieces:
            self._prompt_logprobs(hidden, piece, 0, step.result)

    @forbid_device_sync()
    def _after_replay(self, step: Step) -> None:
        """The tokens that a graph has drawn."""
        if not step.replayed or self._graphs is None:
            self._sample(step)
            return
        self._graphs.tokens_to_host(step)
        step.left = self._graphs.left

    @torch.inference_mode()
    @forbid_device_sync()
    def _sample(self, step: Step) -> None:
        slot, r = step.slot, step.header.samples
        if r:
            tokens, accepted = self._draw(step)
            slot.t["tokens"][:r].copy_(tokens, non_blocking=True)
        else:
            tokens, accepted = slot.d["sample_row"].new_empty(0), None
        sample_off = None
        chosen = None if step.sampled is None else step.sampled.chosen
        if accepted is not None:
            n = step.header.seqs
            slot.t["accepted"][:n].copy_(accepted, non_blocking=True)
            sample_off = slot.d["sample_off"][: n + 1].clone()  # the slot may be written again before the next step reads this
            if chosen is not None:
                slot.t["verified"][: len(chosen.lengths)].copy_(chosen.lengths.int(), non_blocking=True)
        if self._stateful is not None and step.batch is not None:
            rejected = None
            if accepted is not None and sample_off is not None:
                rejected = sample_off[1:] - sample_off[:-1] - accepted
                rejected = rejected if chosen is None else rejected - chosen.cuts
            self._stateful.end_step(step.batch, rejected, self.kv.tensors)
        if self._drafts is not None and step.drafting is not None:
            assert step.batch is not None and step.hidden is not None and step.sampled is not None
            ran = RanStep(step.batch, step.hidden, step.sampled, slot, step.header, tokens, accepted)
            self._drafts.make(ran, step.drafting, self.kv, self._sampler)
        step.left = self._graphs.keep(tokens) if step.replayed and self._graphs is not None else StepTokens(tokens, sample_off, accepted)

    def _draw(self, step: Step) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Tokens int32 ``[r]`` of the step's sampling rows, and with draft rows how many of its rows each sequence keeps (int32
        ``[n]``); ``None`` = each sampling row is one token."""
        sampled, d, r = step.sampled, step.slot.d, step.header.samples
        chosen = step.chosen
        narrow = self._narrow and not (chosen.masks or chosen.edit or chosen.logprobs)
        if step.replayed and self._graphs is not None:
            logits, positions = head_logits(self.model, self._graphs.hidden(step), narrow), d[POSITIONS_FIELD][:r].long()
        else:
            assert step.hidden is not None and sampled is not None
            logits = sampling_logits(self.model, step.hidden, step.slot, step.header, sampled.chosen, narrow)
            positions = sampled.rng_pos
        raw = None
        if chosen.logprobs:
            # Log-probabilities are those of the model: keep its logits from masks and the sampler's edits.
            raw = logits.index_select(0, d["logprob_rows"][: chosen.logprobs])
        if chosen.masks:
            self._sampler.mask(logits, d["mask_rows"][: chosen.masks], self.masks.upload(step.index, chosen.masks))
        drafts = None
        if step.header.draft_rows and sampled is not None:
            offsets = d["sample_off"][: step.header.seqs + 1]
            # A draft that does not run is not verified.
            ids = sampled.ids if sampled.chosen is None else torch.where(sampled.chosen.runs, sampled.ids, -1)
            drafts = draft_rows(ids, d["sample_row"][:r], offsets, r, chosen.longest)
        if not chosen.flags:
            tokens = self._sampler.greedy(logits)
            return tokens, None if drafts is None else accepted_counts(tokens, drafts)
        pick = {name: d[name][:count].long() if count else None for name, count in chosen.parts().items()}
        rows = SampleRows(
            slots=d["row_slot"][:r].long(),
            positions=positions,
            flags=chosen.flags,
            edit=pick["edit_rows"],
            plain=pick["plain_rows"],
            ranked=pick["ranked_rows"],
            max_top_k=chosen.max_top_k,
            drafts=drafts,
        )
        tokens = self._sampler(logits, rows)
        if raw is not None:
            of = tokens[d["logprob_rows"][: chosen.logprobs].long()]
            found = gather_logprobs(raw, of, max(step.result.logprob_counts), self._sampler.logprob_kernel)
            step.result.logprobs = found.to_host(self._pinned)
        return tokens.to(torch.int32), None if drafts is None else accepted_counts(tokens, drafts)

    def _prompt_logprobs(self, hidden: torch.Tensor, piece: PromptPiece, cut: int, result: StepResult) -> None:
        """Log-probabilities of the prompt token after each prompt row of a piece, behind ``cut`` rows that do not run."""
        first = piece.first - cut
        for at in range(0, len(piece.targets), _LOGIT_ROWS):
            targets = to_device(torch.tensor(piece.targets[at : at + _LOGIT_ROWS], dtype=torch.int64), self.device)
            logits = self.model.logits(hidden[first + at : first + at + len(targets)])
            values = gather_logprobs(logits, targets, piece.count, self._sampler.logprob_kernel).to_host(self._pinned)
            result.prompt_logprobs.append(PromptLogprobs(piece.index, piece.start + at, values))


def _check_table(step: Step) -> None:
    """Raises if the step in flight failed before the block table was its: this one's would be wrong, too."""
    cause = None if step.follows is None or step.follows.stored else step.follows.ticket.error
    if cause is not None:
        raise RuntimeError(f"the step before it failed before its block table was written: {cause}") from cause


def _tokens_before(start: int, prompt: Sequence[int], output: Sequence[int], count: int) -> list[int]:
    """The last ``count`` tokens before position ``start`` of a sequence, fewer at its beginning."""
    first = max(0, start - count)
    return [*prompt[first:start], *output[max(0, first - len(prompt)) : max(0, start - len(prompt))]]
