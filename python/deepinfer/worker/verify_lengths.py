"""How many drafts of each sequence are verified when a step has rows for some of them only, decided on the device.

`conf[r, k]` is the probability that draft ``k`` is accepted if those before it are; draft ``k`` makes a token with probability
``S[r, k] = conf[r, 0] * … * conf[r, k]``. The ``budget`` drafts with the largest ``S`` are the best choice there is: ``S`` never rises
along a sequence, so that they are prefixes, and no other set of that many drafts has a larger sum.

The output stays exact only if ``conf[r, k]`` does not depend on draft ``k`` itself or later ones, and ``budget`` comes from
completed steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class VerifyLengths:
    """What is verified; tensors on the device.

    Attributes:
        lengths: int64 ``[n]``, drafts of each sequence.
        offsets: int64 ``[n + 1]``, first row of each sequence when it has its drafts and one more row.
        rows: int64 ``[n, K + 1]``, the row of a sequence's token ``k``; −1 where it is not verified.
    """

    lengths: torch.Tensor
    offsets: torch.Tensor
    rows: torch.Tensor


def survival(conf: torch.Tensor, drafted: torch.Tensor) -> torch.Tensor:
    """``S`` as float32 ``[n, K]``, from ``conf`` float ``[n, K]`` cut to [0, 1] (NaN = 0); −1 beyond ``drafted`` int64 ``[n]``."""
    c = torch.nan_to_num(conf.float(), nan=0.0, posinf=1.0, neginf=0.0).clamp_(0, 1)
    s = c[:, :1]
    columns = [s]
    for k in range(1, c.shape[1]):  # one product after the other: the same bits on every device
        s = s * c[:, k : k + 1]
        columns.append(s)
    there = torch.arange(c.shape[1], device=c.device) < drafted[:, None]
    return torch.where(there, torch.cat(columns, 1), -1.0)


def verify_lengths(conf: torch.Tensor, drafted: torch.Tensor, budget: torch.Tensor | int) -> VerifyLengths:
    """Keeps the ``budget`` drafts most likely to make a token; among equals those earlier in their sequence, then earlier sequences.

    Args:
        conf: float ``[n, K]``.
        drafted: int64 ``[n]``, drafts that each sequence has.
        budget: most drafts in all, a number or an int64 scalar on the device; not negative.
    """
    n, most = conf.shape
    device = conf.device
    k = torch.arange(most, device=device)
    if n * most == 0:
        lengths = torch.zeros(n, dtype=torch.int64, device=device)
    else:
        s = survival(conf, drafted)
        # One number per draft, all different: larger S, then smaller k, then smaller r. S ≥ 0 orders like its bits.
        bits = (s + 0.0).view(torch.int32).to(torch.int64)
        rank = (k[None, :] * n + torch.arange(n, device=device)[:, None]).to(torch.int64)
        key = torch.where(s >= 0, bits, -1) * (n * most) - rank
        order = torch.argsort(key.view(-1), descending=True)
        place = torch.empty_like(order).scatter_(0, order, torch.arange(n * most, device=device))
        lengths = ((place.view(n, most) < budget) & (s >= 0)).sum(1)
    offsets = torch.cat([lengths.new_zeros(1), (lengths + 1).cumsum(0)])
    at = torch.arange(most + 1, device=device)
    rows = torch.where(at <= lengths[:, None], offsets[:-1, None] + at, -1)
    return VerifyLengths(lengths, offsets, rows)
