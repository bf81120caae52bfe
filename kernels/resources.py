"""What kernels take of a GPU, kept in ``resources.json`` beside this file: a change that makes one larger shows before it runs anywhere."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deepinfer.errors import ConfigError

from .toolchain.store import StoredKernel

TABLE = Path(__file__).with_name("resources.json")
MORE_REGISTERS = 8
"""Registers a thread may have more of than is recorded: the hardware gives them out by eights."""


@dataclass
class Comparison:
    """Lines for people: ``changes`` are shown, ``failures`` are not let through."""

    changes: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


def taken(kernel: StoredKernel) -> dict[str, int]:
    """What is recorded of a kernel: registers of a thread, bytes of shared memory and threads of a block."""
    return {"registers": kernel.resources.registers, "shared": kernel.shared_bytes, "threads": kernel.threads}


def recorded(arch: str, table: Path = TABLE) -> dict[str, Any]:
    """``{"compiler": …, "kernels": {name: what it takes}}`` of an architecture; empty if there is none.

    Raises:
        ConfigError: the file is damaged.
    """
    try:
        every = json.loads(table.read_text(encoding="utf-8"))
        found = every.get(arch, {"compiler": None, "kernels": {}})
        assert isinstance(found["kernels"], dict)
    except FileNotFoundError:
        return {"compiler": None, "kernels": {}}
    except (ValueError, KeyError, AttributeError, TypeError, AssertionError):
        raise ConfigError(f"{table} is damaged; write it anew with `deepinfer kernels check --record`") from None
    return dict(found)


def compare(kernels: Sequence[StoredKernel], arch: str, table: Path = TABLE) -> Comparison:
    """``kernels`` against what is recorded. More registers than ``MORE_REGISTERS`` above it is a failure if the same version of the
    compiler made them, everything else that differs a change."""
    before = recorded(arch, table)
    found = Comparison()
    for kernel in kernels:
        now, then = taken(kernel), before["kernels"].get(kernel.name)
        if then is None:
            found.changes.append(f"{kernel.name} is new")
        elif now != then:
            line = f"{kernel.name}: " + ", ".join(f"{key} {then.get(key)} → {now[key]}" for key in now if now[key] != then.get(key))
            grown = now["registers"] - int(then.get("registers", 0)) > MORE_REGISTERS
            if grown and kernel.compiler == before["compiler"]:
                found.failures.append(line)
            else:
                found.changes.append(line if kernel.compiler == before["compiler"] else f"{line} (recorded with {before['compiler']})")
    return found


def record(kernels: Sequence[StoredKernel], arch: str, names: Collection[str], table: Path = TABLE) -> None:
    """Writes what ``kernels`` take; others that are recorded stay if they are among ``names``, those of all kernels there are.

    Raises ``OSError`` if the file cannot be written.
    """
    kept = {name: value for name, value in recorded(arch, table)["kernels"].items() if name in names}
    kept |= {kernel.name: taken(kernel) for kernel in kernels}
    every = json.loads(table.read_text(encoding="utf-8")) if table.exists() else {}
    compiler = kernels[0].compiler if kernels else None
    lines = [f"    {json.dumps(name)}: {json.dumps(kept[name])}" for name in sorted(kept)]
    every[arch] = None
    blocks = []
    for each, value in sorted(every.items()):
        if each == arch:
            blocks.append(f'"{arch}": {{"compiler": {json.dumps(compiler)}, "kernels": {{\n' + ",\n".join(lines) + "\n  }}")
        else:
            blocks.append(f"{json.dumps(each)}: {json.dumps(value)}")
    table.write_text("{" + ",\n".join(blocks) + "}\n", encoding="utf-8")
