"""What names a kernel: its operator, its factory, the constants it is made for, and the text it is made from."""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .dialect import Dialect

SM90A = "sm_90a"
"""The architecture kernels are compiled for."""

TILELANG = "0.1.15"
"""The only version that kernels are lowered with: another one may give other bits."""

_FORMAT = 3  # of what is stored beside the machine code
_KERNELS = Path(__file__).parent.parent
_TOOLS = ("toolchain/dialect.py", "toolchain/lowering.py", "toolchain/nvrtc.py")

Constant = int | float | str | bool


def shape_config(**constants: Constant) -> tuple[tuple[str, Constant], ...]:
    """Constants of a program in an order of their own."""
    return tuple(sorted(constants.items()))


@dataclass(frozen=True)
class Program:
    """One kernel for one set of constants.

    Attributes:
        op: folder of the operator under ``kernels/``.
        factory: function of ``kernels/<op>/<form>.py`` that gives the TileLang function, called with a ``Dialect`` and the constants.
        constants: see ``shape_config``.
        uses: further files under ``kernels/`` whose text goes into the kernel.
        passes: TileLang pass settings.
        form: the kernel's file, ``cuda`` or ``asc``.
    """

    op: str
    factory: str
    constants: tuple[tuple[str, Constant], ...] = ()
    uses: tuple[str, ...] = ()
    passes: tuple[tuple[str, Constant], ...] = field(default=())
    form: str = "cuda"

    @property
    def name(self) -> str:
        """``op/factory[constant=value,…]``: for people."""
        values = ",".join(f"{key}={value}" for key, value in self.constants)
        return f"{self.op}/{self.factory}[{values}]"

    def build(self, dialect: Dialect) -> Any:
        """The TileLang function. Imports TileLang."""
        module = importlib.import_module(f"deepinfer.kernels.{self.op}.{self.form}")
        return getattr(module, self.factory)(dialect, **dict(self.constants))

    def digest(self, arch: str) -> str:
        """Hex name under which its machine code is stored: everything that the code follows from."""
        h = hashlib.sha256(f"{_FORMAT} {TILELANG} {arch} {self.name} {sorted(self.passes)}".encode())
        for path in sorted({f"{self.op}/{self.form}.py", *_TOOLS, *self.uses}):
            h.update(path.encode() + b"\0" + (_KERNELS / path).read_bytes() + b"\0")
        return h.hexdigest()[:40]


def constants_of(program: Program) -> Mapping[str, Constant]:
    """The constants by name."""
    return dict(program.constants)
