"""Fills a model from what ``resolve_model`` found."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch

from ...errors import ConfigError, UnsupportedFormatError
from ..base import BatchDependentModel, LoadableModel
from ..contract import check_model
from ..registry import resolve_architecture
from .dummy import DummySource
from .fp8 import Fp8Source
from .resolved import ResolvedModel
from .safetensors_source import SafetensorsSource
from .source import Progress, WeightSource, fill

LOAD_FORMATS = ("auto", "safetensors", "gguf", "dummy")
RUN_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@runtime_checkable
class LoadsItself(Protocol):
    """A family whose weights are not all numbers to be copied: packed forms, tables that stay in their files."""

    def from_checkpoint(
        self,
        source: ResolvedModel,
        dtype: torch.dtype,
        device: torch.device,
        load_format: str,
        seed: int,
        progress: Progress | None,
    ) -> LoadableModel:
        """A class method: what ``load_model`` does, ``finish_loading`` included."""


def check_load_format(source: ResolvedModel, load_format: str) -> str:
    """The form weights are to be read in: ``dummy``, or what ``source`` holds (``safetensors``, ``fp8``, ``gguf``).

    Raises ``ConfigError`` if they are asked for in another, ``UnsupportedFormatError`` if there are none.
    """
    if load_format not in LOAD_FORMATS:
        raise ConfigError(f"load_format={load_format!r} is not one of {', '.join(LOAD_FORMATS)}")
    if load_format == "dummy":
        return load_format
    found = source.weight_format
    if found == "none":
        raise UnsupportedFormatError(
            f"{source.name}: no weights that can be read (safetensors or GGUF); load_format='dummy' runs random ones"
        )
    if load_format != "auto" and load_format != ("gguf" if found == "gguf" else "safetensors"):
        raise ConfigError(f"load_format={load_format!r}, but {source.name} holds {found} weights; use load_format='auto'")
    return found


def _source(source: ResolvedModel, load_format: str, seed: int, model: LoadableModel) -> WeightSource:
    found = check_load_format(source, load_format)
    if found == "dummy":
        return DummySource(model.parameter_shapes(), seed)
    if found == "gguf":
        from .gguf_source import GgufSource

        return GgufSource(source.weight_files, source.config)
    stored = SafetensorsSource(source.weight_files)
    return Fp8Source(stored, source.config["quantization_config"]) if found == "fp8" else stored


def load_model(
    source: ResolvedModel,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    load_format: str = "auto",
    seed: int = 0,
    progress: Progress | None = None,
    batch_invariant: bool = True,
) -> LoadableModel:
    """Builds the model of ``source`` on ``device`` with run dtype ``dtype`` and fills it.

    ``load_format``: ``auto``, ``safetensors``, ``gguf`` or ``dummy`` (random weights from ``seed``, needs only the config).
    ``progress(done, total)`` counts bytes of parameters. Without ``batch_invariant`` a family may take its fastest way for every number of
    rows, if it has one (``base.BatchDependentModel``). Raises ``UnsupportedModelError``, ``UnsupportedConfigError``,
    ``UnsupportedFormatError``, ``CheckpointError`` or ``ConfigError``; ``ModelContractError`` for a family of another package
    that does not keep the contract of ``base``.
    """
    if load_format not in LOAD_FORMATS:
        raise ConfigError(f"load_format={load_format!r} is not one of {', '.join(LOAD_FORMATS)}")
    if dtype not in RUN_DTYPES:
        raise ConfigError(f"dtype {dtype} is not one of float32, bfloat16, float16")
    family = resolve_architecture(source.architecture)
    if isinstance(family, LoadsItself):
        model = family.from_checkpoint(source, dtype, torch.device(device), load_format, seed, progress)
        check_model(model)
        return model
    model = family.from_config(source.config, dtype, torch.device(device))
    check_model(model)
    if not batch_invariant and isinstance(model, BatchDependentModel):
        model.allow_batch_dependence()
    fill(model, _source(source, load_format, seed, model), progress)
    return model
