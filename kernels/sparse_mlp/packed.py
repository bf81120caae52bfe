"""Gated experts (SwiGLU) with weights prepared once; the bits of a row do not depend on the other rows.

Which rows an expert gets is known on the device only, and a product over a choice of rows would have a row count that the host would
have to wait for. So every expert computes every row, in ``linear``'s verified row counts, and a row keeps what its own experts made:
the shapes are those of the batch alone. That costs ``E / k`` times the arithmetic of the chosen experts, not more reading of weights
once a batch touches all of them; a grouped product of the same contract can stand beside it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from deepinfer.kernels.linear import PackedLinear, pack_linear
from deepinfer.kernels.swiglu import swiglu


class PackedExperts:
    """``E`` feed-forward blocks, callable on rows and the experts chosen for them."""

    __slots__ = ("_down", "_gate_up")

    def __init__(self, gate_up: Sequence[PackedLinear], down: Sequence[PackedLinear]) -> None:
        self._gate_up, self._down = tuple(gate_up), tuple(down)

    def __call__(self, x: torch.Tensor, experts: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        """``Σ_j shares[t, j] · down_e(swiglu(gate_up_e(x[t])))`` with ``e = experts[t, j]``, added in the order of the experts' numbers.

        ``x`` ``[T, hidden]`` in the weights' dtype, ``experts`` int64 ``[T, k]`` (an expert at most once in a row), ``shares`` float32
        ``[T, k]``; gives float32 ``[T, hidden]``. What an expert makes of rows that did not choose it is dropped, infinities included.
        """
        of_each = shares.new_zeros((x.shape[0], len(self._down))).scatter_(1, experts, shares)
        chosen = torch.zeros_like(of_each, dtype=torch.bool).scatter_(1, experts, True)
        out = x.new_zeros(x.shape, dtype=torch.float32)
        for number, (gate_up, down) in enumerate(zip(self._gate_up, self._down, strict=True)):
            made = down(swiglu(gate_up(x))).float().mul_(of_each[:, number, None])
            out += torch.where(chosen[:, number, None], made, 0.0)
        return out


def pack_experts(gate_up: Sequence[torch.Tensor], down: Sequence[torch.Tensor]) -> PackedExperts:
    """Prepares the experts' weights, in the order of their numbers: ``gate_up`` ``[2 I, hidden]`` (gate first), ``down`` ``[hidden, I]``.

    Raises ``ValueError`` naming the first expert whose weights do not fit those of expert 0. Row counts are checked as for
    ``pack_linear``; as there, the caller may free what came out packed.
    """
    if len(gate_up) != len(down) or not gate_up:
        raise ValueError(f"{len(gate_up)} gate_up and {len(down)} down weights: every expert needs one of each, and there must be one")
    hidden, width = down[0].shape
    for number, (wide, back) in enumerate(zip(gate_up, down, strict=True)):
        if tuple(wide.shape) != (2 * width, hidden) or tuple(back.shape) != (hidden, width):
            raise ValueError(
                f"expert {number} has gate_up {list(wide.shape)} and down {list(back.shape)}, expert 0 asks for "
                f"{[2 * width, hidden]} and {[hidden, width]}"
            )
    return PackedExperts([pack_linear(w) for w in gate_up], [pack_linear(w) for w in down])
