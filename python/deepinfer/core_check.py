"""Whether the compiled core is the one that this Python belongs to.

Owns: the comparison of `deepinfer._core` with its stub. Never touches: anything else.

After an update of the sources that leaves the extension as it was, the two differ in names; found here, it is one line at import
instead of an AttributeError in the middle of a step.
"""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from deepinfer.errors import CoreMismatchError

_REBUILD = "rebuild it with `make run` (or install the package again)"
_STUB = Path(__file__).with_name("_core.pyi")


def check_core(core: ModuleType | None = None, stub: Path = _STUB) -> None:
    """Compares the extension with its stub; without a stub beside it nothing is checked.

    Raises:
        CoreMismatchError: it is not built, or lacks a name or an argument that the stub has.
    """
    if core is None:
        try:
            core = importlib.import_module("deepinfer._core")
        except ImportError as e:
            raise CoreMismatchError(f"the compiled core cannot be imported ({e}); {_REBUILD}") from e
    try:
        text = stub.read_text(encoding="utf-8")
    except OSError:
        return
    lacks = next(_lacks(core, ast.parse(text).body), None)
    if lacks is not None:
        raise CoreMismatchError(
            f"the compiled core {core.__name__} is of another version than the Python beside it, it lacks {lacks}; {_REBUILD}"
        )


def _lacks(core: ModuleType, body: list[ast.stmt]) -> Iterator[str]:
    for node in body:
        if isinstance(node, ast.FunctionDef):
            yield from _function(core, node, node.name)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            if not hasattr(core, node.target.id):
                yield node.target.id
        elif isinstance(node, ast.ClassDef) and not node.bases:  # the others describe plain dictionaries
            kind = getattr(core, node.name, None)
            if kind is None:
                yield node.name
                continue
            for member in node.body:
                if isinstance(member, ast.FunctionDef):
                    yield from _function(kind, member, f"{node.name}.{member.name}")


def _function(owner: object, node: ast.FunctionDef, name: str) -> Iterator[str]:
    made = owner if node.name in ("__new__", "__init__") else getattr(owner, node.name, None)
    if made is None:
        yield name
        return
    signature = getattr(made, "__text_signature__", None)
    known = set(re.findall(r"\w+", signature)) if signature else None
    for argument in [*node.args.args[1:], *node.args.kwonlyargs]:
        if known is not None and argument.arg not in known:
            yield f"the argument {argument.arg!r} of {name}"
