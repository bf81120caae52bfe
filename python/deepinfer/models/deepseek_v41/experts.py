"""The experts of one layer: routing, the chosen ones, and the shared one that every row takes."""

from __future__ import annotations

import torch

from ...kernels.block_formats import FP8_ROWS
from ...kernels.experts import expert_mlp, gated_mlp, pack_experts, route
from ...kernels.linear import pack_linear
from .containers import MoeParameters
from .packed import activation_rounding
from .topology import MoeSizes


class Experts:
    """In runtime layout; ``loads`` int64 ``[E]`` counts how often each was chosen, on the device.

    Experts stand where their number says; ``physical`` maps would go to ``expert_mlp``.
    """

    def __init__(self, p: MoeParameters, sizes: MoeSizes, chosen: int, quantised: bool, dtype: torch.dtype) -> None:
        self._sizes, self._chosen, self._dtype = sizes, chosen, dtype
        self._gate, self._bias, self._image_bias = pack_linear(p.gate), p.bias, p.bias_vl
        self._bank = pack_experts(p.w13, p.w2, p.gate.shape[0])
        self._shared_gate_up, self._shared_down = pack_linear(p.shared_w13), pack_linear(p.shared_w2)
        self._rounding = activation_rounding(p.shared_w13.shape[-1], quantised)
        self.loads = torch.zeros(p.gate.shape[0], dtype=torch.int64, device=p.gate.device)
        self._form = FP8_ROWS if activation_rounding(p.shared_w2.shape[-1], quantised) else None

    def __call__(
        self, u: torch.Tensor, image: torch.Tensor | None = None, given: torch.Tensor | None = None, real: int | None = None
    ) -> torch.Tensor:
        """``u`` ``[T, d]`` normed rows → ``[T, d]`` in the run dtype.

        Rows of images (bool ``image`` ``[T]``) have a bias of their own; ``given`` int64 ``[T, k]`` are experts that no score chooses.
        Only the first ``real`` rows count as load; None = all.
        """
        s, bias = self._sizes, self._bias
        if image is not None and bias is not None and self._image_bias is not None:
            bias = torch.where(image[:, None], self._image_bias, bias)
        ids, weights = route(u, self._gate, bias, self._chosen, s.normalise, s.scale, s.temperature, given)
        chosen = ids[:real].flatten()
        self.loads.scatter_add_(0, chosen, torch.ones_like(chosen))
        rounded = u if self._rounding is None else self._rounding(u)
        total = expert_mlp(rounded, ids, weights, self._bank, s.limit, form=self._form, weight_first=s.weight_first)
        total += gated_mlp(rounded, self._shared_gate_up, self._shared_down, s.limit, form=self._form)
        return total.to(self._dtype)
