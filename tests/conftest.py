"""Options and fixtures that every suite shares."""

from __future__ import annotations

import os
import signal

import pytest
import torch

from deepinfer.platforms.cuda import NO_WORKSPACE


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="cpu", help="device of the tests that run a model: cpu, cuda or cuda:N")


def pytest_configure(config: pytest.Config) -> None:
    if torch.cuda.is_available():
        # Before CUDA starts: some tests touch it before the first engine does.
        os.environ.update(NO_WORKSPACE)
    os.environ.setdefault("DEEPINFER_QUIET", "1")
    os.environ.setdefault("DEEPINFER_TOKENIZER_CACHE", "")
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell leaves it for what it starts in the background
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu") is not None:  # keywords also hold the names of folders
            item.add_marker(skip)


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> str:
    """Device under test."""
    name: str = request.config.getoption("--device")
    if name.startswith("cuda") and not torch.cuda.is_available():
        pytest.exit(f"--device {name}: torch sees no GPU here; leave it out to run on the CPU", returncode=2)
    return name
