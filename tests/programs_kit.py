"""Other people's programs, run in an environment of their own (requirements/clients.txt)."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

PYTHON = os.environ.get("DEEPINFER_TEST_CLIENTS", "")
"""Interpreter of that environment."""
ROOT = Path(__file__).parents[1]
KEY = "sk-test"
"""What the server under test asks for."""
TIMEOUT = 300  # seconds; these programs import for long on a loaded machine

needs_clients = pytest.mark.skipif(
    not PYTHON,
    reason="needs an environment with requirements/clients.txt: its python in DEEPINFER_TEST_CLIENTS",
)


def run(*argv: str, home: Path, **env: str) -> str:
    """Runs ``python ARGV`` there, off line, with ``home`` for all that it keeps; gives what it prints."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "HF_", "OPENAI_", "LITELLM_", "LLM_"))}
    own = {
        "HOME": str(home),
        "HF_HOME": str(home / "hf"),
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    done = subprocess.run(
        [PYTHON, *argv], stdin=subprocess.DEVNULL, capture_output=True, text=True, cwd=ROOT, env={**kept, **own, **env}, timeout=TIMEOUT
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
