"""Verification of drafts: how many tokens each sequence of a step has made, found on the device without asking it.

Sampling row ``j`` of a sequence draws the token for the position after its row; draft ``j + 1`` is the guess for that position.
A draft counts iff the token drawn for its position is equal to it, and every draft before it counts; the first token that
differs (or the one after the last draft) is the sequence's own. Two ways to draw make this exact:

- *as ever*, from the row's distribution with the position's own random number: the draw does not know the draft, so that tokens
  are those of a run without drafts, bit for bit;
- *coupled* to a draft that was itself drawn from a known distribution ``q``: keep the draft with probability ``min(1, p / q)``, else
  draw from the normalised positive part of ``p − q``. The token's distribution is ``p`` all the same, and it equals the draft as
  often as any rule can make it.

What may decide how many drafts are verified: anything older than the step, or for position ``k`` anything that does not depend on
the draft at ``k`` or later ones. A length that follows from a sampled draft's own probability bends the distribution.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from deepinfer.worker.counter_rng import ACCEPT, RESIDUAL, random_bits, uniform


@dataclass(frozen=True)
class DraftRows:
    """How the sampling rows of a step belong to sequences and drafts; tensors on the device.

    Attributes:
        borders: int64 ``[n + 1]``: sampling rows of sequence ``i`` are ``borders[i]..borders[i + 1]``.
        nth: int64 ``[r]``, rows of the same sequence before a row.
        first: int64 ``[r]``, first sampling row of a row's sequence.
        sequence: int64 ``[r]``, index of a row's sequence.
        drafts: int64 ``[r]``, the draft that a row verifies (the token of the next row), −1 on a sequence's last row.
        before: int64 ``[r, k]``, the drafts before a row's token in this step, oldest first; −1 beyond them.
    """

    borders: torch.Tensor
    nth: torch.Tensor
    first: torch.Tensor
    sequence: torch.Tensor
    drafts: torch.Tensor
    before: torch.Tensor


@dataclass(frozen=True)
class Proposals:
    """Drafts with a distribution; tensors on the device.

    Attributes:
        rows: int64 ``[m]``, sampling rows that verify such a draft.
        q: float ``[m, vocab]``, the distribution that each draft was drawn from, independently of the target's random numbers
            (draw ids of `deepinfer.worker.counter_rng` from ``DRAFT`` on are free). A row that is no distribution, or in which its
            draft cannot occur, is not used: the token is drawn as if the draft had none.
    """

    rows: torch.Tensor
    q: torch.Tensor


def draft_rows(ids: torch.Tensor, sample_row: torch.Tensor, sample_off: torch.Tensor, rows: int, longest: int) -> DraftRows:
    """From a step's ring fields.

    Args:
        ids: integer ``[T]``, token of each row of the step.
        sample_row: integer ``[rows]``, row of the step that a sampling row reads.
        sample_off: integer ``[n + 1]``, as the ring has it; sequences that do not sample have no rows.
        rows: sampling rows.
        longest: at least the sampling rows of the sequence that has most; known on the host.
    """
    borders = sample_off.long()
    at = torch.arange(rows, device=ids.device)
    sequence = torch.searchsorted(borders[1:], at, right=True)
    first = borders[sequence]
    nth = at - first
    tokens = ids[sample_row[:rows].long()].long()
    following = torch.cat([tokens[1:], tokens.new_full((1,), -1)])
    drafts = torch.where(at + 1 < borders[sequence + 1], following, -1)
    step = torch.arange(1, longest, device=ids.device)
    before = torch.where(step <= nth[:, None], tokens[(first[:, None] + step).clamp(max=max(rows - 1, 0))], -1)
    return DraftRows(borders, nth, first, sequence, drafts, before)


def accepted_counts(tokens: torch.Tensor, rows: DraftRows) -> torch.Tensor:
    """Tokens that each sequence has made, int32 ``[n]``: 1 + the drafts that equal the leading tokens; 0 without a sampling row.

    ``tokens`` integer ``[r]`` are what the rows drew; those of sequence ``i`` that count are the first ``accepted[i]`` of its rows.
    """
    count = len(tokens)
    starts, ends = rows.borders[:-1], rows.borders[1:]
    if not count:
        return torch.zeros_like(starts, dtype=torch.int32)
    at = torch.arange(count, device=tokens.device)
    missed = torch.where(tokens == rows.drafts, count, at)  # a last row has no draft and always misses
    nearest = torch.cummin(missed.flip(0), 0).values.flip(0)
    made = nearest[starts.clamp(max=count - 1)] - starts + 1
    return torch.where(ends > starts, made, 0).to(torch.int32)


def counting(accepted: torch.Tensor, rows: DraftRows) -> torch.Tensor:
    """Bool ``[r]``: rows whose token counts."""
    return rows.nth < accepted[rows.sequence]


def coupled_draw(
    weights: torch.Tensor,
    otherwise: torch.Tensor,
    drafts: torch.Tensor,
    q: torch.Tensor,
    seed: torch.Tensor,
    position: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Tokens of the distribution ``weights / sum``, equal to drafts drawn from ``q`` as often as can be: int64 ``[m]``.

    Weights and ``q`` are cut to whole numbers so small that every sum over the vocabulary is exact in float64: a row's token does
    not depend on the order of additions.

    Args:
        weights: float32 ``[m, vocab]``, whole numbers of at most ``scale``; 0 = cannot be drawn.
        otherwise: int64 ``[m]``, tokens drawn from ``weights`` without knowing the drafts: for rows whose ``q`` cannot be used.
        drafts: int64 ``[m]``.
        q: float ``[m, vocab]``, see :class:`Proposals`.
        seed, position: int64 ``[m]``, of the token to be drawn.
        scale: of the sampler, a power of two.
    """
    sound = ((q >= 0) & (q <= 1 + 1e-3)).all(-1)  # false for NaN too
    qw = torch.where(sound[:, None], q.to(torch.float64), 0.0).clamp_(max=1).mul_(scale).floor_()
    pw = weights.to(torch.float64)
    p_all, q_all = pw.sum(-1, keepdim=True), qw.sum(-1, keepdim=True)
    draft = drafts.clamp(min=0).unsqueeze(1)
    p_of, q_of = pw.gather(1, draft), qw.gather(1, draft)
    u = uniform(random_bits(seed, position, ACCEPT)).unsqueeze(1)
    keep = u * q_of * p_all < p_of * q_all
    rest = (pw - qw * (p_all / q_all.clamp(min=1))).clamp_(min=0).floor_()
    ends = rest.cumsum(-1)
    total = ends[:, -1:]
    target = (uniform(random_bits(seed, position, RESIDUAL)).unsqueeze(1) * total).floor_()
    target = torch.minimum(target, total - 1).clamp_(min=0)
    drawn = torch.searchsorted(ends, target, right=True).clamp_(max=weights.shape[1] - 1)
    # Nothing left of p − q: the two are equal up to rounding, and any draw from p will do.
    drawn = torch.where(total > 0, drawn, otherwise.unsqueeze(1))
    usable = (q_of > 0) & (p_all > 0) & sound.unsqueeze(1) & (drafts >= 0).unsqueeze(1)
    return torch.where(usable, torch.where(keep, draft, drawn), otherwise.unsqueeze(1)).squeeze(1)
