"""Gated experts ``w2(silu(w1 x) * w3 x)`` with weights prepared once; the bits of a row do not depend on the other rows.

Which rows an expert gets is known on the device only, and a product over a choice of rows would have a row count that the host
would have to wait for. So with few experts every one computes every row, in ``linear``'s verified row counts, and a row keeps
what its own experts made; with many, chosen pairs are put into tiles (``gathered``). Which of the two is settled by the number of
experts alone, when weights are packed: they need not agree in the last bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from deepinfer.distributed import ExpertGroup, current_group, share
from deepinfer.distributed.experts import NOWHERE
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
    """Places, those of other ranks included."""
    products: tuple[tuple[PackedLinear, PackedLinear], ...]
    """Of few experts: ``d → 2 m`` (gate first) and ``m → d`` of each place of this rank."""
    stacked: tuple[torch.Tensor, torch.Tensor] | None
    """Of many: their weights ``[P, 2 m, d]`` and ``[P, d, m]``."""
    group: ExpertGroup | None = None
    """The ranks that the places are spread over, as many on each; None = all are here."""

    @property
    def here(self) -> range:
        """Places of this rank."""
        return share(self.group, self.count)

    def __call__(self, x: torch.Tensor, experts: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        """``expert_mlp`` without clamps or rounding, the shares multiplying what experts give (Mixtral)."""
        return expert_mlp(x, experts, shares, self, weight_first=False)


def pack_experts(
    gate_up: Sequence[torch.Tensor] | torch.Tensor, down: Sequence[torch.Tensor] | torch.Tensor, count: int | None = None
) -> PackedExperts:
    """Prepares the experts' weights, one of each per place: ``gate_up`` ``[2 m, d]`` (gate first), ``down`` ``[d, m]``, or both stacked.

    Within ``distributed.spread_experts`` only those of this rank are kept. ``count``: places in all, for a caller that has this rank's
    weights only. Raises ``ValueError`` naming the first expert whose weights do not fit those of expert 0, and ``ConfigError`` for
    experts that cannot be spread evenly. Row counts are checked as for ``pack_linear``; as there, the caller may free what came out
    packed. More than ``DENSE_EXPERTS`` in all are kept stacked.
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
    group = current_group()
    if group is not None:
        group.banks += 1
    places = len(down) if count is None else count
    here = share(group, places)
    if count is None:
        gate_up, down = gate_up[here.start : here.stop], down[here.start : here.stop]
    elif len(down) != len(here):
        raise ValueError(f"{len(down)} experts were given, but {len(here)} of {places} are this rank's")
    if places > DENSE_EXPERTS:
        first, second = (w if isinstance(w, torch.Tensor) and count is not None else torch.stack(list(w)) for w in (gate_up, down))
        return PackedExperts(places, (), (first, second), group)
    return PackedExperts(places, tuple((pack_linear(a), pack_linear(b)) for a, b in zip(gate_up, down, strict=True)), None, group)


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
    if bank.group is None and bank.stacked is None:
        total = torch.zeros(u.shape, dtype=torch.float32, device=u.device)
        for mine, weight, out in _dense(u, ids, weights, bank, places, limit, form, weight_first):
            total += torch.where(mine.any(-1, keepdim=True), out.float() if weight_first else out.float() * weight, 0.0)
        return total
    ids, order = ids.sort(-1)
    weights, place = weights.gather(1, order), ids
    if physical is not None:
        place = to_device(torch.tensor(list(physical)), u.device).index_select(0, ids.flatten()).view(ids.shape)
    if bank.group is None:
        made = _chosen(u, place, weights, bank, limit, form, weight_first)
    else:
        rows, there, given = bank.group.dispatch(u, place, weights)
        here = bank.here
        there = torch.where((there >= here.start) & (there < here.stop), there - here.start, NOWHERE)
        made = bank.group.combine(_chosen(rows, there, given, bank, limit, form, weight_first).to(u.dtype), place // len(here)).float()
    if not weight_first:
        made = made * weights.unsqueeze(-1)
    # as with all experts here: few are added to nothing, many to the first
    total = made[:, 0] + 0.0 if bank.stacked is None else made[:, 0].clone()
    for number in range(1, made.shape[1]):
        total += made[:, number]
    return total


def _chosen(
    u: torch.Tensor,
    place: torch.Tensor,
    weights: torch.Tensor,
    bank: PackedExperts,
    limit: float,
    form: RowFormat | None,
    weight_first: bool,
) -> torch.Tensor:
    """What each chosen place of this rank gives, float32 ``[T, k, d]`` without its weight unless ``weight_first``; zeros for ``NOWHERE``.
    Its numbers are those of ``u``'s dtype."""
    if bank.stacked is not None:

        def inner(product: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            return _inner(product, u.dtype, limit, weight if weight_first else None, form)

        return gathered_mlp(u, place, weights, *bank.stacked, inner)
    made = torch.zeros(*place.shape, u.shape[1], dtype=torch.float32, device=u.device)
    for mine, _, out in _dense(u, place, weights, bank, range(len(bank.products)), limit, form, weight_first):
        made = torch.where(mine.unsqueeze(-1), out.float().unsqueeze(1), made)
    return made


def _dense(
    u: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    bank: PackedExperts,
    places: Sequence[int],
    limit: float,
    form: RowFormat | None,
    weight_first: bool,
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Every expert ``e`` at ``places[e]`` on every row: where it was chosen bool ``[T, k]``, with which weight ``[T, 1]``, what it gives
    ``[T, d]`` in the dtype of ``u``."""
    together = max(1, _INNER_AT_ONCE // max(u.shape[0] * bank.products[0][1].in_features, 1))
    for first in range(0, len(places), together):
        group = range(first, min(first + together, len(places)))
        mine = torch.stack([ids == expert for expert in group])  # [experts, T, k]
        weight = torch.where(mine, weights, 0.0).sum(-1, keepdim=True)  # one term at most is not 0
        # what is done to single numbers is done for all of them in one go: small steps cost what their operations cost to start
        made = torch.stack([bank.products[places[expert]][0](u) for expert in group])
        rows = _inner(made, u.dtype, limit, weight if weight_first else None, form)
        for number, expert in enumerate(group):
            yield mine[number], weight[number], bank.products[places[expert]][1](rows[number])
