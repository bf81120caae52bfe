"""Weights as the forward uses them: one packed product for everything that reads the same input, nothing else kept.

Owns: runtime layouts of one layer. Never touches: checkpoint names, caches, the step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from ...kernels.block_formats import FP8_ROWS, fake_quantise
from ...kernels.linear import PackedLinear, pack_linear
from .containers import (
    AttentionParameters,
    CompressorParameters,
    DraftParameters,
    EngramParameters,
    IndexerParameters,
    MixParameters,
)

Rounding = Callable[[torch.Tensor], torch.Tensor]


def activation_rounding(width: int, quantised: bool) -> Rounding | None:
    """What inputs ``[..., width]`` of a product go through whose weight the checkpoint keeps in FP8 or FP4; None = nothing.

    The release was trained with inputs in FP8 per 32; widths that are no multiple of that stay as they are.
    """
    return partial(fake_quantise, form=FP8_ROWS) if quantised and FP8_ROWS.fits(width) else None


class Projection:
    """A product whose input is rounded first where the weight's form asks for it."""

    __slots__ = ("_product", "_rounding")

    def __init__(self, weight: torch.Tensor, quantised: bool) -> None:
        self._product = pack_linear(weight)
        self._rounding = activation_rounding(weight.shape[-1], quantised)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``[T, in]`` → ``[T, out]``; a row's bits do not depend on ``T``."""
        return self._product(x if self._rounding is None else self._rounding(x))


@dataclass(frozen=True)
class PackedMix:
    """One site of the streams."""

    fn: PackedLinear
    base: torch.Tensor
    scale: torch.Tensor

    @classmethod
    def pack(cls, p: MixParameters) -> PackedMix:
        """From its parameters."""
        return cls(pack_linear(p.fn), p.base, p.scale)


@dataclass(frozen=True)
class PackedAttention:
    """``down`` gives the low-rank query and the latent side by side; ``groups`` are the output's first products."""

    down: Projection
    q_norm: torch.Tensor
    up: Projection
    kv_norm: torch.Tensor
    groups: tuple[PackedLinear, ...]
    out: Projection
    sink: torch.Tensor

    @classmethod
    def pack(cls, p: AttentionParameters, quantised: bool) -> PackedAttention:
        """From its parameters. Inputs of ``groups`` are never rounded: the release multiplies them unquantised."""
        return cls(
            down=Projection(torch.cat((p.wq_a, p.wkv)), quantised),
            q_norm=p.q_norm,
            up=Projection(p.wq_b, quantised),
            kv_norm=p.kv_norm,
            groups=tuple(pack_linear(group) for group in p.wo_a),
            out=Projection(p.wo_b, quantised),
            sink=p.sink,
        )


@dataclass(frozen=True)
class PackedHeads:
    """What stands before and behind the draft stages; ``spread`` adds the Markov head's logits, float32 like the model's."""

    main: Projection
    main_norm: torch.Tensor
    norm: torch.Tensor
    markov: torch.Tensor
    spread: PackedLinear
    confidence: torch.Tensor

    @classmethod
    def pack(cls, p: DraftParameters, quantised: bool) -> PackedHeads:
        """From its parameters."""
        spread = pack_linear(p.markov_head.float(), largest_rows=64 if p.markov_head.device.type == "cpu" else None)
        return cls(Projection(p.main_proj, quantised), p.main_norm, p.norm, p.markov_embed, spread, p.confidence[0].float())


@dataclass(frozen=True)
class PackedCompressor:
    """``raw`` gives values, and behind them gates where entries pool several tokens."""

    raw: PackedLinear
    pools: bool
    norm: torch.Tensor

    @classmethod
    def pack(cls, p: CompressorParameters) -> PackedCompressor:
        """From its parameters."""
        weight = p.wkv if p.wgate is None else torch.cat((p.wkv, p.wgate))
        return cls(pack_linear(weight), p.wgate is not None, p.norm)


@dataclass(frozen=True)
class PackedIndexer:
    """``keys`` and ``key_norm`` only in layers that fill a cache."""

    queries: Projection
    weights: PackedLinear
    keys: PackedLinear | None
    key_norm: torch.Tensor | None

    @classmethod
    def pack(cls, p: IndexerParameters, quantised: bool) -> PackedIndexer:
        """From its parameters."""
        keys = None if p.wk is None else pack_linear(p.wk)
        return cls(Projection(p.wq_b, quantised), pack_linear(p.weights_proj), keys, p.k_norm)


@dataclass(frozen=True)
class PackedEngram:
    """Products and norms of the gate."""

    key_value: Projection
    q_weight: torch.Tensor
    k_weight: torch.Tensor

    @classmethod
    def pack(cls, p: EngramParameters, quantised: bool) -> PackedEngram:
        """From its parameters."""
        return cls(Projection(p.wkv, quantised), p.q_weight, p.k_weight)
