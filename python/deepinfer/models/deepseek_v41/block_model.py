"""What DeepSeek-V4 and V4.1 do alike as models: loading through their parameters, caches by a plan, logits, copies at boundaries.

Owns: attributes and methods that both have. Never touches: which layers there are and how they are computed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Generic, TypeVar

import torch

from ...kernels.linear import PackedLinear, pack_linear, row_quantum
from ...kernels.rope import RopeParameters, RopeTable
from ..base import ForwardBatch, ModelOptions
from .caches import CachePlan
from .containers import BlockParameters
from .step import RopeTables, save_states

P = TypeVar("P", bound=BlockParameters)


class BlockModel(Generic[P]):
    """``models.base`` and ``base.LoadableModel`` say what its methods are for.

    Args:
        parameters: allocated; loaded by now or later.
        main, compress: rotation of plain layers and of compressed ones.
    """

    def __init__(self, parameters: P, main: RopeParameters, compress: RopeParameters, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.device = dtype, device
        self._parameters: P | None = parameters
        self._embed, self._norm = parameters.embed, parameters.norm
        self._ropes = RopeTables(RopeTable(main, device), RopeTable(compress, device))
        self._options = ModelOptions()
        self._head: PackedLinear | None = None
        self._caches: CachePlan | None = None
        self._quantum = row_quantum(device)

    @property
    def parameters(self) -> P:
        """What is loaded; gone once it is packed."""
        if self._parameters is None:
            raise RuntimeError("the model's parameters are already loaded and packed")
        return self._parameters

    def parameter_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """See ``base.LoadableModel``."""
        return self.parameters.parameter_shapes()

    def optional_tensors(self) -> tuple[str, ...]:
        """See ``base.LoadableModel``."""
        return self.parameters.optional_tensors()

    def parameter(self, name: str) -> torch.Tensor:
        """See ``base.LoadableModel``."""
        return self.parameters.parameter(name)

    def _take_parameters(self) -> tuple[P, PackedLinear]:
        """The parameters, which are the caller's to pack from here on, and the head, packed."""
        p, self._parameters = self.parameters, None
        # logits are float32 whatever the run dtype: the head decides between tokens
        self._head = pack_linear(p.head.float(), largest_rows=64 if self.device.type == "cpu" else None)
        p.places.close()
        return p, self._head

    @torch.inference_mode()
    def end_step(self, batch: ForwardBatch, rejected: torch.Tensor | None, kv: dict[str, torch.Tensor]) -> None:
        """See ``base.StatefulModel``: copies the state of sequences that passed a boundary to its replica."""
        save_states(batch, rejected, kv["state0"], self.caches)

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """``hidden`` ``[R, d]`` → float32 ``[R, vocab]``; the rows may be any choice of rows of ``forward``."""
        if self._head is None:
            raise RuntimeError("finish_loading has not been called")
        return self._head(hidden.float())

    @property
    def caches(self) -> CachePlan:
        """The plan that ``kv_groups`` made last."""
        if self._caches is None:
            raise RuntimeError("kv_groups has not been called: the caches have no form yet")
        return self._caches
