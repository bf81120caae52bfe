"""Gated experts ``w2(silu(w1 x) * w3 x)`` with weights prepared once; the bits of a row do not depend on the other rows.

Which rows an expert gets is known on the device only, and a product over a choice of rows would have a row count that the host
would have to wait for. So with few experts every one computes every row, in ``linear``'s verified row counts, and a row keeps
what its own experts made; with many, chosen pairs are put into tiles (``gathered``). Which of the two is settled by the number of
experts alone, when weights are packed: they need not agree in the last bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from deepinfer.platforms import to_device

from ..activations import silu
from ..block_formats import RowFormat, fake_quantise
from ..linear import PackedLinear, pack_linear
from .gathered import gathered_mlp

DENSE_EXPERTS = 32
"""Up to so many experts all compute every row."""
_INNER_AT_ONCE = 1 << 22
"""Numbers of inner rows, over several experts, that exist at once."""


@dataclass(frozen=True)
class PackedExperts:
    """Feed-forward blocks, callable on rows and the experts chosen for them."""

    count: int
    """Places."""
    products: tuple[tuple[PackedLinear, PackedLinear], ...]
    """Of few experts: ``d → 2 m`` (gate first) and ``m → d`` of each place."""
    stacked: tuple[torch.Tensor, torch.Tensor] | None
    """Of many: their weights ``[P, 2 m, d]`` and ``[P, d, m]``."""

    def __call__(self, x: torch.Tensor, experts: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        """``expert_mlp`` without clamps or rounding, the shares multiplying what experts give (Mixtral)."""
        return expert_mlp(x, experts, shares, self, weight_first=False)


def pack_experts(gate_up: Sequence[torch.Tensor] | torch.Tensor, down: Sequence[torch.Tensor] | torch.Tensor) -> PackedExperts:
    """Prepares the experts' weights, one of each per place: ``gate_up`` ``[2 m, d]`` (gate first), ``down`` ``[d, m]``, or both stacked.

    Raises ``ValueError`` naming the first expert whose weights do not fit those of expert 0. Row counts are checked as for
    ``pack_linear``; as there, the caller may free what came out packed. More than ``DENSE_EXPERTS`` are kept stacked.
    """
    if len(gate_up) != len(down) or not len(down):
        raise ValueError(f"{len(gate_up)} gate_up and {len(down)} down weights: every expert needs one of each, and there must be one")
    hidden, width = down[0].shape
    for number, (wide, back) in enumerate(zip(gate_up, down, strict=True)):
        if tuple(wide.shape) != (2 * width, hidden) or tuple(back.shape) != (hidden, width):
            raise ValueError(
                f"expert {number} has gate_up {list(wide.shape)} and down {list(back.shape)}, expert 0 asks for "
                f"{[2 * width, hidden]} and {[hidden, width]}"
            )
    if len(down) > DENSE_EXPERTS:
        first, second = (w if isinstance(w, torch.Tensor) else torch.stack(list(w)) for w in (gate_up, down))
        return PackedExperts(len(down), (), (first, second))
    return PackedExperts(len(down), tuple((pack_linear(a), pack_linear(b)) for a, b in zip(gate_up, down, strict=True)), None)


def _inner(gate_up: torch.Tensor, dtype: torch.dtype, limit: float, weight: torch.Tensor | None, form: RowFormat | None) -> torch.Tensor:
    """Inner rows ``[..., m]`` in ``dtype`` from the first product ``[..., 2 m]``."""
    gate, up = gate_up.float().chunk(2, -1)
    if limit > 0:
        gate, up = gate.clamp_max(limit), up.clamp(-limit, limit)
    inner = silu(gate) * up
    if weight is not None:
        inner = inner * weight
    inner = inner.to(dtype)
    return inner if form is None else fake_quantise(inner, form)


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
    out = down(_inner(gate_up(u), u.dtype, limit, weight if weight_first else None, form)).float()
    return out if weight is None or weight_first else out * weight


def expert_mlp(
    u: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    bank: PackedExperts,
    limit: float = 0.0,
    physical: Sequence[int] | None = None,
    form: RowFormat | None = None,
    weight_first: bool = True,
) -> torch.Tensor:
    """Weighted sum of the chosen experts, float32 ``[T, d]``, added in the order of their numbers.

    ``u`` ``[T, d]`` in the dtype of the products, ``ids`` int64 ``[T, k]`` (distinct in a row, any order), ``weights`` float32 ``[T, k]``.
    ``physical[e]`` is the place of expert ``e`` in ``bank`` (None = its number); it does not change the order of additions. Other
    arguments as for ``gated_mlp``; rounding ``u`` is the caller's part. What an expert makes of rows that did not choose it is
    dropped, infinities included. Raises ``ValueError`` for a place the bank does not have.
    """
    places = range(bank.count) if physical is None else physical
    if any(not 0 <= place < bank.count for place in places):
        raise ValueError(f"experts are placed at {min(places)} … {max(places)}, but the bank has {bank.count} places")
    if bank.stacked is not None:
        ids, order = ids.sort(-1)
        weights = weights.gather(1, order)
        if physical is not None:
            ids = to_device(torch.tensor(list(physical)), u.device).index_select(0, ids.flatten()).view(ids.shape)

        def inner(product: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
            row = _inner(product, u.dtype, limit, weight if weight_first else None, form)
            return row, None if weight_first else weight

        made = gathered_mlp(u, ids, weights, *bank.stacked, inner)
        total = made[:, 0].clone()
        for number in range(1, made.shape[1]):
            total += made[:, number]
        return total
    total = torch.zeros(u.shape, dtype=torch.float32, device=u.device)
    together = max(1, _INNER_AT_ONCE // max(u.shape[0] * bank.products[0][1].in_features, 1))
    for first in range(0, len(places), together):
        group = range(first, min(first + together, len(places)))
        mine = torch.stack([ids == expert for expert in group])  # [experts, T, k]
        weight = torch.where(mine, weights, 0.0).sum(-1, keepdim=True)  # one term at most is not 0
        chosen = mine.any(-1, keepdim=True)
        # what is done to single numbers is done for all of them in one go: small steps cost what their operations cost to start
        made = torch.stack([bank.products[places[expert]][0](u) for expert in group])
        rows = _inner(made, u.dtype, limit, weight if weight_first else None, form)
        for number, expert in enumerate(group):
            out = bank.products[places[expert]][1](rows[number]).float()
            total += torch.where(chosen[number], out if weight_first else out * weight[number], 0.0)
    return total
