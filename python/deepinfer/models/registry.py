"""Which class runs which architecture.

Architectures match exactly as written in ``config.json``. Other packages add theirs with ``register_model`` or with an
entry point of group ``deepinfer.models`` (name = architecture, value = ``module:Class``).
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Any, Protocol, Self, runtime_checkable

import torch

from ..errors import UnsupportedModelError
from .base import Model

ENTRY_POINT_GROUP = "deepinfer.models"

_registered: dict[str, str] = {
    "LlamaForCausalLM": "deepinfer.models.llama.forward:LlamaModel",
    "MistralForCausalLM": "deepinfer.models.llama.forward:LlamaModel",
    "Qwen2ForCausalLM": "deepinfer.models.llama.forward:LlamaModel",
    "Qwen3ForCausalLM": "deepinfer.models.llama.forward:LlamaModel",
}


@runtime_checkable
class LoadableModel(Model, Protocol):
    """A model class the loaders can fill."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> Self:
        """Validates ``config`` (the fields of config.json) and allocates parameters; raises ``UnsupportedConfigError``."""

    @classmethod
    def position_limit(cls, config: Mapping[str, Any]) -> int:
        """Longest sequence the model was made for, in tokens, without allocating anything."""

    def parameter_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Checkpoint name → shape of every tensor that must be loaded."""

    def optional_tensors(self) -> tuple[str, ...]:
        """Patterns (``fnmatch``) of checkpoint tensors that may be present and carry nothing this model needs."""

    def parameter(self, name: str) -> torch.Tensor:
        """Where the tensor of that checkpoint name is written (a view of its final place)."""

    def finish_loading(self) -> None:
        """Called once when all parameters are written: packs weights, frees what is no longer needed."""


def register_model(architecture: str, target: str) -> None:
    """Registers ``target`` (``"module:Class"``, see ``LoadableModel``) for ``architecture``; a later call wins.

    Raises ``ValueError`` if ``target`` is not of that form. The module is imported on first use.
    """
    module, _, name = target.partition(":")
    if not module or not name:
        raise ValueError(f'register_model target must be "module:Class", got {target!r}')
    _registered[architecture] = target


def known_architectures() -> list[str]:
    """Every architecture that can be looked up, built in or contributed."""
    return sorted({*_registered, *(point.name for point in entry_points(group=ENTRY_POINT_GROUP))})


def registrations() -> dict[str, str]:
    """Architecture → target of all that ``register_model`` knows here, to be repeated in another process."""
    return dict(_registered)


def resolve_architecture(architecture: str) -> type[LoadableModel]:
    """Class for ``architecture``; ``UnsupportedModelError`` names the registry and the nearest match if there is none."""
    target = _registered.get(architecture)
    if target is None:
        for point in entry_points(group=ENTRY_POINT_GROUP):
            if point.name == architecture:
                target = point.value
                break
    if target is None:
        known = known_architectures()
        near = difflib.get_close_matches(architecture, known, n=1, cutoff=0.0)
        raise UnsupportedModelError(
            f"architecture {architecture!r} is not in deepinfer.models.registry; nearest match: {near[0] if near else 'none'}; "
            f"known: {', '.join(known)}; add one with register_model(architecture, 'module:Class')"
        )
    module, _, name = target.partition(":")
    try:
        found: type[LoadableModel] = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise UnsupportedModelError(
            f"architecture {architecture!r} is registered as {target!r}, which cannot be imported: {error}"
        ) from error
    return found


def architecture_of(config: Mapping[str, Any]) -> str:
    """The architecture a config names; raises ``UnsupportedModelError`` if it names none."""
    names = config.get("architectures")
    if isinstance(names, list) and names and isinstance(names[0], str):
        return names[0]
    raise UnsupportedModelError('config.json has no "architectures" list; add it, for example ["LlamaForCausalLM"]')
