"""What the sampler knows about each sequence, by state slot.

Numbers sit in one packed table; lists (bias, stop ids, bad words) in tables as wide as the longest list so far; token counts
only once some sequence has a penalty. A slot is written when a sequence gets it, also after preemption, from its history:
so the state never depends on how often the sequence was interrupted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from deepinfer.kernels.sample.columns import (
    FREQUENCY,
    GREEDY,
    MIN_P,
    MIN_TOKENS,
    NUM_COLUMNS,
    PRESENCE,
    PROMPT_LEN,
    REPETITION,
    SEED_HIGH,
    SEED_LOW,
    TEMPERATURE,
    TOP_K,
    TOP_P,
)
from deepinfer.models.images import ImageSpan
from deepinfer.platforms import to_device
from deepinfer.sampling import SamplingParams

# What a slot asks of the sampler, as bits of `flags`.
DRAWS, RANKED, BIAS, PENALTIES, BAD_WORDS, MIN_LENGTH, LOGPROBS = (1 << i for i in range(7))
EDITS = BIAS | PENALTIES | BAD_WORDS | MIN_LENGTH

_LARGEST = 1e30
"""Temperature and repetition penalty are cut to this (and to one over it): a logit changed by it is still finite in float32."""


@dataclass(frozen=True)
class RowSampling:
    """Sampling of one sequence, as the worker needs it.

    Attributes:
        params: checked values; text-only ones are not read.
        seed: of this sequence's draws, in [0, 2**63).
        prompt_ids: the prompt.
        eos_ids: model's end-of-sequence ids, masked below ``min_tokens`` together with the stop ids.
        bad_word_ids: token sequences whose last id is masked when the rest precedes it.
        images: of the prompt, in order.
    """

    params: SamplingParams
    seed: int
    prompt_ids: Sequence[int]
    eos_ids: Sequence[int] = ()
    bad_word_ids: Sequence[Sequence[int]] = ()
    images: Sequence[ImageSpan] = ()


class SlotTable:
    """A table ``[slots, width]`` on the device that grows in width when a longer list comes."""

    def __init__(self, num_slots: int, pad: float, dtype: torch.dtype, device: torch.device, *inner: int) -> None:
        self._pad = pad
        self._inner = inner
        self.data = torch.full((num_slots, 0, *inner), pad, dtype=dtype, device=device)

    def put(self, slot: int, values: Sequence[float] | Sequence[Sequence[int]]) -> None:
        """Writes a slot's list, padded; widens to the next power of two if need be."""
        if len(values) > self.data.shape[1]:
            width = 1 << (len(values) - 1).bit_length()
            more = self.data.new_full((self.data.shape[0], width - self.data.shape[1], *self._inner), self._pad)
            self.data = torch.cat([self.data, more], 1)
        if self.data.shape[1]:
            self.data[slot].fill_(self._pad)
        if len(values):
            self.data[slot, : len(values)] = to_device(torch.tensor(values, dtype=self.data.dtype), self.data.device)


class SamplingState:
    """Per-slot sampling values on the host (for choosing rows) and on the device (for computing).

    Args:
        num_slots: state slots, the null slot included.
        vocab_size: width of logits.
        device: where the sampler runs.
    """

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self._num_slots, self._vocab, self._device = num_slots, vocab_size, device
        self.flags: NDArray[np.int32] = np.zeros(num_slots, np.int32)
        self.logprobs: NDArray[np.int32] = np.zeros(num_slots, np.int32)
        self.host: NDArray[np.int32] = np.zeros((num_slots, NUM_COLUMNS), np.int32)
        self.table = torch.zeros((num_slots, NUM_COLUMNS), dtype=torch.int32, device=device)
        self.bias_ids = SlotTable(num_slots, 0, torch.int64, device)
        self.bias = SlotTable(num_slots, 0.0, torch.float32, device)
        self.stop_ids = SlotTable(num_slots, -1, torch.int64, device)
        self.bad_last = SlotTable(num_slots, -1, torch.int64, device)
        self._prefix_len = 0
        self.bad_prefix = SlotTable(num_slots, -1, torch.int64, device, 0)
        self.recent = torch.full((num_slots, 0), -2, dtype=torch.int64, device=device)
        self.counts: torch.Tensor | None = None
        self.in_prompt: torch.Tensor | None = None

    def admit(self, slot: int, row: RowSampling, output: Sequence[int]) -> None:
        """Writes a slot for a sequence that has generated ``output`` so far (empty unless it was preempted)."""
        self.admit_host(slot, row)
        self.admit_device(slot, row, output, int(self.flags[slot]))
        self.table[slot] = to_device(torch.from_numpy(self.host[slot].copy()), self._device)

    def admit_host(self, slot: int, row: RowSampling) -> int:
        """The host's half, when a step is planned: what rows are chosen by. Gives the slot's flags."""
        p = row.params
        flags = 0 if p.greedy else DRAWS
        if not p.greedy and (0 < p.top_k < self._vocab or p.top_p < 1.0):
            flags |= RANKED
        if p.logit_bias:
            flags |= BIAS
        if p.presence_penalty or p.frequency_penalty or p.repetition_penalty != 1.0:
            flags |= PENALTIES
        if row.bad_word_ids:
            flags |= BAD_WORDS
        if p.min_tokens and self._stops(row):
            flags |= MIN_LENGTH
        if p.logprobs is not None:
            flags |= LOGPROBS
        self.flags[slot] = flags
        self.logprobs[slot] = 0 if p.logprobs is None else min(self._vocab, p.logprobs) if p.logprobs >= 0 else self._vocab
        self._pack(slot, row)
        return flags

    def admit_device(self, slot: int, row: RowSampling, output: Sequence[int], flags: int) -> None:
        """The device's half, in the order of steps; the packed table is written beside it, for all slots of a step at once."""
        p = row.params
        if flags & EDITS:
            # Rows with edits go through every edit that some row of the step needs: what this slot lacks must be empty.
            for flag, table in ((BIAS, self.bias_ids), (BIAS, self.bias), (MIN_LENGTH, self.stop_ids), (BAD_WORDS, self.bad_last)):
                if not flags & flag and table.data.shape[1]:
                    table.put(slot, [])
        if flags & BIAS:
            bias = {i: v for i, v in (p.logit_bias or {}).items() if i < self._vocab}
            self.bias_ids.put(slot, list(bias))
            self.bias.put(slot, list(bias.values()))
        if flags & MIN_LENGTH:
            self.stop_ids.put(slot, self._stops(row))
        if flags & BAD_WORDS:
            self._put_bad_words(slot, row.bad_word_ids, output)
        if flags & PENALTIES:
            self._count(slot, row.prompt_ids, output)

    def _stops(self, row: RowSampling) -> list[int]:
        return [i for i in (*row.eos_ids, *row.params.stop_ids) if i < self._vocab]

    def _pack(self, slot: int, row: RowSampling) -> None:
        p, words = row.params, self.host[slot]
        floats = words.view(np.float32)
        words[:] = 0
        floats[TEMPERATURE] = 1.0 if p.greedy else min(p.temperature, _LARGEST)
        words[TOP_K] = p.top_k if 0 < p.top_k < self._vocab else self._vocab
        floats[TOP_P], floats[MIN_P] = p.top_p, p.min_p
        floats[PRESENCE], floats[FREQUENCY] = p.presence_penalty, p.frequency_penalty
        floats[REPETITION] = min(max(p.repetition_penalty, 1 / _LARGEST), _LARGEST)
        words[SEED_LOW : SEED_HIGH + 1] = np.array([row.seed], np.int64).view(np.int32)
        words[PROMPT_LEN], words[MIN_TOKENS], words[GREEDY] = len(row.prompt_ids), p.min_tokens, p.greedy

    def _put_bad_words(self, slot: int, words: Sequence[Sequence[int]], output: Sequence[int]) -> None:
        longest = max(len(w) for w in words) - 1
        if longest > self._prefix_len:
            extra = longest - self._prefix_len
            old, self._prefix_len = self.bad_prefix.data, longest
            self.bad_prefix = SlotTable(self._num_slots, -1, torch.int64, self._device, longest)
            # Prefixes are aligned to their end; −1 matches anything.
            self.bad_prefix.data = torch.cat([old.new_full((*old.shape[:2], extra), -1), old], 2)
            self.recent = torch.cat([self.recent.new_full((self._num_slots, extra), -2), self.recent], 1)
        n = self._prefix_len
        self.bad_last.put(slot, [w[-1] for w in words])
        self.bad_prefix.put(slot, [[*[-1] * (n - len(w) + 1), *w[:-1]] for w in words])
        if n:
            tail = list(output[-n:])
            self.recent[slot] = to_device(torch.tensor([-2] * (n - len(tail)) + tail, dtype=torch.int64), self._device)

    def _count(self, slot: int, prompt: Sequence[int], output: Sequence[int]) -> None:
        if self.counts is None or self.in_prompt is None:
            self.counts = torch.zeros((self._num_slots, self._vocab), dtype=torch.int32, device=self._device)
            self.in_prompt = torch.zeros((self._num_slots, self._vocab), dtype=torch.bool, device=self._device)
        self.in_prompt[slot].zero_()
        self.in_prompt[slot].index_fill_(0, to_device(torch.tensor(prompt, dtype=torch.int64), self._device), True)
        self.counts[slot].zero_()
        if len(output):
            ids, times = np.unique(np.asarray(output, np.int64), return_counts=True)
            index = to_device(torch.from_numpy(ids), self._device)
            self.counts[slot].index_copy_(0, index, to_device(torch.from_numpy(times.astype(np.int32)), self._device))

    def observe(self, slots: torch.Tensor, tokens: torch.Tensor, flags: int) -> None:
        """Notes the tokens drawn for some slots (each slot at most once), int64 ``[m]`` both.

        ``flags``: union of the flags of the rows; a row whose slot lacks one of them writes to cells nobody reads.
        """
        if flags & PENALTIES and self.counts is not None:
            self.counts[slots, tokens] = self.counts[slots, tokens] + 1
        if flags & BAD_WORDS and self.recent.shape[1]:
            self.recent[slots] = torch.cat([self.recent[slots, 1:], tokens.unsqueeze(1)], 1)

    def observe_drafted(
        self,
        slots: torch.Tensor,
        tokens: torch.Tensor,
        flags: int,
        counts: torch.Tensor,
        newest: torch.Tensor,
        nth: torch.Tensor,
        before: torch.Tensor,
    ) -> None:
        """Like :meth:`observe` for slots that may have several rows.

        Args:
            slots, tokens: int64 ``[m]``.
            flags: union of the flags of the rows.
            counts: bool ``[m]``, whether a row's token counts; ``newest``: whether it is the last of its slot that does.
            nth: int64 ``[m]``, rows of the same slot before a row; ``before``: int64 ``[m, k]``, their drafts, which the tokens of rows
                that count are equal to.
        """
        if flags & PENALTIES and self.counts is not None:
            self.counts.view(-1).scatter_add_(0, slots * self._vocab + tokens, counts.to(self.counts.dtype))
        n = self.recent.shape[1]
        if flags & BAD_WORDS and n:
            tail = torch.cat([self.recent_with(slots, before)[:, 1:], tokens.unsqueeze(1)], 1)
            # Rows that are not the newest write to the null slot, which nobody reads.
            self.recent[torch.where(newest, slots, 0)] = tail

    def recent_with(self, slots: torch.Tensor, before: torch.Tensor | None) -> torch.Tensor:
        """Newest tokens of some slots, the drafts ``before`` (int64 ``[m, k]``, −1 at the end of shorter rows) among them: ``[m, n]``."""
        recent = self.recent[slots]
        n = recent.shape[1]
        if before is None or not n:
            return recent
        at = (before >= 0).sum(1, keepdim=True) + torch.arange(n, device=recent.device)
        return torch.cat([recent, before], 1).gather(1, at)
