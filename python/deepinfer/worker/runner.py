"""The device side of a step, in order: host preparation, one upload, table and page commands, forward, sampling, one wait."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from deepinfer.models.base import Model, PagedGroup, StateGroup
from deepinfer.worker.input_batch import InputBatch, one_sequence
from deepinfer.worker.kv_cache import KVCache
from deepinfer.worker.logprobs import HostLogprobs, gather_logprobs
from deepinfer.worker.sampler import Sampler, SampleRows
from deepinfer.worker.sampling_state import (
    DRAWS,
    EDITS,
    LOGPROBS,
    MIN_LENGTH,
    MIN_TOKENS,
    NUM_COLUMNS,
    PROMPT_LEN,
    RANKED,
    TOP_K,
    RowSampling,
    SamplingState,
)
from deepinfer.worker.step_ring import FLAG_PROMPT_LOGPROBS, Header, RingSlot, StepRing
from deepinfer.worker.sync_guard import forbid_device_sync

_LOGIT_ROWS = 128  # rows whose logits over the whole vocabulary exist at once when a whole prompt wants them

Lookup = Callable[[int, int], tuple[RowSampling, Sequence[int]]]
"""Called with (sequence handle, state slot) when the core has given the slot: its sampling, and tokens generated so far."""

Restore = Callable[[int, int, int], None]
"""Called with (sequence handle, state slot, positions) for a sequence given a slot with positions in place, before the forward."""


@dataclass(frozen=True)
class RunnerLimits:
    """Sizes of the device side."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_draft: int
    num_slots: int  # state slots, the null slot included
    columns: Sequence[int]  # block-table columns of each paged group
    slot_maps: Sequence[tuple[int, int]]  # per slot map its (group, entries of a page)

    @property
    def max_samples(self) -> int:
        """Most sampling rows of a step."""
        return self.max_num_seqs * (self.max_draft + 1)


@dataclass(frozen=True)
class PromptLogprobs:
    """Log-probabilities of consecutive prompt tokens of one sequence, the first one at position ``start``."""

    state_slot: int
    start: int
    values: HostLogprobs


@dataclass
class StepResult:
    """What a step leaves besides the tokens in its ring slot.

    Attributes:
        header: the step's counts.
        logprob_slots: state slot of each row of ``logprobs``.
        logprob_counts: most likely tokens wanted by each of these rows.
        logprobs: of the tokens drawn, or ``None``.
        prompt_logprobs: one entry per piece of a prompt computed in this step that wants them.
    """

    header: Header
    logprob_slots: list[int] = field(default_factory=list)
    logprob_counts: list[int] = field(default_factory=list)
    logprobs: HostLogprobs | None = None
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)


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
        ring_slots: int = 3,
    ) -> None:
        self.model, self.device, self._pinned, self._lookup, self._restore = model, device, pinned, lookup, restore
        self._paged, self._state_groups, self._limits = list(paged), list(state), limits
        samples = limits.max_samples
        own = [(name, samples) for name in ("row_slot", "edit_rows", "plain_rows", "ranked_rows", "logprob_rows")]
        own.append(("params", limits.max_num_seqs * NUM_COLUMNS))
        self.ring = StepRing(layout, own, device, pinned, ring_slots)
        self.kv = KVCache(paged, num_pages, state, limits.num_slots, device)
        one_group = paged[0].page_tokens if len(paged) == 1 else None
        self.inputs = InputBatch(limits.num_slots, sum(limits.columns), one_group, len(limits.slot_maps), device)
        self.sampling = SamplingState(limits.num_slots, model.vocab_size, device)
        self._sampler = Sampler(self.sampling, model.vocab_size)
        self._prompts: dict[int, RowSampling] = {}
        self._done = torch.cuda.Event() if device.type == "cuda" else None

    @torch.inference_mode()
    def execute(self, index: int) -> StepResult:
        """Runs the step planned in ring slot ``index`` and writes its ``tokens`` and ``accepted``.

        Any exception leaves the KV of this step's sequences undefined; the core's ``fail_step`` is then due.
        """
        result = self.launch(index)
        self.wait()
        return result

    @forbid_device_sync()
    def launch(self, index: int) -> StepResult:
        """Everything up to, not including, the wait for the device: nothing in here reads a device value on the host."""
        slot = self.ring.slots[index]
        header = Header.read(slot.a["header"])
        result = StepResult(header)
        resumed = self._admit(slot, header)
        rows = self._choose_rows(slot, header)
        slot.upload()
        if header.admitted and self.device.type != "cpu":
            admitted = slot.d["admitted"].view(-1, 4)[: header.admitted, 0].long()
            self.sampling.table.index_copy_(0, admitted, slot.d["params"].view(-1, NUM_COLUMNS)[: header.admitted])
        self._move_pages(slot, header)
        for handle, state_slot, computed in resumed:
            self._restore(handle, state_slot, computed)
        hidden = self.model.forward(self.inputs.build(slot, header), self.kv.tensors)
        if header.prompt_logprobs:
            self._prompt_logprobs(slot, header, hidden, result)
        if header.samples:
            self._sample(slot, header, rows, hidden, result)
        slot.a["accepted"][: header.seqs] = np.diff(slot.a["sample_off"][: header.seqs + 1])
        if self._done is not None:
            self._done.record()
        return result

    def wait(self) -> None:
        """The one wait of a step: until its tokens are in host memory."""
        if self._done is not None:
            self._done.synchronize()

    @torch.inference_mode()
    def logits(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """Logits float32 ``[T, vocab]`` of every position of one sequence, on KV pages of its own."""
        pages = [-(-len(token_ids) // g.page_tokens) + 1 for g in self._paged]
        kv = KVCache(self._paged, pages, self._state_groups, 2, self.device)
        tokens = [g.page_tokens for g in self._paged]
        batch = one_sequence(token_ids, tokens, self._limits.columns, self._limits.slot_maps, self.device)
        hidden = self.model.forward(batch, kv.tensors)
        out = np.empty((len(token_ids), self.model.vocab_size), np.float32)
        for start in range(0, len(token_ids), _LOGIT_ROWS):
            out[start : start + _LOGIT_ROWS] = self.model.logits(hidden[start : start + _LOGIT_ROWS]).cpu().numpy()
        return out

    def _admit(self, slot: RingSlot, header: Header) -> list[tuple[int, int, int]]:
        """Sets sampling state of sequences that got a slot in this step; gives (handle, slot, positions) of those with some in place."""
        resumed: list[tuple[int, int, int]] = []
        if not header.admitted:
            return resumed
        admitted: list[list[int]] = slot.a["admitted"].reshape(-1, 4)[: header.admitted].tolist()
        for state_slot, index, generation, computed in admitted:
            handle = (generation & 0xFFFFFFFF) << 32 | (index & 0xFFFFFFFF)
            if computed:
                resumed.append((handle, state_slot, computed))
            row, output = self._lookup(handle, state_slot)
            self.sampling.admit(state_slot, row, output)
            self._prompts.pop(state_slot, None)
            if row.params.prompt_logprobs is not None:
                self._prompts[state_slot] = row
        params = slot.a["params"].reshape(-1, NUM_COLUMNS)
        params[: header.admitted] = self.sampling.host[[a[0] for a in admitted]]
        return resumed

    def _choose_rows(self, slot: RingSlot, header: Header) -> _Chosen:
        """Sorts sampling rows by what they need, on the host and before the upload, so that the device is never asked."""
        a, n, r = slot.a, header.seqs, header.samples
        state_row = a["state_row"][:n]
        row_slot = np.repeat(state_row, np.diff(a["sample_off"][: n + 1])) if r != n else state_row
        a["row_slot"][:r] = row_slot
        flags = self.sampling.flags[row_slot]
        union = int(np.bitwise_or.reduce(flags)) if r else 0
        if not union:
            return _Chosen()
        if union & MIN_LENGTH:
            packed = self.sampling.host[row_slot]
            reached = a["rng_pos"][:r] - packed[:, PROMPT_LEN] >= packed[:, MIN_TOKENS]
            flags = np.where(reached, flags & ~MIN_LENGTH, flags)
            union = int(np.bitwise_or.reduce(flags))
        drawn, by_rank = (flags & DRAWS) != 0, (flags & RANKED) != 0
        ranked = np.flatnonzero(by_rank)
        chosen = _Chosen(
            flags=union,
            edit=_store(a["edit_rows"], np.flatnonzero(flags & EDITS)),
            plain=_store(a["plain_rows"], np.flatnonzero(drawn & ~by_rank)),
            ranked=_store(a["ranked_rows"], ranked),
        )
        if len(ranked):
            chosen.max_top_k = int(self.sampling.host[row_slot[ranked], TOP_K].max())
        if union & LOGPROBS:
            wanting = np.flatnonzero(flags & LOGPROBS)
            chosen.logprobs = _store(a["logprob_rows"], wanting)
            chosen.logprob_slots = row_slot[wanting].tolist()
            chosen.logprob_counts = self.sampling.logprobs[row_slot[wanting]].tolist()
        return chosen

    def _move_pages(self, slot: RingSlot, header: Header) -> None:
        """Table deltas and clone and zero commands, before the forward reads or writes KV."""
        self.inputs.apply_deltas(slot, header)
        if header.block_clones:
            self.kv.clone_blocks(slot.d["clone_blocks"][: 3 * header.block_clones].view(-1, 3))
        if header.state_clones:
            self.kv.clone_states(slot.d["clone_states"][: 2 * header.state_clones].view(-1, 2))
        if header.zeroes:
            self.kv.zero_states(slot.d["zero_states"][: header.zeroes])

    def _sample(self, slot: RingSlot, header: Header, chosen: _Chosen, hidden: torch.Tensor, result: StepResult) -> None:
        d, r = slot.d, header.samples
        # Where every row samples, they are the rows themselves, in order.
        wanted = hidden if r == header.rows else hidden.index_select(0, d["sample_row"][:r])
        logits = self.model.logits(wanted)
        if chosen.flags:
            pick = {name: d[name][:count].long() if count else None for name, count in chosen.parts().items()}
            # Log-probabilities are those of the model: keep its logits from the sampler's edits.
            raw = logits.index_select(0, pick["logprob_rows"]) if pick["logprob_rows"] is not None else None
            rows = SampleRows(
                slots=d["row_slot"][:r].long(),
                positions=d["rng_pos"][:r].long(),
                flags=chosen.flags,
                edit=pick["edit_rows"],
                plain=pick["plain_rows"],
                ranked=pick["ranked_rows"],
                max_top_k=chosen.max_top_k,
            )
            tokens = self._sampler(logits, rows)
            if raw is not None:
                found = gather_logprobs(raw, tokens[pick["logprob_rows"]], max(chosen.logprob_counts))
                result.logprobs = found.to_host(self._pinned)
                result.logprob_slots, result.logprob_counts = chosen.logprob_slots, chosen.logprob_counts
        else:
            tokens = torch.argmax(logits, dim=-1)
        slot.t["tokens"][:r].copy_(tokens.to(torch.int32), non_blocking=True)

    def _prompt_logprobs(self, slot: RingSlot, header: Header, hidden: torch.Tensor, result: StepResult) -> None:
        """Log-probabilities of the prompt token after each prompt row, for the sequences that want them."""
        a, n = slot.a, header.seqs
        for i in np.flatnonzero(a["seq_flags"][:n] & FLAG_PROMPT_LOGPROBS).tolist():
            first, last = int(a["cu_q"][i]), int(a["cu_q"][i + 1])
            state_slot, start = int(a["state_row"][i]), int(a["pos"][first]) + 1
            row = self._prompts.get(state_slot)
            if row is None:
                continue
            targets = list(row.prompt_ids[start : start + last - first])
            wanted = row.params.prompt_logprobs or 0
            count = self.model.vocab_size if wanted < 0 else min(wanted, self.model.vocab_size)
            for at in range(0, len(targets), _LOGIT_ROWS):
                piece = torch.tensor(targets[at : at + _LOGIT_ROWS], dtype=torch.int64)
                if self._pinned:
                    piece = piece.pin_memory().to(self.device, non_blocking=True)
                logits = self.model.logits(hidden[first + at : first + at + len(piece)])
                values = gather_logprobs(logits, piece, count).to_host(self._pinned)
                result.prompt_logprobs.append(PromptLogprobs(state_slot, start + at, values))


@dataclass
class _Chosen:
    """Counts of sampling rows by need; the rows themselves are in the ring slot."""

    flags: int = 0
    edit: int = 0
    plain: int = 0
    ranked: int = 0
    logprobs: int = 0
    max_top_k: int = 0
    logprob_slots: list[int] = field(default_factory=list)
    logprob_counts: list[int] = field(default_factory=list)

    def parts(self) -> dict[str, int]:
        """Ring field of each selection and its length."""
        return {"edit_rows": self.edit, "plain_rows": self.plain, "ranked_rows": self.ranked, "logprob_rows": self.logprobs}


def _store(target: NDArray[np.int32], rows: NDArray[np.intp]) -> int:
    target[: len(rows)] = rows
    return len(rows)
