"""One server for all tests of a module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from server_kit import Served, serving


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    """`deepinfer serve` of a tiny random model, called ``tiny``."""
    with serving(None, "--served-model-name", "tiny") as made:
        yield made
