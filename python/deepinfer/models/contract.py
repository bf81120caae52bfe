"""Whether a registered class keeps the contract of ``base``, told in one line that says what to change.

Owns: the checks of a class when it is looked up, of an object when it is made, of its KV groups, and of what a step gives. Never
touches: what a family computes. The methods asked for are read from the protocol itself, so that ``base`` alone states them.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch

from ..errors import ModelContractError
from .base import Fillable, LoadableModel, Model, PagedGroup, StatefulModel, StateGroup

_STATED = "deepinfer.models.base.LoadableModel"


def _asked() -> dict[str, Any]:
    """Name → function or classmethod of everything the protocols ask for."""
    members = {**vars(Model), **vars(LoadableModel), **vars(Fillable)}
    return {n: m for n, m in members.items() if not n.startswith("_") and (inspect.isfunction(m) or isinstance(m, classmethod))}


def check_class(target: str, found: Any) -> type[LoadableModel]:
    """``found``, which ``target`` (``"module:Class"``) names, if it can be called as the contract says.

    Raises ``ModelContractError`` naming the methods that are missing, or the first one that takes other arguments.
    """
    if not inspect.isclass(found):
        raise ModelContractError(f"{target} is {_kind(found)}, not a class; name the family's forward class after the colon")
    asked = _asked()
    missing = [name for name in asked if not callable(getattr(found, name, None))]
    if missing:
        raise ModelContractError(f"{target} has no {', '.join(missing)}; add what {_STATED} asks for")
    for name, member in asked.items():
        own = getattr(found, name)
        on_class = isinstance(member, classmethod)
        if on_class and not inspect.ismethod(own) and not isinstance(inspect.getattr_static(found, name), staticmethod):
            raise ModelContractError(f"{target}.{name} is called on the class; make it a classmethod")
        names = list(inspect.signature(member.__func__ if on_class else member).parameters)[1:]
        try:
            signature = inspect.signature(own)
        except ValueError:  # written in C: there is nothing to compare with
            continue
        try:
            signature.bind(*([] if on_class else [found]), *names)
        except TypeError as error:
            raise ModelContractError(
                f"{target}.{name}({', '.join(signature.parameters)}) cannot be called as {name}({', '.join(names)}), "
                f"which {_STATED} asks for: {error}"
            ) from error
    return cast(type[LoadableModel], found)


def check_model(model: LoadableModel) -> None:
    """The attributes of a model that was just made. Raises ``ModelContractError`` naming the attribute."""
    for name in ("vocab_size", "max_position"):
        value = getattr(model, name, None)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ModelContractError(f"{_of(model)}.{name} must be a positive integer once from_config has returned, found {value!r}")


def check_shapes(model: Fillable) -> dict[str, tuple[int, ...]]:
    """``parameter_shapes`` of a model, each compared with its place before anything is read.

    Raises ``ModelContractError`` naming the parameter whose place has another shape, is none, or is a new tensor at every call.
    """
    shapes = model.parameter_shapes()
    if not isinstance(shapes, Mapping):
        raise ModelContractError(f"{_of(model)}.parameter_shapes() must give a mapping of name to shape, found {_kind(shapes)}")
    for name, shape in shapes.items():
        try:
            place, again = model.parameter(name), model.parameter(name)
        except (KeyError, AttributeError) as error:
            raise ModelContractError(
                f"{_of(model)}.parameter({name!r}) raised {error!r}, but parameter_shapes() lists that name"
            ) from error
        if not isinstance(place, torch.Tensor):
            raise ModelContractError(f"{_of(model)}.parameter({name!r}) must give a tensor, found {_kind(place)}")
        if tuple(place.shape) != tuple(shape):
            raise ModelContractError(
                f"{_of(model)}.parameter({name!r}) has shape {list(place.shape)}, parameter_shapes() says {list(shape)}; make them agree"
            )
        if place.untyped_storage() is not again.untyped_storage():
            raise ModelContractError(
                f"{_of(model)}.parameter({name!r}) gives a new tensor at every call, so that what is loaded would be lost; "
                "give a view of the weight's final place"
            )
    return {name: tuple(shape) for name, shape in shapes.items()}


def checked_groups(model: Model, block_tokens: int) -> tuple[list[PagedGroup], list[StateGroup]]:
    """``kv_groups`` of a model, if KV can be laid out as it says. Raises ``ModelContractError`` naming the group or tensor."""
    groups = model.kv_groups(block_tokens)
    where = f"{_of(model)}.kv_groups({block_tokens})"
    if not isinstance(groups, tuple) or len(groups) != 2:
        raise ModelContractError(f"{where} must give a pair (paged groups, state groups), found {_kind(groups)}")
    paged, state = list(groups[0]), list(groups[1])
    for found, wanted in ((paged, PagedGroup), (state, StateGroup)):
        for group in found:
            if not isinstance(group, wanted):
                raise ModelContractError(f"{where} lists {_kind(group)} where a {wanted.__name__} belongs")
    if not paged:
        raise ModelContractError(f"{where} declares no paged group; one is needed, its pages are the blocks that prefixes are found by")
    _check_paged(where, paged)
    if state and not isinstance(model, StatefulModel):
        raise ModelContractError(f"{where} declares a state group, so {_of(model)} needs end_step: see deepinfer.models.base.StatefulModel")
    _check_state(where, state)
    return paged, state


def _check_state(where: str, state: Sequence[StateGroup]) -> None:
    hits = {group.hits for group in state}
    if len(hits) > 1:
        raise ModelContractError(
            f"{where}: state groups disagree in hits, {', '.join(map(str, hits))}; a sequence begins in all of them at once"
        )
    for number, group in enumerate(state):
        size = group.stored * (1 + group.replicas) + group.dropped
        if group.replica_at and (group.replica_at * 2 > size or not group.replicas):
            raise ModelContractError(
                f"{where}: state group {number} has {size} bytes in a row and {group.replicas} replicas, so no copy of its first "
                f"{group.replica_at} bytes fits behind them; set replicas and replica_at, or leave replica_at at 0"
            )


def _check_paged(where: str, paged: Sequence[PagedGroup]) -> None:
    seen: set[str] = set()
    for number, group in enumerate(paged):
        tokens = group.page_tokens
        if tokens < 1 or paged[0].page_tokens % tokens:
            raise ModelContractError(
                f"{where}: page_tokens {tokens} of group {number} must divide those of group 0, {paged[0].page_tokens}"
            )
        if not group.sources:
            raise ModelContractError(f"{where}: group {number} has no sources; leave it out or give it one")
        for source in group.sources:
            if source.entries_per_page < 1 or tokens % source.entries_per_page:
                raise ModelContractError(
                    f"{where}: entries_per_page {source.entries_per_page} of {source.tensors} must divide page_tokens {tokens}"
                )
            if not source.tensors or not source.shape or min(source.shape) < 1:
                raise ModelContractError(f"{where}: a source of group {number} needs tensor names and a shape of positive sizes: {source}")
            for name in source.tensors:
                if name in seen:
                    raise ModelContractError(f"{where} declares tensor {name!r} twice; give every tensor a name of its own")
                seen.add(name)


def check_hidden(model: Model, hidden: Any, rows: int) -> None:
    """What ``forward`` gave for ``rows`` rows: shapes only, nothing is read. Raises ``ModelContractError``."""
    if not isinstance(hidden, torch.Tensor) or hidden.ndim != 2 or hidden.shape[0] != rows:
        raise ModelContractError(f"{_of(model)}.forward must give [{rows}, hidden], one row for each of the batch, found {_kind(hidden)}")


def check_logits(model: Model, logits: Any, rows: int, dtype: torch.dtype = torch.float32) -> None:
    """What ``logits`` gave for ``rows`` rows, or ``run_logits`` with another ``dtype``: shape and dtype only, nothing is read. Raises
    ``ModelContractError``."""
    good = isinstance(logits, torch.Tensor) and logits.dtype == dtype and tuple(logits.shape) == (rows, model.vocab_size)
    if not good:
        wanted = f"{'logits' if dtype == torch.float32 else 'run_logits'} must give {str(dtype).removeprefix('torch.')}"
        raise ModelContractError(f"{_of(model)}.{wanted} [{rows}, {model.vocab_size}], found {_kind(logits)}")


def _of(model: object) -> str:
    return f"{type(model).__module__}:{type(model).__qualname__}"


def _kind(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return f"a {type(value).__name__}"
