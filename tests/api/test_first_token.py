"""What a start imports and how its time is told: `benches/first_token.py`, run as a person runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from checkpoint_kit import save

SCRIPT = Path(__file__).resolve().parents[2] / "benches" / "first_token.py"


def test_a_start_is_split_into_its_parts_and_imports_nothing_heavy() -> None:
    command = [sys.executable, str(SCRIPT), "--model", str(save("qwen2")), "--device", "cpu", "--starts", "1", "--input-len", "8", "--json"]
    command += ["--set", "swap_space_gib=0", "--set", "dtype=float32"]
    made = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert made.returncode == 0, made.stderr
    told = json.loads(made.stdout)
    seconds = told["seconds"]
    assert all(seconds[part] > 0 for part in ("imports", "engine", "token"))
    assert seconds["total"] == pytest.approx(sum(seconds[part] for part in ("imports", "engine", "token")), abs=0.03)
    assert told["heavy"] == [] and told["settings"] == {"swap_space_gib": 0, "dtype": "float32"}


def test_settings_reach_the_engine() -> None:
    command = [sys.executable, str(SCRIPT), "--model", str(save("qwen2")), "--device", "cpu", "--starts", "1", "--set", "swap_space_gib=-1"]
    made = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert made.returncode == 2 and "swap_space_gib" in made.stderr.splitlines()[-1]
