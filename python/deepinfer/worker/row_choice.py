"""Which rows of a step want what when tokens are drawn, found by the launching thread from the plan and the requests.

Owns: the selections in the ring slot and their counts. Never touches: the device.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from deepinfer.kernels.sample.columns import MIN_TOKENS, PROMPT_LEN, TOP_K
from deepinfer.worker.sampling_state import DRAWS, EDITS, LOGPROBS, MIN_LENGTH, RANKED, RowSampling, SamplingState
from deepinfer.worker.step import PromptPiece, Step
from deepinfer.worker.step_ring import FLAG_PROMPT_LOGPROBS


def choose_rows(step: Step, sampling: SamplingState, max_draft: int) -> None:
    """Sorts the sampling rows of a step by what they need, so that the device is never asked.

    ``max_draft``: most draft rows of a sequence.
    """
    a, n, r = step.slot.a, step.header.seqs, step.header.samples
    state_row = a["state_row"][:n]
    one_each = r == n and not step.header.draft_rows  # with drafts the rows of one may stand in for those of a prompt's chunk
    row_slot = state_row if one_each else np.repeat(state_row, np.diff(a["sample_off"][: n + 1]))
    a["row_slot"][:r] = row_slot
    if step.header.draft_rows:
        step.chosen.longest = int(np.diff(a["sample_off"][: n + 1]).max())
    if step.header.grammar_rows:
        step.chosen.masks = _store(a["mask_rows"], np.flatnonzero(a["grammar_row"][:r] >= 0))
    flags = sampling.flags[row_slot]
    union = int(np.bitwise_or.reduce(flags)) if r else 0
    if not union:
        return
    if union & MIN_LENGTH:
        packed = sampling.host[row_slot]
        # Positions may yet fall by the drafts of the preceding step: the least decides.
        least = a["rng_pos"][:r] - (max_draft if step.header.unresolved else 0)
        reached = least - packed[:, PROMPT_LEN] >= packed[:, MIN_TOKENS]
        flags = np.where(reached, flags & ~MIN_LENGTH, flags)
        union = int(np.bitwise_or.reduce(flags))
    drawn, by_rank = (flags & DRAWS) != 0, (flags & RANKED) != 0
    ranked = np.flatnonzero(by_rank)
    chosen = step.chosen
    chosen.flags = union
    chosen.edit = _store(a["edit_rows"], np.flatnonzero(flags & EDITS))
    chosen.plain = _store(a["plain_rows"], np.flatnonzero(drawn & ~by_rank))
    chosen.ranked = _store(a["ranked_rows"], ranked)
    if len(ranked):
        chosen.max_top_k = int(sampling.host[row_slot[ranked], TOP_K].max())
    if union & LOGPROBS:
        wanting = np.flatnonzero(flags & LOGPROBS)
        chosen.logprobs = _store(a["logprob_rows"], wanting)
        step.result.logprob_rows = wanting
        step.result.logprob_counts = sampling.logprobs[row_slot[wanting]].tolist()


def choose_prompts(step: Step, prompts: Mapping[int, RowSampling], vocab_size: int) -> None:
    """Which rows are followed by prompt tokens whose log-probabilities are wanted; ``prompts``: who wants them, by state slot."""
    if not step.header.prompt_logprobs:
        return
    a, n = step.slot.a, step.header.seqs
    for i in np.flatnonzero(a["seq_flags"][:n] & FLAG_PROMPT_LOGPROBS).tolist():
        row = prompts.get(int(a["state_row"][i]))
        if row is None:
            continue
        first, last = int(a["cu_q"][i]), int(a["cu_q"][i + 1])
        start = int(a["pos"][first]) + 1
        wanted = row.params.prompt_logprobs or 0
        count = vocab_size if wanted < 0 else min(wanted, vocab_size)
        step.pieces.append(PromptPiece(i, first, start, list(row.prompt_ids[start : start + last - first]), count))


def _store(target: NDArray[np.int32], rows: NDArray[np.intp]) -> int:
    target[: len(rows)] = rows
    return len(rows)
