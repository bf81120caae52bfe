"""DeepInfer: an LLM inference engine with a Rust scheduler.

Owns: the names a user imports. Never touches: anything; the parts that need torch are imported when first used.
"""

from __future__ import annotations

import importlib
import os
import sys
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

# Before torch loads its thread pool: by default its threads spin for milliseconds at every barrier, which on a shared machine
# takes the cores from whoever should run (decoding was 3 times slower beside one busy process). A microsecond's spin is enough.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

from deepinfer import errors
from deepinfer.collector import importing
from deepinfer.outputs import CompletionOutput, Logprob, RequestOutput
from deepinfer.sampling import SamplingParams
from deepinfer.structured_outputs import StructuredOutputs

if TYPE_CHECKING:
    from deepinfer.engine.async_engine import AsyncLLM
    from deepinfer.engine.roles.pair import PrefillDecodePair
    from deepinfer.llm import LLM
    from deepinfer.models import register_model

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "Logprob",
    "PrefillDecodePair",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputs",
    "__version__",
    "errors",
    "register_model",
]

_LATE = {
    "LLM": "deepinfer.llm",
    "AsyncLLM": "deepinfer.engine.async_engine",
    "PrefillDecodePair": "deepinfer.engine.roles.pair",
    "register_model": "deepinfer.models.registry",
}


def __getattr__(name: str) -> Any:
    if name not in _LATE:
        raise AttributeError(f"module 'deepinfer' has no attribute {name!r}")
    with nullcontext() if _LATE[name] in sys.modules else importing():
        return getattr(importlib.import_module(_LATE[name]), name)


def __dir__() -> list[str]:
    return __all__
