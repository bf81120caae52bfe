"""python/deepinfer/_core.pyi says exactly what the built extension has."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest


def test_stub_matches_extension(tmp_path: Path) -> None:
    if importlib.util.find_spec("mypy") is None:
        pytest.fail("mypy is not installed: pip install deepinfer[test]")
    # Other modules of the package are not followed: the stub stands alone, and torch's types take a minute to read.
    config = tmp_path / "mypy.ini"
    config.write_text("[mypy]\nfollow_imports = skip\nstrict = True\n", encoding="utf-8")
    command = [sys.executable, "-m", "mypy.stubtest", "deepinfer._core", "--mypy-config-file", str(config)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
