"""Imports point downwards only (docs/architecture.md), in Python and between the crates."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# Height of each part of the package; a module imports its own part and lower ones. Height 0 are the leaves.
HEIGHT = {
    "__main__": 10,
    "cli": 9,
    "server": 8,
    "": 7,  # deepinfer/__init__.py: what a user imports
    "llm": 6,
    "engine": 5,
    "structured": 4,
    "speculative": 4,
    "kvcache": 4,
    "worker": 3,
    "models": 2,
    "kernels": 1,
    "platforms": 0,
    "distributed": 0,
    "errors": 0,
    "sampling": 0,
    "structured_outputs": 0,
    "outputs": 0,
    "_core": 0,
    "collector": 0,
    "core_check": 0,
    "scratch": 0,
}

# What a crate may depend on inside the workspace, and which one may know Python.
CRATES = {
    "kvindex": set(),
    "scheduler": {"deepinfer-kvindex"},
    "kvtransfer": set(),
    "kvstore": set(),
    "bindings": {"deepinfer-kvindex", "deepinfer-scheduler", "deepinfer-kvtransfer", "deepinfer-kvstore"},
}


# What may lie beside the folders of the repository: a file left there by a run is in nobody's way until it is published.
AT_THE_ROOT = {
    ".gitignore", "CHANGELOG.md", "CONTRIBUTING.md", "Cargo.lock", "Cargo.toml", "LICENSE", "Makefile", "README.md", "pyproject.toml",
    "rustfmt.toml",
}  # fmt: skip


def package_folder() -> Path:
    """Where the package under test lies, installed or in place."""
    spec = importlib.util.find_spec("deepinfer")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent


def part_of(module: str) -> str:
    """``deepinfer.worker.runner`` → ``worker``."""
    return [*module.split("."), ""][1]


def imported_modules(source: str, module: str, is_package: bool) -> Iterator[tuple[int, str]]:
    """(line, full name) of each import of this package, at any depth of the code; relative ones resolved."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = module.split(".")
                kept = parents[: len(parents) - node.level + (1 if is_package else 0)]
                base = ".".join([*kept, base]) if base else ".".join(kept)
            names = [f"{base}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from ((node.lineno, name) for name in names if name.split(".")[0] == "deepinfer")


def upward_imports(folder: Path) -> list[str]:
    """One line for each import in ``folder`` (a package named deepinfer) that points upwards or out of the table."""
    found = []
    for path in sorted(folder.rglob("*.py")) + sorted((folder / "kernels").rglob("*.py")):
        inner = path.relative_to(folder).with_suffix("").parts
        is_package = inner[-1] == "__init__"
        module = ".".join(("deepinfer", *(inner[:-1] if is_package else inner)))
        part = part_of(module)
        if part not in HEIGHT:
            found.append(f"{module}: the part {part!r} has no height; add it to the table here and to docs/architecture.md")
            continue
        for line, name in imported_modules(path.read_text(encoding="utf-8"), module, is_package):
            target = part_of(name)
            if target not in HEIGHT and name.count(".") == 1:
                target = ""  # a name that deepinfer/__init__.py gives
            if target not in HEIGHT:
                found.append(f"{module}:{line} imports {name}, which is no known part")
            elif HEIGHT[part] == 0 and HEIGHT[target] > 0:
                found.append(f"{module}:{line} imports {name}: a leaf may use leaves only")
            elif target != part and HEIGHT[target] >= HEIGHT[part] > 0:
                found.append(f"{module}:{line} imports {name}: {part} may not know {target or 'the public module'}")
    return sorted(set(found))


def test_package_imports_point_downwards() -> None:
    assert upward_imports(package_folder()) == []


@pytest.mark.parametrize(
    ("file", "code", "said"),
    [
        ("worker/runner.py", "from deepinfer.engine import engine", "worker may not know engine"),
        ("worker/runner.py", "def f():\n    import deepinfer.llm", "worker may not know llm"),
        ("models/llama/forward.py", "from ...worker import kv_cache", "models may not know worker"),
        ("kvcache/store.py", "from ..structured import x", "kvcache may not know structured"),
        ("engine/engine.py", "from deepinfer import LLM", "engine may not know the public module"),
        ("cli/app.py", "import deepinfer.gadgets.thing", "no known part"),
        ("errors.py", "from deepinfer.engine.request import Request", "a leaf may use leaves only"),
        ("gadgets/__init__.py", "", "has no height"),
    ],
)
def test_upward_import_is_found(tmp_path: Path, file: str, code: str, said: str) -> None:
    path = tmp_path / "deepinfer" / file
    path.parent.mkdir(parents=True)
    path.write_text(code, encoding="utf-8")
    assert any(said in line for line in upward_imports(tmp_path / "deepinfer"))


def test_downward_imports_are_allowed(tmp_path: Path) -> None:
    path = tmp_path / "deepinfer" / "engine" / "engine.py"
    path.parent.mkdir(parents=True)
    path.write_text(
        "from deepinfer import _core, errors\nfrom ..worker import runner\nfrom . import config\nimport torch\n", encoding="utf-8"
    )
    assert upward_imports(tmp_path / "deepinfer") == []


def test_no_file_was_left_at_the_root() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a checkout, or git is not there")
    assert {name for name in listed.stdout.splitlines() if "/" not in name} == AT_THE_ROOT


def manifest(crate: str) -> dict[str, object]:
    """All dependencies of a crate, of every kind."""
    data = tomllib.loads((ROOT / "crates" / crate / "Cargo.toml").read_text(encoding="utf-8"))
    return data.get("dependencies", {}) | data.get("build-dependencies", {}) | data.get("dev-dependencies", {})


def test_every_crate_is_in_the_table() -> None:
    assert {path.parent.name for path in (ROOT / "crates").glob("*/Cargo.toml")} == set(CRATES)


@pytest.mark.parametrize("crate", sorted(CRATES))
def test_crates_depend_downwards(crate: str) -> None:
    own = {name for name in manifest(crate) if name.startswith("deepinfer-")} - {f"deepinfer-{crate}"}
    assert own <= CRATES[crate]


@pytest.mark.parametrize("crate", sorted(set(CRATES) - {"bindings"}))
def test_crates_below_the_bindings_do_not_know_python(crate: str) -> None:
    assert not [name for name in manifest(crate) if "pyo3" in name or "python" in name]
    named = [str(p) for p in (ROOT / "crates" / crate).rglob("*.rs") if "pyo3" in p.read_text(encoding="utf-8").lower()]
    assert named == []
