"""Which table rows the n-grams that end at a token address.

With ``y_s`` the id ``s`` tokens back and ``N`` the longest n-gram: ``r_0 = y_0 m_0``, ``r_s = r_(s-1) xor (y_s m_s)``, and for
``s`` in ``1 … N - 1`` and each head ``h`` the row ``r_s mod prime[s-1, h] + offset[s-1, h]``. Where the sequence has not begun
or a token is dead (part of an image), that shift and all longer ones read the pad id: an n-gram never reaches across.

Depends on ids only, so rows can be looked up before the forward starts. int64 throughout; the caller keeps ``id * m`` below
``2^63``. Ragged rows through ``cu_q``; nothing is read by the host.
"""

from __future__ import annotations

import torch


def _shifted(ids: torch.Tensor, previous: torch.Tensor, cu_q: torch.Tensor) -> torch.Tensor:
    """Ids at shifts ``0 … N - 1`` as ``[T, N]``, −1 where there is none."""
    rows, reach = ids.shape[0], previous.shape[1]
    row = torch.arange(rows, device=ids.device)
    # rows past the last sequence (padding of a captured step) read the last sequence's past; nothing reads what they give
    sequence = torch.searchsorted(cu_q[1:].long().contiguous(), row, right=True).clamp_max(previous.shape[0] - 1)
    local = row - cu_q.long()[sequence]
    shift = torch.arange(reach + 1, device=ids.device)
    inside = shift <= local[:, None]
    here = ids[(row[:, None] - shift).clamp_min(0)]
    column = (reach + local[:, None] - shift).clamp(0, max(reach - 1, 0))
    before = previous[sequence[:, None], column] if reach else here
    return torch.where(inside, here, before)


def engram_hash(
    ids: torch.Tensor,
    previous: torch.Tensor,
    cu_q: torch.Tensor,
    multipliers: torch.Tensor,
    primes: torch.Tensor,
    offsets: torch.Tensor,
    pad: int,
) -> torch.Tensor:
    """Row numbers int64 ``[L, T, (N - 1) H]``, n-gram size major; −1 for the rows of a dead token, which looks nothing up.

    ``ids`` int64 ``[T]`` and ``previous`` int64 ``[n, N - 1]`` (oldest first) are compressed ids, −1 where dead or before the
    sequence's start; ``cu_q`` int32 ``[n + 1]``; ``multipliers`` ``[L, N]``, ``primes`` and ``offsets`` ``[L, N - 1, H]`` int64.
    """
    seen = _shifted(ids, previous, cu_q)
    alive = (seen >= 0).to(torch.int64).cumprod(1).bool()
    terms = torch.where(alive, seen, pad)[None] * multipliers[:, None]  # [L, T, N]
    mixed = terms[..., 0]
    columns = []
    for size in range(1, terms.shape[-1]):
        mixed = mixed ^ terms[..., size]
        columns.append(mixed[..., None] % primes[:, None, size - 1] + offsets[:, None, size - 1])
    return torch.where(alive[None, :, :1], torch.cat(columns, -1), -1)


def latest_ids(ids: torch.Tensor, previous: torch.Tensor, cu_q: torch.Tensor) -> torch.Tensor:
    """The ``previous`` of the next chunk: the last ``N - 1`` ids of each sequence, int64 ``[n, N - 1]``, oldest first."""
    reach = previous.shape[1]
    start, end = cu_q[:-1].long(), cu_q[1:].long()
    back = torch.arange(reach, 0, -1, device=ids.device)
    row = end[:, None] - back
    here = ids[row.clamp(0, max(ids.shape[0] - 1, 0))] if ids.shape[0] else previous
    column = (row - start[:, None] + reach).clamp(0, max(reach - 1, 0))
    return torch.where(row >= start[:, None], here, previous.gather(1, column))
