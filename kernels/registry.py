"""Every kernel there is: operators that have a form for GPUs, and what each needs for a model's shape.

An operator is listed by having ``kernels/<op>/cuda.py`` (or ``asc.py``, its form for Ascend), which says in ``programs_for(shape)`` what
kernels a model of that shape wants of it. Neither listing them nor looking for them in the store loads TileLang.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from deepinfer.errors import KernelBuildError

from .toolchain.program import Program
from .toolchain.shapes import NAMED, ModelShape

_KERNELS = Path(__file__).parent


@dataclass(frozen=True)
class Entry:
    """One kernel for one family of shapes."""

    shape: str
    program: Program

    @property
    def dtype(self) -> str:
        """The type the kernel is made for, or ``-`` if it knows one only."""
        return str(dict(self.program.constants).get("dtype", "-"))


def operators(form: str = "cuda") -> tuple[str, ...]:
    """Operators with a file ``form``.py, by name."""
    return tuple(sorted(path.parent.name for path in _KERNELS.glob(f"*/{form}.py")))


def programs(shape: ModelShape, op: str, form: str = "cuda") -> tuple[Program, ...]:
    """Kernels of ``op`` that a model of ``shape`` wants. Raises ``KernelBuildError`` if there are none for its sizes."""
    return tuple(importlib.import_module(f"deepinfer.kernels.{op}.{form}").programs_for(shape))


def wanted(shape: ModelShape, form: str = "cuda") -> tuple[Program, ...]:
    """Kernels of every operator that a model of ``shape`` wants, each once; an operator that refuses its sizes is left out."""
    found: dict[Program, None] = {}
    for op in operators(form):
        with contextlib.suppress(KernelBuildError):
            found |= dict.fromkeys(programs(shape, op, form))
    return tuple(found)


def refusals(shape: ModelShape) -> dict[str, str]:
    """Operators that have no kernel for sizes of ``shape``, and why: a model of it runs them on their reference."""
    found = {}
    for op in operators():
        try:
            programs(shape, op)
        except KernelBuildError as e:
            found[op] = str(e)
    return found


def entries(shapes: dict[str, ModelShape] | None = None, form: str = "cuda") -> Iterator[Entry]:
    """Every kernel of every named shape; one that several shapes share comes with the first of them."""
    seen: set[Program] = set()
    for name, shape in (NAMED if shapes is None else shapes).items():
        for program in wanted(shape, form):
            if program not in seen:
                seen.add(program)
                yield Entry(name, program)
