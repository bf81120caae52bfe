"""What the kernels of a model follow from, read from its configuration: for building them before the model is there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import UnsupportedModelError
from ..kernels.toolchain.shapes import ModelShape
from .llama.forward import LlamaModel
from .llama.fused import kernel_shape
from .llama.topology import read_topology
from .loaders.fp8 import may_pack
from .registry import architecture_of, resolve_architecture


def read_kernel_shape(config: Mapping[str, Any], dtype: str = "bfloat16", page_tokens: int = 64, fp8_cache: bool = False) -> ModelShape:
    """Sizes that kernels of the model ``config`` are made for, run in ``dtype`` with KV blocks of ``page_tokens``. ``fp8_cache``: KV is
    kept as 8-bit floats.

    Raises ``UnsupportedModelError`` for a family that has none, ``UnsupportedConfigError`` as loading the model would.
    """
    architecture = architecture_of(config)
    if not issubclass(resolve_architecture(architecture), LlamaModel):
        raise UnsupportedModelError(f"architecture {architecture!r} runs on torch's operators alone: there are no kernels to build for it")
    weights = "fp8" if may_pack(config.get("quantization_config") or {}) else "plain"
    return kernel_shape(read_topology(config, architecture), dtype, page_tokens, weights, "fp8" if fp8_cache else "plain")
