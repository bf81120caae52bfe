"""Which class runs which architecture.

Architectures match exactly as written in ``config.json``. Other packages add theirs with ``register_model`` or with an
entry point of group ``deepinfer.models`` (name = architecture, value = ``module:Class``). What was registered here, the built-in
ones included, comes before entry points: ``register_model`` replaces a built-in family, an entry point does not.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Any

from ..errors import ConfigError, UnsupportedModelError
from .base import LoadableModel
from .contract import check_class

ENTRY_POINT_GROUP = "deepinfer.models"

_registered: dict[str, str] = {
    "DeepseekV4ForCausalLM": "deepinfer.models.deepseek_v4.forward:DeepseekV4Model",
    "DeepseekV41ForCausalLM": "deepinfer.models.deepseek_v41.forward:DeepseekV41Model",
    "LlamaForCausalLM": "deepinfer.models.llama.forward:LlamaModel",
    "MistralForCausalLM": "deepinfer.models.llama.forward:LlamaModel",
    "Qwen2ForCausalLM": "deepinfer.models.llama.forward:LlamaModel",
    "Qwen3ForCausalLM": "deepinfer.models.llama.forward:LlamaModel",
}


def register_model(architecture: str, target: str) -> None:
    """Registers ``target`` (``"module:Class"``, see ``base.LoadableModel``) for ``architecture``; a later call wins.

    Raises ``ConfigError`` if ``target`` is not of that form or ``architecture`` is empty. The module is imported on first use.
    """
    if not isinstance(architecture, str) or not architecture:
        raise ConfigError(f"register_model needs the architecture's name as config.json has it, got {architecture!r}")
    if not isinstance(target, str) or not _is_target(target):
        raise ConfigError(f'register_model target must be "module:Class", got {target!r}')
    _registered[architecture] = target


def _is_target(target: str) -> bool:
    module, _, name = target.partition(":")
    return all(part.isidentifier() for part in module.split(".")) and name.isidentifier()


def known_architectures() -> list[str]:
    """Every architecture that can be looked up, built in or contributed."""
    return sorted({*_registered, *(point.name for point in entry_points(group=ENTRY_POINT_GROUP))})


def registrations() -> dict[str, str]:
    """Architecture → target of all that ``register_model`` knows here, to be repeated in another process."""
    return dict(_registered)


def _contributed(architecture: str) -> str | None:
    """Target of the entry point for ``architecture``, if there is one."""
    found = [point for point in entry_points(group=ENTRY_POINT_GROUP) if point.name == architecture]
    targets = {point.value for point in found}
    if len(targets) > 1:
        named = " and ".join(sorted(f"{point.value} (of {point.dist.name})" if point.dist else point.value for point in found))
        raise UnsupportedModelError(
            f"architecture {architecture!r} is contributed more than once: {named}; uninstall one, or choose with register_model"
        )
    if not targets:
        return None
    target = targets.pop()
    if not _is_target(target):
        raise UnsupportedModelError(
            f'architecture {architecture!r} has the entry point {target!r}; write "module:Class" in the package\'s pyproject.toml'
        )
    return target


def resolve_architecture(architecture: str) -> type[LoadableModel]:
    """Class for ``architecture``.

    Raises ``UnsupportedModelError`` naming the registry and the nearest match if there is none, or the target if it cannot be
    imported; ``ModelContractError`` if the class lacks what ``base.LoadableModel`` asks for.
    """
    target = _registered.get(architecture) or _contributed(architecture)
    if target is None:
        known = known_architectures()
        near = difflib.get_close_matches(architecture, known, n=1, cutoff=0.0)
        raise UnsupportedModelError(
            f"architecture {architecture!r} is not in deepinfer.models.registry; nearest match: {near[0] if near else 'none'}; "
            f"known: {', '.join(known)}; add one with register_model(architecture, 'module:Class') "
            "or by a package with an entry point (docs/adding-a-model.md)"
        )
    module, _, name = target.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except Exception as error:  # a module of somebody else's may raise anything while it is imported
        said = " ".join(str(error).split())
        raise UnsupportedModelError(
            f"architecture {architecture!r} is registered as {target!r}, which cannot be imported: {type(error).__name__}: {said}"
        ) from error
    return check_class(target, found)


def architecture_of(config: Mapping[str, Any]) -> str:
    """The architecture a config names; raises ``UnsupportedModelError`` if it names none."""
    names = config.get("architectures")
    if isinstance(names, list) and names and isinstance(names[0], str):
        return names[0]
    raise UnsupportedModelError('config.json has no "architectures" list; add it, for example ["LlamaForCausalLM"]')
