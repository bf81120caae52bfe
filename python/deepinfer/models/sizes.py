"""How large a model is, from its configuration alone: parameters, bytes of weights, KV groups. Nothing is allocated or read.

Owns: the counts and which family counts in a way of its own. Never touches: what a machine holds (``engine.fit``).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from .base import ConfigurableModel, Fillable, LoadableModel, PagedGroup, StateGroup
from .loaders.dummy import DummyFp8Source
from .loaders.fp8 import Fp8Source, may_pack
from .loaders.load import keep_fp8_cache, no_fp8_cache
from .registry import architecture_of, resolve_architecture

_OWN: dict[str, str] = {"DeepseekV41ForCausalLM": "deepinfer.models.deepseek_v41.sizes:read_sizes"}
"""Architecture → function for families with parts that are stored in different forms or stay in their files."""


@dataclass(frozen=True)
class PartSize:
    """One part of a model as its checkpoint stores it."""

    name: str
    parameters: int
    nbytes: int


@dataclass(frozen=True)
class ModelSizes:
    """Sizes of a model.

    ``weight_bytes``: form of the weights in memory → bytes, the one to be expected first. ``table_bytes``: what stays in files or
    host memory. ``groups``: KV as the model declares it.
    """

    architecture: str
    parts: tuple[PartSize, ...]
    weight_bytes: Mapping[str, int]
    table_bytes: int
    paged: tuple[PagedGroup, ...]
    state: tuple[StateGroup, ...]
    vocab: int
    max_position: int

    @property
    def parameters(self) -> int:
        """Of all parts."""
        return sum(part.parameters for part in self.parts)

    @property
    def block_tokens(self) -> int:
        """Tokens of a KV block."""
        return self.paged[0].page_tokens

    @property
    def block_bytes(self) -> int:
        """Bytes of a KV block over all paged groups."""
        return sum(self.block_tokens // group.page_tokens * group.page_bytes for group in self.paged)


def resident_bytes(model: Fillable) -> int:
    """Bytes of the parameters that loading fills."""
    return sum(model.parameter(name).nbytes for name in model.parameter_shapes())


def _packed_bytes(family: type[LoadableModel], config: Mapping[str, Any], dtype: torch.dtype, model: LoadableModel) -> int | None:
    """Bytes of the parameters where FP8 weights stay packed; ``None`` if ``model``'s cannot."""
    quantization = config.get("quantization_config") or {}
    make: Callable[..., LoadableModel] | None = getattr(family, "from_packed", None)
    if make is None or dtype == torch.float32 or not may_pack(quantization):
        return None
    source = Fp8Source(DummyFp8Source(model.parameter_shapes(), 0, quantization), quantization)
    return resident_bytes(make(config, dtype, torch.device("meta"), source.packable()))


def read_sizes(
    config: Mapping[str, Any], dtype: torch.dtype = torch.bfloat16, block_tokens: int = 64, fp8_cache: bool = False
) -> ModelSizes:
    """Sizes of the model that ``config`` describes, run in ``dtype`` with KV blocks of ``block_tokens`` (unless the family fixes them).
    ``fp8_cache``: with KV in 8-bit floats.

    Raises ``UnsupportedModelError``, ``UnsupportedConfigError``, ``UnsupportedFormatError`` or ``ConfigError`` as loading it would.
    """
    architecture = architecture_of(config)
    if architecture in _OWN:
        if fp8_cache:
            raise no_fp8_cache(architecture)
        module, _, name = _OWN[architecture].partition(":")
        own: Callable[[Mapping[str, Any], torch.dtype], ModelSizes] = getattr(importlib.import_module(module), name)
        return own(config, dtype)
    family = resolve_architecture(architecture)
    model = family.from_config(config, dtype, torch.device("meta"))
    if fp8_cache:
        keep_fp8_cache(model, architecture)
    paged, state = model.kv_groups(model.block_tokens if isinstance(model, ConfigurableModel) else block_tokens)
    parameters, nbytes = sum(map(prod, model.parameter_shapes().values())), resident_bytes(model)
    packed = _packed_bytes(family, config, dtype, model)
    return ModelSizes(
        architecture=architecture,
        parts=(PartSize("weights", parameters, packed or nbytes),),
        weight_bytes={**({"packed": packed} if packed else {}), str(dtype).removeprefix("torch."): nbytes},
        table_bytes=0,
        paged=tuple(paged),
        state=tuple(state),
        vocab=model.vocab_size,
        max_position=family.position_limit(config),
    )
