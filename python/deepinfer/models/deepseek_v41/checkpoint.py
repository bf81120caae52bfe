"""Compares what a checkpoint lists with what a plan needs, from headers alone: before anything is read or allocated."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from ...errors import CheckpointError
from .parameters import Form, ParameterSpec

Stored = tuple[str, tuple[int, ...]]
"""Type in safetensors' spelling, and shape."""

_LISTED = 10
_WORDS = {Form.FP8: "FP8 elements", Form.FP4_PAIRS: "FP4 pairs", Form.SCALE: "ue8m0 scales", Form.PLAIN: "plain", Form.FLOAT32: "float32"}


class _Named:
    """The first ten of any number of things."""

    def __init__(self) -> None:
        self.count = 0
        self._lines: list[str] = []

    def add(self, line: Callable[..., str], *of: object) -> None:
        self.count += 1
        if self.count <= _LISTED:
            self._lines.append(line(*of))

    def told(self, one: str, many: str) -> str:
        more = f"; and {self.count - _LISTED} more" if self.count > _LISTED else ""
        return f"{self.count} {one if self.count == 1 else many}: {'; '.join(self._lines)}{more}"


def _wanted(spec: ParameterSpec) -> str:
    return f"{_WORDS[spec.form]}, {' or '.join(spec.form.value)} {list(spec.shape)}"


def _missing(spec: ParameterSpec) -> str:
    return f"{spec.name} ({spec.part.value}: {_wanted(spec)})"


def _wrong(spec: ParameterSpec, stored: Stored) -> str:
    return f"{spec.name} is {stored[0]} {list(stored[1])}, not {_wanted(spec)}"


def _stray(name: str, stored: Stored, explain: Callable[[str], str | None]) -> str:
    reason = explain(name)
    return f"{name} ({stored[0]} {list(stored[1])}{'' if reason is None else f': {reason}'})"


def _nothing_known(name: str) -> str | None:
    return None


def check_tensors(
    specs: Iterable[ParameterSpec],
    found: Mapping[str, Stored],
    where: str,
    explain: Callable[[str], str | None] = _nothing_known,
) -> None:
    """``found``: name → (safetensors type, shape) of every tensor in the checkpoint at ``where``.

    ``explain`` says why a name has no place in the plan, or None.

    Raises ``CheckpointError`` with the first ten names of each kind that are missing, not part of the plan, or of another
    shape or type. A type that carries the same bits otherwise (FP4 pairs as FP8) is another type.
    """
    missing, wrong, extra = _Named(), _Named(), _Named()
    known: set[str] = set()
    for spec in specs:
        stored = found.get(spec.name)
        if stored is None:
            missing.add(_missing, spec)
            continue
        known.add(spec.name)
        if stored[0] not in spec.form.value or tuple(stored[1]) != spec.shape:
            wrong.add(_wrong, spec, stored)
    for name in sorted(found.keys() - known):
        extra.add(_stray, name, found[name], explain)
    problems = [
        named.told(one, many)
        for named, one, many in (
            (missing, "tensor is missing", "tensors are missing"),
            (extra, "tensor has no place in it", "tensors have no place in it"),
            (wrong, "tensor is stored otherwise", "tensors are stored otherwise"),
        )
        if named.count
    ]
    if problems:
        raise CheckpointError(f"{where} does not fit its config.json. {'. '.join(problems)}")
