"""``deepinfer kvstore bench`` on small sizes, and the comparison that is skipped where it cannot be made."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from cli.running import run
from cli.test_surface import assert_one_line

SMALL = ("--entries", "2000", "--round-mib", "8")
COMPARISON = Path(__file__).resolve().parents[2] / "benches" / "compare_mooncake.py"


def test_figures_stand_beside_what_the_machine_does(tmp_path: Path) -> None:
    result = run("kvstore", "bench", "--dir", str(tmp_path), *SMALL, "--part", "put", "--part", "get", "--part", "index", "--json")
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["machine"] and report["dir"] == str(tmp_path) and "median of 5" in report["rule"]
    names = [figure["name"] for figure in report["figures"]]
    assert [name.split(",")[0] for name in names[:4]] == ["PUT 1.4 MB", "PUT 114 kB", "GET 1.4 MB", "GET 114 kB"]
    for figure in report["figures"][:4]:
        assert figure["value"] > 0 and figure["beside"] > 0 and figure["bar"] == 0.8
        middle, least, most = figure["ratio"]
        assert 0 < least <= middle <= most and figure["met"] == (middle >= 0.8)
    (entry,) = [figure for figure in report["figures"] if figure["name"].startswith("index and policy")]
    assert entry["unit"] == "B" and entry["bar"] == 90
    assert not list(tmp_path.iterdir())


def test_a_table_for_people_marks_what_misses_its_bar(tmp_path: Path) -> None:
    result = run("kvstore", "bench", "--dir", str(tmp_path), *SMALL, "--part", "check")
    lines = result.stdout.decode().splitlines()
    checks = [line for line in lines if line.startswith("  CHECK of 1000 blocks, ")]
    assert len(checks) == 4 and all(" us " in line for line in checks)
    marked = [line for line in checks if "meets" in line or "MISSES" in line]
    assert [line.split(", ")[1].split()[0] for line in marked] == ["in", "over", "over"]  # chains that are half there have no bar


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (("--part", "speed"), "--part speed is none: give put, get"),
        (("--dir", "/nowhere"), "--dir /nowhere is no directory"),
        (("--part", "index", "--entries", "5"), "5 entries: give 1000"),
        (("--part", "put", "--round-mib", "0"), "0 bytes a round"),
    ],
    ids=range(4),
)
def test_sizes_that_make_no_sense_take_one_line(argv: tuple[str, ...], says: str) -> None:
    result = run("kvstore", "bench", *argv)
    lines = [line for line in result.stderr.decode().splitlines() if "debug build" not in line]
    assert result.returncode == 2 and len(lines) == 1 and says in lines[0], lines


@pytest.mark.skipif(not COMPARISON.exists(), reason="the script is in the checkout only")
def test_a_comparison_that_cannot_be_made_says_why(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    spec = importlib.util.spec_from_file_location("compare_mooncake", COMPARISON)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module.ctypes.util, "find_library", lambda name: None)
    monkeypatch.setattr(sys, "argv", [str(COMPARISON), "--json"])
    assert module.main() == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1 and "skipped: libibverbs is missing" in said.err


def test_bench_is_listed() -> None:
    assert_one_line(run("kvstore"), "ACTION")
