"""Configurations of the family, fresh for every test."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deepinfer.models.deepseek_v41.make_checkpoint import make_checkpoint

DATA = Path(__file__).resolve().parents[2] / "data" / "deepseek_v41"


@pytest.fixture(scope="session")
def load() -> Callable[..., dict[str, Any]]:
    """``load("tiny", head_dim=96)``: a configuration with text fields changed; ``None`` removes one."""

    def read(name: str, **changes: Any) -> dict[str, Any]:
        config: dict[str, Any] = json.loads((DATA / f"{name}.json").read_text(encoding="utf-8"))
        config["text_config"].update(changes)
        for field, value in changes.items():
            if value is None:
                del config["text_config"][field]
        return config

    return read


@pytest.fixture(scope="session")
def flat(load: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """The same with the text fields at the top."""

    def read(name: str, **changes: Any) -> dict[str, Any]:
        config = load(name, **changes)
        text = config.pop("text_config")
        return {**text, **config}

    return read


@pytest.fixture(scope="session")
def made(load: Callable[..., dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of ``tiny`` in the released form, seed 3, in several shards. Read it only."""
    directory = tmp_path_factory.mktemp("v41") / "released"
    make_checkpoint(load("tiny"), directory, seed=3, shard_bytes=5_000_000)
    return directory
