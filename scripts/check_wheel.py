"""Checks a wheel: what it holds against the source tree, and by auditwheel that manylinux_2_28 is enough to run it.

Usage: python scripts/check_wheel.py WHEEL
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
GLIBC = (2, 28)


def expected_files() -> set[str]:
    """Package files of the tree, links followed (``kernels/`` is reached through one)."""
    found = set()
    base = ROOT / "python"
    for folder, folders, names in os.walk(base / "deepinfer", followlinks=True):
        folders[:] = [f for f in folders if f != "__pycache__"]
        for name in names:
            if name.endswith((".py", ".pyi", ".html", ".css", ".js", ".svg", ".json")) or name == "py.typed":
                found.add((Path(folder) / name).relative_to(base).as_posix())
    return found


def content_problems(inside: set[str]) -> list[str]:
    """What is missing from, or too much in, the names of a wheel."""
    package = {name for name in inside if name.startswith("deepinfer/")}
    core = {name for name in package if name.startswith("deepinfer/_core.") and name.endswith(".so")}
    problems = [f"missing: {name}" for name in sorted(expected_files() - package)]
    problems += [f"not expected: {name}" for name in sorted(package - expected_files() - core)]
    problems += [f"outside the package: {name}" for name in sorted(inside - package) if ".dist-info/" not in name]
    if core != {"deepinfer/_core.abi3.so"}:
        problems.append(f"extension: expected deepinfer/_core.abi3.so, found {sorted(core)}")
    if not any(name.endswith("/licenses/LICENSE") for name in inside):
        problems.append("missing: the licence text")
    return problems


def platform_problems(wheel: str) -> list[str]:
    """What keeps the wheel from running on manylinux_2_28."""
    shown = subprocess.run(["auditwheel", "show", wheel], capture_output=True, text=True, check=True).stdout
    found = re.search(r'consistent\s+with\s+the\s+following\s+platform\s+tag:\s+"manylinux_(\d+)_(\d+)_', shown)
    if found is None or (int(found[1]), int(found[2])) > GLIBC:
        return [f"auditwheel: needs more than manylinux_{GLIBC[0]}_{GLIBC[1]}\n{shown}"]
    return []


def main(wheel: str) -> int:
    """Prints each problem; 1 if there is any."""
    with zipfile.ZipFile(wheel) as archive:
        problems = content_problems(set(archive.namelist()))
    problems += platform_problems(wheel)
    for problem in problems:
        print(f"{Path(wheel).name}: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
