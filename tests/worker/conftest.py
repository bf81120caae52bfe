"""What GPU tests of recorded steps share."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

from deepinfer.worker.sync_guard import configure


@pytest.fixture
def checked() -> Iterator[None]:
    """Every copy is looked at, also those of launches between graphs."""
    configure(debug=True)
    yield
    configure(debug=False)
    gc.collect()
    torch.cuda.empty_cache()
