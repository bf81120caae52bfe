"""The walk of docs/kernels.md is executed: its blocks are an operator, which is listed, compiled and tested as it stands there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from cli.running import environment
from kernel_kit import needs_compiler

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "kernels.md"

CONFTEST = """
import os
from pathlib import Path

import deepinfer.kernels
from deepinfer.kernels import registry
from deepinfer.kernels.toolchain import program

here = Path(__file__).parent / "kernels"
for path in Path(registry.__file__).parent.iterdir():
    if not (here / path.name).exists():
        (here / path.name).symlink_to(path)
deepinfer.kernels.__path__.append(str(here))
program._KERNELS = registry._KERNELS = here
"""
"""Has the package look for operators in the page's folder too, as if its files lay in ``kernels/``."""

LISTED = """
from deepinfer.cli.app import main
from deepinfer.kernels import registry
from deepinfer.kernels.toolchain.shapes import LLAMA_8B

def test_the_registry_finds_it(capsys):
    assert "row_scale" in registry.operators()
    assert [p.name for p in registry.programs(LLAMA_8B, "row_scale")] == ["row_scale/row_scale[threads=128,width=4096]"]
    assert main(["kernels", "list", "--shape", "llama-8b"]) == 0
    assert "row_scale[threads=128,width=4096]" in capsys.readouterr().out
"""


def blocks() -> dict[str, str]:
    """File → text of every block of the page that names one."""
    found = re.findall(r"^```\w+ file=(\S+)\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert len(found) == len({name for name, _ in found}), "a file stands on the page twice"
    return dict(found)


def test_the_walk_makes_an_operator() -> None:
    assert set(blocks()) == {
        "kernels/row_scale/__init__.py",
        "kernels/row_scale/reference.py",
        "kernels/row_scale/cuda.py",
        "tests/kernels/test_row_scale_cuda.py",
    }


@needs_compiler
def test_the_walk(tmp_path: Path) -> None:
    for name, text in {**blocks(), "conftest.py": CONFTEST, "tests/test_listed.py": LISTED}.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    others = environment().get("PYTHONPATH")
    path = f"{ROOT / 'tests'}:{others}" if others else str(ROOT / "tests")
    variables = environment(PYTHONPATH=path, OMP_NUM_THREADS="1", XDG_CACHE_HOME=str(tmp_path / "cache"))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not gpu", "--strict-markers", "-o", "markers=gpu"]
    done = subprocess.run([*command, "tests"], cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^5 passed", done.stdout.splitlines()[-1]), done.stdout


def test_the_walks_python_is_as_the_rest() -> None:
    """Formatted and without what the linter would find."""
    ruff = Path(sys.executable).with_name("ruff")
    if not ruff.exists():
        pytest.skip("needs ruff: pip install 'deepinfer[lint]'")
    for name, text in blocks().items():
        for verb in (["check", "--select", "E,F,W,UP,B,C4,PIE,SIM"], ["format", "--check"]):
            command = [str(ruff), *verb, "--config", str(ROOT / "pyproject.toml"), "--stdin-filename", str(ROOT / name), "-"]
            done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=60, check=False)
            assert done.returncode == 0, f"{name}: {done.stdout}{done.stderr}"
