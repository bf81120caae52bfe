"""The sampler's kernels for a GPU, by what a step's rows need: masks, edits, the most likely tokens, draws.

Owns: the operators and their scratch. Never touches: what rows want, and what is noted of their tokens (``sampler``, ``sampling_state``). A
step launches one kernel for its maxima and one for each kind of row that it has; nothing is sorted, nothing is read on the host.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import torch

from deepinfer.errors import KernelBuildError
from deepinfer.kernels.argmax.cuda import Argmax
from deepinfer.kernels.sample.cuda import FEW_ROWS, Draws, EditLists, Edits, Logprobs

if TYPE_CHECKING:
    from deepinfer.worker.sampler import SampleRows
    from deepinfer.worker.sampling_state import SamplingState


@dataclass(frozen=True)
class _OfDtype:
    argmax: Argmax
    draws: Draws


class DeviceSampler:
    """Tokens through kernels; the same as the torch operators of ``sampler`` on any device but a CPU draw.

    Args:
        edits: masks and edits, of float32 logits.
        by_dtype: argmax and draws for each type of logits.
        logprobs: what ``gather_logprobs`` takes, for float32 logits.
    """

    def __init__(self, edits: Edits, by_dtype: dict[torch.dtype, tuple[Argmax, Draws]], logprobs: Logprobs) -> None:
        self._edits, self.logprobs = edits, logprobs
        self._by_dtype = {dtype: _OfDtype(*pair) for dtype, pair in by_dtype.items()}

    @classmethod
    def on(cls, device: torch.device, vocab: int, dtype: torch.dtype, max_rows: int, few_rows: int = FEW_ROWS) -> Self | None:
        """For logits in ``dtype`` and in float32; ``None`` without a GPU, and where a kernel cannot be had, which has been said then.
        ``few_rows``: see ``Draws``."""
        if device.type != "cuda" or not torch.cuda.is_available():
            return None
        try:
            made = {
                kept: (Argmax(vocab, kept, max_rows, device), Draws(vocab, kept, max_rows, device, few_rows=few_rows))
                for kept in {dtype, torch.float32}
            }
            return cls(Edits(vocab, device), made, Logprobs(vocab, device, few_rows=few_rows))
        except KernelBuildError:
            return None

    def reads(self, dtype: torch.dtype) -> bool:
        """Whether logits may have this type."""
        return dtype in self._by_dtype

    def greedy(self, logits: torch.Tensor) -> torch.Tensor:
        """The most likely token of each row, int32 ``[r]``."""
        return self._most_likely(logits.contiguous())[0]

    def _most_likely(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = torch.empty(len(logits), dtype=torch.int32, device=logits.device)
        largest = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
        self._by_dtype[logits.dtype].argmax(logits, tokens, largest)
        return tokens, largest

    def mask(self, logits: torch.Tensor, rows: torch.Tensor, masks: torch.Tensor) -> None:
        """``grammar.apply_masks`` on float32 logits."""
        self._edits.mask(logits, rows.long(), masks)

    def draw(self, logits: torch.Tensor, rows: SampleRows, before: torch.Tensor | None, state: SamplingState) -> torch.Tensor:
        """``Sampler.draw``: tokens int64 ``[r]``. Logits of another type than float32 are not edited, others in place if contiguous."""
        logits = logits.contiguous()
        if rows.edit is not None:
            self._edits(logits, rows.edit, rows.slots, state.table, rows.positions, self.lists(rows, before, state))
        tokens, largest = self._most_likely(logits)
        draws = self._by_dtype[logits.dtype].draws
        if rows.plain is not None:
            draws.plain(logits, rows.plain, rows.slots, state.table, rows.positions, largest, tokens)
        if rows.ranked is not None:
            draws.ranked(logits, rows.ranked, rows.slots, state.table, rows.positions, largest, tokens)
        return tokens.long()

    @staticmethod
    def lists(rows: SampleRows, before: torch.Tensor | None, state: SamplingState) -> EditLists:
        """What the rows' edits read."""
        none = rows.slots.new_empty((len(rows.slots), 0))
        return EditLists(
            none if before is None else before.contiguous(),
            state.bias_ids.data,
            state.bias.data,
            state.counts,
            state.in_prompt,
            state.bad_last.data,
            state.bad_prefix.data,
            state.recent,
            state.stop_ids.data,
        )
