"""From logits to tokens, all rows of a step at once, each row as if it were alone.

Order: bias, penalties, masks; greedy rows take the first maximum; others divide by temperature, keep `top_k`, `top_p`, `min_p` in
that order and draw by inverse distribution function from a counter RNG.

Two things make a draw exact, whatever the device, the batch or the order of additions:
- the RNG is a function of (seed, position, draw id) in 64-bit integer arithmetic;
- weights `exp(x - max)` are cut to integers so small that every partial sum over the vocabulary is exact in float64.
Tokens less likely than 2**-37 of the most likely one (at a vocabulary of 49152) are thereby never drawn.

On a GPU the exponential is ``kernels.sample.weights``, built from operations that are rounded alike everywhere, so that kernels (see
``device_sampler``) and the operators here draw the same tokens. On a CPU it is torch's, which is faster there and has other last bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from deepinfer.kernels.sample import weight_power, weights
from deepinfer.kernels.sample.columns import (
    FREQUENCY,
    GREEDY,
    MIN_P,
    MIN_TOKENS,
    PRESENCE,
    PROMPT_LEN,
    REPETITION,
    SEED_HIGH,
    SEED_LOW,
    TEMPERATURE,
    TOP_K,
    TOP_P,
)
from deepinfer.kernels.sample.cuda import Logprobs
from deepinfer.worker.counter_rng import TOKEN, random_bits, uniform
from deepinfer.worker.device_sampler import DeviceSampler
from deepinfer.worker.grammar import apply_masks
from deepinfer.worker.ranking import ranked
from deepinfer.worker.sampling_state import BAD_WORDS, BIAS, MIN_LENGTH, PENALTIES, SamplingState
from deepinfer.worker.verify import DraftRows, Proposals, accepted_counts, counting, coupled_draw

_BLOCK = 256  # vocabulary entries whose weights are summed before searching
_FIRST_RANKS = 256  # ranked candidates looked at before all of them, where looking is cheap


def weight_scale(vocab_size: int) -> float:
    """Largest power of two at which the sum of ``vocab_size`` weights of at most that size is exact in float64."""
    return 2.0 ** weight_power(vocab_size)


@dataclass(frozen=True)
class SampleRows:
    """Sampling rows of a step, as the sampler needs them; all tensors on its device.

    Attributes:
        slots: int64 ``[r]`` state slot of each row.
        positions: int64 ``[r]`` position of the token to be drawn.
        flags: union of the slots' flags.
        edit: rows whose logits are edited first, int64 ``[e]``; ``None`` = no row.
        plain: rows that draw from the whole vocabulary (``min_p`` included); ``None`` = no row.
        ranked: rows that draw under ``top_k`` or ``top_p``; ``None`` = no row.
        max_top_k: largest ``top_k`` among the ranked rows; the vocabulary size if one has none.
        drafts: how rows belong to drafts; ``None`` = each sequence has one row.
        proposals: drafts with a distribution, on rows that draw (greedy rows need none).
    """

    slots: torch.Tensor
    positions: torch.Tensor
    flags: int
    edit: torch.Tensor | None = None
    plain: torch.Tensor | None = None
    ranked: torch.Tensor | None = None
    max_top_k: int = 0
    drafts: DraftRows | None = None
    proposals: Proposals | None = None


class Sampler:
    """Draws one token per row.

    Args:
        state: sampling values by slot.
        vocab_size: width of logits.
        kernels: what draws in place of torch operators.
        portable: whether weights come from ``kernels.sample.weights``; ``None`` = on every device but a CPU.
    """

    def __init__(self, state: SamplingState, vocab_size: int, kernels: DeviceSampler | None = None, portable: bool | None = None) -> None:
        self._state, self._vocab = state, vocab_size
        self._scale = weight_scale(vocab_size)
        self._kernels = kernels
        self._portable = state.table.device.type != "cpu" if portable is None else portable

    @property
    def logprob_kernel(self) -> Logprobs | None:
        """For ``logprobs.gather_logprobs``."""
        return None if self._kernels is None else self._kernels.logprobs

    def greedy(self, logits: torch.Tensor) -> torch.Tensor:
        """The most likely token of each row, the lowest id where several are: int32 ``[r]``."""
        if self._kernels is not None and self._kernels.reads(logits.dtype):
            return self._kernels.greedy(logits)
        return torch.argmax(logits, dim=-1).to(torch.int32)

    def mask(self, logits: torch.Tensor, rows: torch.Tensor, masks: torch.Tensor) -> None:
        """See ``grammar.apply_masks``."""
        if self._kernels is None:
            apply_masks(logits, rows, masks)
        else:
            self._kernels.mask(logits, rows, masks)

    def __call__(self, logits: torch.Tensor, rows: SampleRows) -> torch.Tensor:
        """Tokens int64 ``[r]`` from logits float32 ``[r, vocab]``, which are edited in place.

        A row behind drafts is edited as if they had been drawn; the state then takes in the tokens that count.
        """
        drafts = rows.drafts
        tokens = self.draw(logits, rows, None if drafts is None else drafts.before)
        if rows.proposals is not None:
            tokens[rows.proposals.rows] = self._draw_coupled(logits, tokens, rows, rows.proposals)
        if rows.edit is not None:
            slots, made = rows.slots[rows.edit], tokens[rows.edit]
            if drafts is None:
                self._state.observe(slots, made, rows.flags)
            else:
                accepted = accepted_counts(tokens, drafts)
                newest = drafts.nth + 1 == accepted[drafts.sequence]
                counts = counting(accepted, drafts)
                self._state.observe_drafted(
                    slots, made, rows.flags, counts[rows.edit], newest[rows.edit], drafts.nth[rows.edit], drafts.before[rows.edit]
                )
        return tokens

    def draw(self, logits: torch.Tensor, rows: SampleRows, before: torch.Tensor | None) -> torch.Tensor:
        """The tokens alone: nothing is noted, so that a drafter can draw as the model would, from its own logits with the same number.

        ``before`` int64 ``[r, k]``: tokens behind those that the state has seen, oldest first, −1 beyond them.
        """
        if self._kernels is not None:
            return self._kernels.draw(logits, rows, before, self._state)
        if rows.edit is not None:
            slots, positions = rows.slots[rows.edit], rows.positions[rows.edit]
            behind = None if before is None else before[rows.edit]
            logits[rows.edit] = self._edit(logits[rows.edit], slots, positions, rows.flags, behind)
        tokens = torch.argmax(logits, dim=-1)
        if rows.plain is not None:
            tokens[rows.plain] = self._draw_plain(logits[rows.plain], rows, rows.plain, tokens[rows.plain])
        if rows.ranked is not None:
            tokens[rows.ranked] = self._draw_ranked(logits[rows.ranked], rows, rows.ranked, tokens[rows.ranked])
        return tokens

    def _edit(self, x: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, flags: int, before: torch.Tensor | None) -> torch.Tensor:
        """Bias, then penalties (repetition, frequency, presence), then masks; a row without one of them is left as it is.

        ``before`` int64 ``[m, k]``: drafts of this step before the row, −1 = none.
        """
        s = self._state
        packed = s.table[slots]
        if flags & BIAS:
            x = x.scatter_add(1, s.bias_ids.data[slots], s.bias.data[slots])
        if flags & PENALTIES and s.counts is not None and s.in_prompt is not None:
            reals = packed.view(torch.float32)
            repetition, frequency, presence = (reals[:, c : c + 1] for c in (REPETITION, FREQUENCY, PRESENCE))
            counts = s.counts[slots]
            if before is not None:
                counts = counts.scatter_add(1, before.clamp(min=0), (before >= 0).to(counts.dtype))
            made = counts > 0
            repeated = torch.where(made | s.in_prompt[slots], repetition, torch.ones_like(repetition))
            x = torch.where(x > 0, x / repeated, x * repeated)
            x = x - frequency * counts - presence * made
        if flags & BAD_WORDS:
            last = s.bad_last.data[slots]
            prefix, recent = s.bad_prefix.data[slots], s.recent_with(slots, before).unsqueeze(1)
            hit = ((prefix == recent) | (prefix == -1)).all(-1) & (last >= 0)
            x = _ban(x, last, hit)
        if flags & MIN_LENGTH:
            short = positions - packed[:, PROMPT_LEN] < packed[:, MIN_TOKENS]
            ids = s.stop_ids.data[slots]
            x = _ban(x, ids, short.unsqueeze(1) & (ids >= 0))
        return x

    def _draw_plain(self, x: torch.Tensor, rows: SampleRows, which: torch.Tensor, best: torch.Tensor) -> torch.Tensor:
        """Inverse distribution function in id order, by blocks: sums of blocks, then entries of the one block."""
        packed = self._state.table[rows.slots[which]]
        weights = self._weights(x, packed, best)
        weights = torch.where(weights >= packed.view(torch.float32)[:, MIN_P : MIN_P + 1] * self._scale, weights, 0.0)
        padded = torch.nn.functional.pad(weights, (0, -self._vocab % _BLOCK)).view(len(x), -1, _BLOCK)
        ends = padded.sum(-1, dtype=torch.float64).cumsum(-1)
        target = self._target(packed, rows.positions[which], ends[:, -1:])
        block = torch.searchsorted(ends, target, right=True).clamp_(max=ends.shape[1] - 1)
        before = torch.where(block > 0, ends.gather(1, (block - 1).clamp_(min=0)), 0.0)
        entries = padded.gather(1, block.unsqueeze(-1).expand(-1, 1, _BLOCK)).squeeze(1).to(torch.float64).cumsum(-1)
        entry = torch.searchsorted(entries, target - before, right=True).clamp_(max=_BLOCK - 1)
        return torch.where(ends[:, -1] > 0, (block * _BLOCK + entry).squeeze(1), best)

    def _draw_ranked(self, x: torch.Tensor, rows: SampleRows, which: torch.Tensor, best: torch.Tensor) -> torch.Tensor:
        """Inverse distribution function over candidates in falling order."""
        packed = self._state.table[rows.slots[which]]
        ids, kept = self._candidates(x, packed, best, rows.max_top_k)
        ends = kept.cumsum(-1)
        target = self._target(packed, rows.positions[which], ends[:, -1:])
        index = torch.searchsorted(ends, target, right=True).clamp_(max=ends.shape[1] - 1)
        return torch.where(ends[:, -1] > 0, ids.gather(1, index).squeeze(1), best)

    def _candidates(self, x: torch.Tensor, packed: torch.Tensor, best: torch.Tensor, limit: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids in falling order and their weights, 0 where ``top_k``, ``top_p`` or ``min_p`` leave one out: int64, float64 ``[m, c]``."""
        reals = packed.view(torch.float32)
        top_k = packed[:, TOP_K : TOP_K + 1]
        top_p = reals[:, TOP_P : TOP_P + 1].to(torch.float64)
        weights = self._weights(x, packed, best)
        everything = weights.sum(-1, keepdim=True, dtype=torch.float64)
        looking = x.device.type == "cpu"  # elsewhere looking at values would stall the launch: rank all that may be needed
        count = min(limit, _FIRST_RANKS) if looking else limit
        while True:
            ids = ranked(x, count)
            w = weights.gather(1, ids).to(torch.float64)
            ends = w.cumsum(-1)
            width = ends.shape[1]
            all_seen = top_k <= width
            total = torch.where(top_k < self._vocab, ends.gather(1, (top_k.long() - 1).clamp_(max=width - 1)), everything)
            if not looking or count >= limit or bool((all_seen | ((top_k == self._vocab) & (ends[:, -1:] >= top_p * total))).all()):
                break
            count = min(limit, count * 16)
        rank = torch.arange(width, device=x.device)
        keep = (rank < top_k) & ((ends - w < top_p * total) | (top_p >= 1.0)) & (w >= reals[:, MIN_P : MIN_P + 1] * self._scale)
        keep[:, 0] = True
        return ids, torch.where(keep, w, 0.0)

    def _draw_coupled(self, logits: torch.Tensor, tokens: torch.Tensor, rows: SampleRows, proposals: Proposals) -> torch.Tensor:
        """Tokens of the rows whose drafts have a distribution; greedy rows keep theirs."""
        which = proposals.rows
        packed = self._state.table[rows.slots[which]]
        x, drawn = logits[which], tokens[which]
        best = torch.argmax(x, dim=-1)
        reals = packed.view(torch.float32)
        weights = self._weights(x, packed, best)
        weights = torch.where(weights >= reals[:, MIN_P : MIN_P + 1] * self._scale, weights, 0.0)
        if rows.ranked is not None:
            ids, kept = self._candidates(x, packed, best, rows.max_top_k)
            by_rank = torch.zeros_like(weights).scatter_(1, ids, kept.to(weights.dtype))
            filtered = (packed[:, TOP_K : TOP_K + 1] < self._vocab) | (reals[:, TOP_P : TOP_P + 1] < 1)
            weights = torch.where(filtered, by_rank, weights)
        drafts = rows.drafts.drafts[which] if rows.drafts is not None else torch.full_like(drawn, -1)
        coupled = coupled_draw(weights, drawn, drafts, proposals.q, _seed(packed), rows.positions[which], self._scale)
        return torch.where(packed[:, GREEDY] != 0, drawn, coupled)

    def _weights(self, x: torch.Tensor, packed: torch.Tensor, best: torch.Tensor) -> torch.Tensor:
        """Whole numbers in float32: ``floor(exp((x - max) / temperature) * scale)``."""
        largest, temperature = x.gather(1, best.unsqueeze(1)), packed.view(torch.float32)[:, TEMPERATURE : TEMPERATURE + 1]
        if self._portable:
            return weights(x, largest, temperature, weight_power(self._vocab))
        x = x - largest
        x /= temperature
        return x.exp_().mul_(self._scale).floor_()

    def _target(self, packed: torch.Tensor, positions: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        """A whole number in [0, total), float64 ``[m, 1]``."""
        u = uniform(random_bits(_seed(packed), positions, TOKEN)).unsqueeze(1)
        return torch.minimum((u * total).floor_(), total - 1).clamp_(min=0)


def _seed(packed: torch.Tensor) -> torch.Tensor:
    return (packed[:, SEED_HIGH].long() << 32) | (packed[:, SEED_LOW].long() & 0xFFFFFFFF)


def _ban(x: torch.Tensor, ids: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
    """Minus infinity at ``ids`` where ``where`` holds; other entries of the list add zero to some logit."""
    return x.scatter_add(1, ids.clamp(min=0), torch.where(where, -torch.inf, 0.0))
