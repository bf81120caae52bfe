"""Linear layer with its weight prepared once: oneDNN's blocked layout for bfloat16 on a CPU, plain elsewhere.

The contract is that of ``reference.linear``. Packing reads the weight once at load and saves the per-call repacking that
makes small row counts slow. Row counts are checked when the layer is made (``row_classes``).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from .reference import apply_in_classes, row_classes

_CPU_LARGEST = 256
_GPU_LARGEST = 4096
_PACK_HINT = 64  # rows the layout is chosen for; the layout found serves every row count

_class_cache: dict[tuple[object, ...], tuple[int, ...]] = {}


class PackedLinear:
    """A weight ``[out, in]`` with optional bias ``[out]``, callable on ``[T, in]``."""

    __slots__ = ("_apply", "classes", "in_features", "out_features", "packed")

    def __init__(
        self, apply: Callable[[torch.Tensor], torch.Tensor], out_features: int, in_features: int, classes: tuple[int, ...], packed: bool
    ):
        self._apply = apply
        self.out_features = out_features
        self.in_features = in_features
        self.classes = classes
        self.packed = packed

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``[T, in]`` → ``[T, out]``, the bits of a row independent of ``T`` where there are ``classes``."""
        if not self.classes or x.shape[0] in self.classes:
            return self._apply(x)
        return apply_in_classes(self._apply, x, self.classes)


def _can_pack(weight: torch.Tensor) -> bool:
    if weight.device.type != "cpu" or weight.dtype != torch.bfloat16 or not torch.backends.mkldnn.is_available():
        return False
    ops = torch.ops.mkldnn
    needed = ("_reorder_linear_weight", "_linear_pointwise", "_is_mkldnn_bf16_supported")
    return all(hasattr(ops, name) for name in needed) and bool(ops._is_mkldnn_bf16_supported())


def pack_linear(
    weight: torch.Tensor, bias: torch.Tensor | None = None, largest_rows: int | None = None, invariant: bool = True
) -> PackedLinear:
    """Prepares ``weight`` ``[out, in]`` (any float dtype) for repeated use and finds its safe row counts.

    ``largest_rows`` bounds the rows of one library call (default 256 on a CPU, 4096 on a GPU). The caller may free
    ``weight`` afterwards if the result says ``packed``. Without ``invariant`` any number of rows is one library call, whatever its bits.
    """
    out_features, in_features = weight.shape
    packed = _can_pack(weight)
    apply: Callable[[torch.Tensor], torch.Tensor]
    if packed:
        blocked = torch.ops.mkldnn._reorder_linear_weight(weight, _PACK_HINT)
        pointwise = torch.ops.mkldnn._linear_pointwise.default

        def apply(x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = pointwise(x, blocked, bias, "none", [], "")
            return out
    else:

        def apply(x: torch.Tensor) -> torch.Tensor:
            return F.linear(x, weight, bias)

    if not invariant:
        return PackedLinear(apply, out_features, in_features, (), packed)
    largest = largest_rows or (_CPU_LARGEST if weight.device.type == "cpu" else _GPU_LARGEST)
    # The kernel depends on shape, dtype, device and threads, not on the values: one census serves equal layers.
    key = (out_features, in_features, bias is not None, weight.dtype, weight.device, packed, largest, torch.get_num_threads())
    if key not in _class_cache:
        _class_cache[key] = row_classes(apply, in_features, weight.dtype, weight.device, largest)
    return PackedLinear(apply, out_features, in_features, _class_cache[key], packed)
