"""What a start leaves to Python's garbage collector: nothing is collected while imports run, and what stays is not walked again."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from collections.abc import Iterator

import pytest

from cli.running import environment
from deepinfer.collector import importing, settle
from engine_kit import make_engine, tiny_checkpoint


@pytest.fixture
def thawed() -> Iterator[None]:
    """Nothing is frozen, before and after."""
    gc.unfreeze()
    yield
    gc.unfreeze()
    assert gc.isenabled()


@pytest.mark.usefixtures("thawed")
def test_nothing_is_collected_while_imports_run() -> None:
    seen: list[str] = []
    gc.callbacks.append(lambda phase, info: seen.append(phase))
    try:
        with importing():
            seen.clear()
            made = [[i] for i in range(100_000)]
            assert not gc.isenabled() and not seen
    finally:
        gc.callbacks.pop()
    assert gc.isenabled() and gc.get_freeze_count() > len(made)


@pytest.mark.usefixtures("thawed")
def test_garbage_of_before_is_collected_first() -> None:
    class Whole:
        alive = 0

        def __init__(self) -> None:
            self.self = self
            Whole.alive += 1

        def __del__(self) -> None:
            Whole.alive -= 1

    for block in (importing, None):
        Whole()
        assert Whole.alive == 1
        if block is None:
            settle()
        else:
            with block():
                assert Whole.alive == 0
        assert Whole.alive == 0 and gc.get_freeze_count() > 0


@pytest.mark.usefixtures("thawed")
def test_an_import_that_fails_leaves_it_as_it_was() -> None:
    with pytest.raises(ImportError), importing():
        raise ImportError
    assert gc.isenabled()
    gc.disable()
    try:
        with importing():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


@pytest.mark.usefixtures("thawed")
def test_a_closed_engine_leaves_everything_to_it_again() -> None:
    with make_engine(tiny_checkpoint("llama", layers=1), "cpu"):
        assert gc.get_freeze_count() > 10_000
    assert gc.get_freeze_count() == 0


def test_what_is_frozen_is_taken_down_at_the_end() -> None:
    """Cycles too, an engine that nobody closed among them: libraries that count what they made would find it missing."""
    text = """
import sys

class Counted:
    def __init__(self):
        self.self = self
    def __del__(self):
        sys.stderr.write("gone")

kept = Counted()
from deepinfer.collector import importing
with importing():
    pass
"""
    made = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, env=environment(), timeout=120)
    assert (made.returncode, made.stderr) == (0, "gone")


def test_a_script_imports_no_server() -> None:
    """`LLM` alone: no front of an engine elsewhere, and everything imported is out of the collector's way."""
    text = """
import gc, json, sys
from deepinfer import LLM
first = gc.get_freeze_count()
from deepinfer import LLM
print(json.dumps([sorted(m for m in sys.modules if m.startswith(("deepinfer.engine.async_engine", "deepinfer.engine.roles",
    "deepinfer.server", "fastapi", "starlette", "uvicorn"))), gc.isenabled(), first, gc.get_freeze_count() == first]))
from deepinfer import AsyncLLM, PrefillDecodePair, register_model
print(json.dumps([AsyncLLM.__module__, PrefillDecodePair.__module__, register_model.__module__]))
"""
    made = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, env=environment(), timeout=120)
    assert made.returncode == 0, made.stderr
    alone, late = (json.loads(line) for line in made.stdout.splitlines())
    modules, collects, frozen, once = alone
    assert modules == [] and collects and frozen > 100_000 and once
    assert late == ["deepinfer.engine.async_engine.client", "deepinfer.engine.roles.pair", "deepinfer.models.registry"]
