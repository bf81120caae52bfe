"""A compiled core that does not fit the Python beside it is named at import, in one line that says what to do."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from deepinfer import _core
from deepinfer.core_check import check_core
from deepinfer.errors import CoreMismatchError


def older(**changes: object) -> ModuleType:
    """The core with some names gone (``None``) or replaced."""
    made = ModuleType("deepinfer._core")
    made.__dict__.update({name: getattr(_core, name) for name in dir(_core) if name not in made.__dict__})
    for name, value in changes.items():
        if value is None:
            delattr(made, name)
        else:
            setattr(made, name, value)
    return made


def older_group(signature: str) -> SimpleNamespace:
    """A class whose constructor takes less."""
    members = {name: None for name in dir(_core.StateGroup) if not name.startswith("__")}
    return SimpleNamespace(**dict.fromkeys(members, 1), __text_signature__=signature)


def test_the_core_in_use_fits() -> None:
    check_core()
    check_core(older())


@pytest.mark.parametrize(
    ("core", "lacks"),
    [
        (older(OUTPUT_WORDS=None), "OUTPUT_WORDS"),
        (older(WindowRule=None), "WindowRule"),
        (older(bench_steps=None), "bench_steps"),
        (older(Core=SimpleNamespace(schedule=1, __text_signature__="(config)")), "Core\\."),
        (older(StateGroup=older_group("(*, stored, dropped)")), "argument 'replicas' of StateGroup"),
    ],
)
def test_a_stale_core_is_named(core: ModuleType, lacks: str) -> None:
    with pytest.raises(CoreMismatchError, match=f"lacks .*{lacks}.*rebuild") as told:
        check_core(core)
    assert "\n" not in str(told.value)


def test_without_a_stub_nothing_is_checked(tmp_path: Path) -> None:
    check_core(older(Core=None), tmp_path / "none.pyi")


def test_a_core_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(name: str) -> ModuleType:
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr("deepinfer.core_check.importlib.import_module", gone)
    with pytest.raises(CoreMismatchError, match=r"No module named 'deepinfer\._core'.*rebuild"):
        check_core()
