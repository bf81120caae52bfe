"""Routing by gate scores and the sum of the chosen experts.

Scores are ``sqrt(softplus(logits / temperature))`` (DeepSeek-V4) or a softmax over all experts (Mixtral). A bias takes part in
choosing, not in the weights; equal scores go to the lower expert. Experts are gated blocks ``w2(silu(w1 x) * w3 x)``, optionally
with clamps.

Every expert computes every row and what was not asked for is masked: right for few experts, free of data-dependent sizes. What
experts give is added in the order of their numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from ..activations import silu, softplus
from ..block_formats import RowFormat, fake_quantise
from ..linear import PackedLinear, pack_linear
from ..paged_attention import tree_sum
from ..top_k import top_k

_LEAST_SUM = 1e-20


def _scores(logits: torch.Tensor, scoring: Literal["sqrtsoftplus", "softmax"]) -> torch.Tensor:
    if scoring == "sqrtsoftplus":
        return softplus(logits).sqrt_()
    weights = logits.sub(logits.amax(-1, keepdim=True)).exp_()
    return weights.div_(tree_sum(weights, 1).unsqueeze(-1))


def route(
    u: torch.Tensor,
    gate: PackedLinear,
    bias: torch.Tensor | None,
    chosen: int,
    normalise: bool,
    scale: float,
    temperature: float = 1.0,
    scoring: Literal["sqrtsoftplus", "softmax"] = "sqrtsoftplus",
    ids: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Experts int64 ``[T, k]``, ascending, and their weights float32 ``[T, k]``, for ``u`` ``[T, d]``.

    ``gate`` is the product ``d → E`` in float32, ``bias`` float32 ``[E]`` or ``[T, E]`` (rows of images have one of their own) or None.
    ``normalise``: weights are divided by their sum (at least 1e-20) if ``chosen > 1``. ``ids`` int64 ``[T, k]`` fixes the experts (tables
    by token), in any order; the answer is ascending.
    """
    scores = _scores(gate(u.float()) / temperature, scoring)
    if ids is None:
        ids = top_k(scores if bias is None else scores + bias, chosen)
    ids = ids.sort(-1).values
    weights = scores.gather(1, ids)
    if normalise and chosen > 1:
        weights = weights / (tree_sum(weights, 1).unsqueeze(-1) + _LEAST_SUM)
    return ids, weights * scale


@dataclass(frozen=True)
class ExpertBank:
    """Products of experts, one of each per place."""

    gate_up: tuple[PackedLinear, ...]
    """``d → 2 m``, gate first."""
    down: tuple[PackedLinear, ...]
    """``m → d``."""


def pack_experts(w13: Sequence[torch.Tensor] | torch.Tensor, w2: Sequence[torch.Tensor] | torch.Tensor) -> ExpertBank:
    """Prepares ``w13`` ``[P, 2 m, d]`` (gate rows first) and ``w2`` ``[P, d, m]``, or sequences of their parts, for repeated use."""
    return ExpertBank(tuple(pack_linear(w) for w in w13), tuple(pack_linear(w) for w in w2))


def gated_mlp(
    u: torch.Tensor,
    gate_up: PackedLinear,
    down: PackedLinear,
    limit: float = 0.0,
    weight: torch.Tensor | None = None,
    form: RowFormat | None = None,
    weight_first: bool = True,
) -> torch.Tensor:
    """One expert: ``u`` ``[T, d]`` in the dtype of its products → float32 ``[T, d]``.

    ``limit > 0`` clamps the gate from above and the other half to ``±limit``, before SiLU. ``weight`` float32 ``[T, 1]`` multiplies the
    inner row (``weight_first``) or the answer. ``form``: the inner row is rounded to this format, as products of quantised weights take it.
    """
    gate, up = gate_up(u).float().chunk(2, -1)
    if limit > 0:
        gate, up = gate.clamp_max(limit), up.clamp(-limit, limit)
    inner = silu(gate) * up
    if weight is not None and weight_first:
        inner = inner * weight
    inner = inner.to(u.dtype)
    if form is not None:
        inner = fake_quantise(inner, form)
    out = down(inner).float()
    return out if weight is None or weight_first else out * weight


def expert_mlp(
    u: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    bank: ExpertBank,
    limit: float = 0.0,
    physical: Sequence[int] | None = None,
    form: RowFormat | None = None,
    weight_first: bool = True,
) -> torch.Tensor:
    """Weighted sum of the chosen experts, float32 ``[T, d]``.

    ``u`` ``[T, d]`` in the dtype of the products, ``ids`` int64 ``[T, k]`` (distinct in a row), ``weights`` float32 ``[T, k]``.
    ``physical[e]`` is the place of expert ``e`` in ``bank`` (None = its number); it does not change the order of additions. Other
    arguments as for ``gated_mlp``; rounding ``u`` is the caller's part. Raises ``ValueError`` for a place the bank does not have.
    """
    places = range(len(bank.down)) if physical is None else physical
    if any(not 0 <= place < len(bank.down) for place in places):
        raise ValueError(f"experts are placed at {min(places)} … {max(places)}, but the bank has {len(bank.down)} places")
    total = torch.zeros(u.shape, dtype=torch.float32, device=u.device)
    for expert, place in enumerate(places):
        mine = ids == expert
        weight = torch.where(mine, weights, 0.0).sum(-1, keepdim=True)  # one term at most is not 0
        out = gated_mlp(u, bank.gate_up[place], bank.down[place], limit, weight, form, weight_first)
        total += torch.where(mine.any(-1, keepdim=True), out, 0.0)
    return total
