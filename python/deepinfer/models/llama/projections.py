"""A model's products, made from its weights: packed ones by kernels that read them so, others by the library and kernels of our own."""

from __future__ import annotations

import torch

from ...kernels.linear.cuda import GatedProjection, ProductKernels, Projection
from ...kernels.linear_fp8 import PackedWeight
from ...kernels.linear_fp8.cuda import Expansion, FewRowsFp8, PackedProjection
from ...kernels.swiglu.cuda import SwiGlu
from .containers import Weight

AnyProjection = Projection | PackedProjection


class Projections:
    """Makes projections of one model, which share kernels and the memory for expanded weights.

    Args:
        dtype: bfloat16 or float16.
        device: a GPU.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype, self._device = dtype, device
        self._few: dict[tuple[torch.Size, bool], ProductKernels] = {}
        self._packed: dict[torch.Size, FewRowsFp8] = {}
        self._expansion = Expansion(dtype, device)

    def allocate(self) -> None:
        """Has the memory for expanded weights of all projections made so far, before any graph is recorded."""
        self._expansion.allocate()

    def __call__(self, weight: Weight, bias: torch.Tensor | None = None) -> AnyProjection:
        """The product with ``weight``. Raises ``KernelBuildError``."""
        shape, of_kernels = weight.shape, (weight.shape[1], weight.shape[0], self._dtype, self._device)
        if isinstance(weight, PackedWeight):
            assert bias is None
            if shape not in self._packed:
                self._packed[shape] = FewRowsFp8(*of_kernels)
            return PackedProjection(weight, self._packed[shape], self._expansion)
        return Projection(weight, bias, self._kernels(shape, gated=False))

    def gated(self, weight: Weight, bias: torch.Tensor | None, activation: SwiGlu) -> GatedProjection:
        """The product with ``weight``, whose first half gives the gate, and ``activation``. Raises ``KernelBuildError``."""
        product = self(weight, bias)
        return GatedProjection(product, activation, None if isinstance(weight, PackedWeight) else self._kernels(weight.shape, gated=True))

    def _kernels(self, shape: torch.Size, gated: bool) -> ProductKernels:
        if (shape, gated) not in self._few:
            out_features = shape[0] // 2 if gated else shape[0]
            self._few[shape, gated] = ProductKernels(shape[1], out_features, self._dtype, self._device, gated)
        return self._few[shape, gated]
