"""The first thing that `make run` does: a missing, idle or old toolchain is one line that says what to install."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "check_python.py"


def check(cargo: str | None, folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs the check where ``cargo`` is this shell script, or nowhere."""
    if cargo is not None:
        (folder / "cargo").write_text(f"#!/bin/sh\n{cargo}\n")
        (folder / "cargo").chmod(0o755)
    return subprocess.run([sys.executable, SCRIPT], env={"PATH": str(folder)}, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("version", ["1.89.0 (29483883e 2025-08-04)", "1.91.0-nightly (abc 2025-08-01)", "2.0.0"])
def test_a_new_enough_toolchain_passes(version: str, tmp_path: Path) -> None:
    done = check(f"echo 'cargo {version}'", tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("cargo", "advice"),
    [
        (None, "cargo is not on PATH"),
        ("echo 'error: rustup could not choose a version of cargo to run' >&2; exit 1", "`rustup default stable`"),
        ("echo 'cargo 1.87.0 (99624be96 2025-05-06)'", "needs Rust 1.89 or newer, cargo is 1.87: `rustup update stable`"),
    ],
    ids=["missing", "rustup-without-a-toolchain", "old"],
)
def test_what_is_missing_takes_one_line(cargo: str | None, advice: str, tmp_path: Path) -> None:
    done = check(cargo, tmp_path)
    assert done.returncode == 1 and advice in done.stderr and done.stderr.count("\n") == 1
