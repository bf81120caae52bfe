"""Compares what a checkpoint lists with what a plan needs, from headers alone: before anything is read or allocated."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from ...errors import CheckpointError
from .parameters import Form, ParameterSpec

_LISTED = 10
_WORDS = {Form.FP8: "FP8 elements", Form.FP4_PAIRS: "FP4 pairs", Form.SCALE: "ue8m0 scales", Form.PLAIN: "plain", Form.FLOAT32: "float32"}


def _list(lines: list[str], one: str, many: str) -> str:
    more = f"; and {len(lines) - _LISTED} more" if len(lines) > _LISTED else ""
    return f"{len(lines)} {one if len(lines) == 1 else many}: {'; '.join(lines[:_LISTED])}{more}"


def _wanted(spec: ParameterSpec) -> str:
    return f"{_WORDS[spec.form]}, {' or '.join(spec.form.value)} {list(spec.shape)}"


def _nothing_known(name: str) -> str | None:
    return None


def check_tensors(
    specs: Iterable[ParameterSpec],
    found: Mapping[str, tuple[str, tuple[int, ...]]],
    where: str,
    explain: Callable[[str], str | None] = _nothing_known,
) -> None:
    """``found``: name → (safetensors type, shape) of every tensor in the checkpoint at ``where``.

    ``explain`` says why a name has no place in the plan, or None.

    Raises ``CheckpointError`` with the first ten names of each kind that are missing, not part of the plan, or of another
    shape or type. A type that carries the same bits otherwise (FP4 pairs as FP8) is another type.
    """
    missing: list[str] = []
    wrong: list[str] = []
    known: set[str] = set()
    for spec in specs:
        known.add(spec.name)
        stored = found.get(spec.name)
        if stored is None:
            missing.append(f"{spec.name} ({spec.part.value}: {_wanted(spec)})")
        elif stored[0] not in spec.form.value or tuple(stored[1]) != spec.shape:
            wrong.append(f"{spec.name} is {stored[0]} {list(stored[1])}, not {_wanted(spec)}")
    extra: list[str] = []
    for name in sorted(found.keys() - known):
        reason = explain(name) if len(extra) < _LISTED else None
        extra.append(f"{name} ({found[name][0]} {list(found[name][1])}{'' if reason is None else f': {reason}'})")
    problems = [
        _list(lines, one, many)
        for lines, one, many in (
            (missing, "tensor is missing", "tensors are missing"),
            (extra, "tensor has no place in it", "tensors have no place in it"),
            (wrong, "tensor is stored otherwise", "tensors are stored otherwise"),
        )
        if lines
    ]
    if problems:
        raise CheckpointError(f"{where} does not fit its config.json. {'. '.join(problems)}")
