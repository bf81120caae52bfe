"""Projections on a GPU, each number of rows by what is fastest: cuBLAS, or kernels of DeepInfer's own that give the same bits.

All of them add in one order, a tensor-core accumulation after another over K. ``agreeing_rows`` compares them before one is used in the
place of another, so that which of them runs may follow the number of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.nn.functional as F

from ..toolchain import ModelShape, Program
from ..toolchain.loading import require
from ..toolchain.shapes import run_dtype
from .choice import LIMITS, choose
from .library import library


def programs_of(in_features: int, out_features: int, dtype: str, gated: bool = False) -> list[Program]:
    """Every kernel that is chosen for some number of rows."""
    chosen = [choose(in_features, out_features, rows, gated) for rows in LIMITS]
    return list(dict.fromkeys(c.program(in_features, out_features, dtype, gated) for c in chosen if c is not None))


class ProductKernels:
    """The kernels for weights ``[out_features, in_features]``, or ``gated``, with the activation, for ``[2 out_features, in_features]``.

    Attributes:
        limit: the most rows that one is chosen for; 0 = none at all.

    Raises ``KernelBuildError`` if one cannot be had.
    """

    def __init__(self, in_features: int, out_features: int, dtype: torch.dtype, device: torch.device, gated: bool = False) -> None:
        name = run_dtype(dtype)
        programs = programs_of(in_features, out_features, name, gated)
        kernels = dict(zip(programs, require(programs, device, after=True), strict=True)) if programs else {}
        chosen = [choose(in_features, out_features, rows, gated) for rows in LIMITS]
        pairs = [None if c is None else (c, kernels[c.program(in_features, out_features, name, gated)]) for c in chosen]
        self.limit = max((rows for rows, pair in zip(LIMITS, pairs, strict=True) if pair is not None), default=0)
        self._of_rows = [next(p for most, p in zip(LIMITS, pairs, strict=True) if rows <= most) for rows in range(self.limit + 1)]

    def covers(self, rows: int) -> bool:
        """Whether one is chosen for so many rows, and not the library."""
        return rows <= self.limit and self._of_rows[rows] is not None

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
        """``x`` ``[R, in]``, ``weight`` as said, ``out`` ``[R, out]``; all contiguous, for an ``R`` that is covered."""
        pair = self._of_rows[out.shape[0]]
        assert pair is not None
        choice, kernel = pair
        choice.launch(kernel, x, weight, out)


def _kernels_for(few: ProductKernels | None, up_to: int, rows: int) -> ProductKernels | None:
    """``few`` if it is to run so many rows; ``None``: the library does."""
    return few if few is not None and rows <= up_to and few.covers(rows) else None


class Projection:
    """One weight ``[out, in]`` with optional bias, run by whichever form is fastest at a number of rows that has the same bits.

    ``few``, for weights without bias, is used for the rows it covers up to ``few_up_to``; 0 = never.
    """

    __slots__ = ("bias", "few", "few_up_to", "library", "weight")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None, few: ProductKernels | None = None) -> None:
        self.weight, self.bias = weight, bias
        self.few = few if bias is None else None
        self.few_up_to = 0 if self.few is None else self.few.limit
        self.library = library(weight.device) if bias is None else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` ``[R, in]`` → ``[R, out]``."""
        rows = x.shape[0]
        few = _kernels_for(self.few, self.few_up_to, rows)
        if few is None:
            return self.by_library(x)
        out = x.new_empty((rows, self.weight.shape[0]))
        few(x, self.weight, out)
        return out

    def by_library(self, x: torch.Tensor) -> torch.Tensor:
        """The same by cuBLAS."""
        if self.library is None:
            return F.linear(x, self.weight, self.bias)
        return self.library.linear(x, self.weight)


class GatedProjection:
    """The product of two weights, one above the other, and a gated activation: ``x`` ``[R, in]`` → ``[R, out]``.

    Args:
        product: of the weights ``[2 out, in]``, of which the first half gives the gate.
        activation: writes what ``product`` gives, ``[R, 2 out]``, to ``[R, out]``.
        few: kernels that do both at once, for a ``product`` without bias; used as those of ``Projection``.
    """

    __slots__ = ("activation", "few", "few_up_to", "product")

    def __init__(
        self, product: Product, activation: Callable[[torch.Tensor, torch.Tensor], None], few: ProductKernels | None = None
    ) -> None:
        self.product, self.activation = product, activation
        self.few = few if product.bias is None else None
        self.few_up_to = 0 if self.few is None else self.few.limit

    @property
    def weight(self) -> torch.Tensor:
        """Of both."""
        return self.product.weight

    @property
    def bias(self) -> torch.Tensor | None:
        """Of both."""
        return self.product.bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` ``[R, in]`` → ``[R, out]``."""
        rows = x.shape[0]
        few = _kernels_for(self.few, self.few_up_to, rows)
        if few is None:
            return self.by_library(x)
        weight = self.weight
        out = x.new_empty((rows, weight.shape[0] // 2))
        few(x, weight, out)
        return out

    def by_library(self, x: torch.Tensor) -> torch.Tensor:
        """The same one after the other, the product as it is run."""
        both = self.product(x)
        out = both.new_empty((both.shape[0], both.shape[1] // 2))
        self.activation(both, out)
        return out


class Covering(Protocol):
    """Kernels of a product."""

    def covers(self, rows: int) -> bool:
        """Whether one is chosen for so many rows, and not the library."""


class Product(Protocol):
    """What ``agreeing_rows`` compares: ``Projection``, or one that keeps its weight in another form. ``weight`` in the run dtype."""

    few_up_to: int

    @property
    def weight(self) -> torch.Tensor: ...
    @property
    def bias(self) -> torch.Tensor | None: ...
    @property
    def few(self) -> Covering | None: ...
    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...
    def by_library(self, x: torch.Tensor) -> torch.Tensor: ...


def agreeing_rows(projections: Sequence[Product], candidates: Sequence[int]) -> list[int]:
    """Which numbers of rows give every row the bits it has among the most rows of all: for all ``projections``, ascending.

    Compares every row of random inputs, bit by bit. Kernels that differ from the library are switched off (``few_up_to``) before the
    library's own form is compared; a ``GatedProjection`` comes behind its ``product``. The largest candidate is the definition and
    always agrees.
    """
    agreed = sorted(set(candidates))
    seen: dict[tuple[type, int, int, bool], tuple[list[int], int]] = {}
    for projection in projections:
        weight = projection.weight
        key = (type(projection), weight.shape[0], weight.shape[1], projection.bias is not None)
        if key not in seen:
            seen[key] = _agreeing(projection, sorted(set(candidates)))
        rows, projection.few_up_to = seen[key][0], min(projection.few_up_to, seen[key][1])
        agreed = [r for r in agreed if r in rows]
    return agreed


def _agreeing(projection: Product, candidates: list[int]) -> tuple[list[int], int]:
    """Agreeing candidates, and up to how many rows the kernels agree."""
    weight, kernels = projection.weight, projection.few
    generator = torch.Generator(weight.device).manual_seed(0)
    probe = torch.randn(candidates[-1], weight.shape[1], generator=generator, device=weight.device, dtype=weight.dtype)
    whole = projection.by_library(probe)
    own: list[int] = []
    up_to = 0
    if kernels is not None:
        for rows in [r for r in candidates if r <= projection.few_up_to]:
            if kernels.covers(rows):
                if not torch.equal(projection(probe[:rows].contiguous()), whole[:rows]):
                    break
                own.append(rows)
            up_to = rows
    found = []
    for rows in candidates:
        if rows in own or torch.equal(projection.by_library(probe[:rows].contiguous()), whole[:rows]):
            found.append(rows)
    return found, up_to


def programs_for(shape: ModelShape) -> list[Program]:
    """What a model of ``shape`` launches."""
    products = [program for width, out in linears_of(shape) for program in programs_of(width, out, shape.dtype)]
    return products + (programs_of(shape.hidden, shape.intermediate, shape.dtype, gated=True) if shape.weights == "plain" else [])


def linears_of(shape: ModelShape) -> list[tuple[int, int]]:
    """(in, out) of the projections of a layer, then of the head."""
    qkv = shape.q_size + 2 * shape.kv_size
    return [
        (shape.hidden, qkv),
        (shape.q_size, shape.hidden),
        (shape.hidden, 2 * shape.intermediate),
        (shape.intermediate, shape.hidden),
        (shape.hidden, shape.vocab),
    ]
