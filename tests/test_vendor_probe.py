"""vendor/probe.py: the table is complete and each reason is told apart."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

VENDOR = Path(__file__).resolve().parent.parent / "vendor"


@pytest.fixture(scope="module")
def probe() -> ModuleType:
    spec = importlib.util.spec_from_file_location("vendor_probe", VENDOR / "probe.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["vendor_probe"] = module
    spec.loader.exec_module(module)
    return module


def entry(**changes: object) -> dict[str, object]:
    return {"module": "json", "package": "pytest", "capability": [9, 0], "purpose": "a test"} | changes


def test_every_entry_has_what_the_probe_reads() -> None:
    for name, found in tomllib.loads((VENDOR / "libraries.toml").read_text(encoding="utf-8")).items():
        assert {"module", "package", "capability", "purpose", "licence"} <= set(found), name


@pytest.mark.parametrize(
    ("given", "device", "reason"),
    [
        (entry(), (9, 0), ""),
        (entry(), None, "no CUDA device"),
        (entry(), (8, 6), "needs compute capability 9.0, this device has 8.6"),
        (entry(module="no_such_module"), (9, 0), "not installed (package pytest)"),
        (entry(pin="0.0.1"), (9, 0), f"version {pytest.__version__} is installed, 0.0.1 is pinned"),
        (entry(pin=pytest.__version__), (10, 0), ""),
    ],
)
def test_reason(probe: ModuleType, given: dict[str, object], device: tuple[int, int] | None, reason: str) -> None:
    found = probe.probe("thing", given, device)
    assert (found.reason, found.usable) == (reason, reason == "")


def test_command_prints_one_json_object() -> None:
    done = subprocess.run([sys.executable, str(VENDOR / "probe.py"), "--json"], capture_output=True, text=True, check=True)
    libraries = json.loads(done.stdout)["libraries"]
    assert [f["name"] for f in libraries] == ["deep-gemm", "flash-mla", "deep-ep", "flashinfer"]
    assert all(f["usable"] or f["reason"] for f in libraries)
