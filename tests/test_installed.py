"""`make test` runs against the wheel: the package under test is the installed one and there is no Rust around it."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

pytestmark = pytest.mark.skipif("DEEPINFER_TEST_INSTALLED" not in os.environ, reason="the package is used in place, not from a wheel")


def test_package_is_the_installed_wheel() -> None:
    spec = importlib.util.find_spec("deepinfer")
    assert spec is not None and spec.origin is not None
    folder = Path(spec.origin).resolve().parent
    assert folder.parent == Path(sysconfig.get_path("platlib")).resolve()
    assert not folder.is_relative_to(ROOT)


def test_kernels_come_only_as_a_part_of_the_package() -> None:
    spec = importlib.util.find_spec("deepinfer.kernels")
    assert spec is not None and spec.origin is not None and "site-packages" in spec.origin
    top = importlib.util.find_spec("kernels")
    assert top is None or not Path(top.origin or "").is_relative_to(ROOT)


def test_there_is_no_rust() -> None:
    assert shutil.which("cargo") is None
    assert shutil.which("rustc") is None
