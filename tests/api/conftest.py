"""One `LLM` for all tests of a module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import api_kit
from deepinfer import LLM


@pytest.fixture(scope="module")
def llm(device: str) -> Iterator[LLM]:
    """A tiny model with text."""
    with LLM(api_kit.tiny_model(), device=device, **api_kit.SETTINGS) as made:
        yield made
