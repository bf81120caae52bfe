"""Which texts name a KV store."""

from __future__ import annotations

from pathlib import Path

import pytest

from deepinfer.engine.config import EngineConfig
from deepinfer.errors import ConfigError
from deepinfer.kvcache.store_address import expanded, is_address


@pytest.mark.parametrize(
    "text", ["dir:kv", "dir:/kv", "dir:~/kv", "unix:/run/kv.sock", "agent:~/agent.sock", "tcp://a:1", "tcp://[::1]:7460,b.c:65535"]
)
def test_addresses(text: str) -> None:
    assert is_address(text)


@pytest.mark.parametrize(
    "text",
    [
        *("", "kv", "dir:", "unix:", "unix:kv.sock", "agent:sock", "http://a:1", "redis://a:1", None, 7),
        *("tcp:a:1", "tcp://", "tcp://a", "tcp://a:", "tcp://:1", "tcp://a:65536", "tcp://a:-1", "tcp://a:²"),
        *("tcp://a:1,b", "tcp://a:1/", "tcp://a:1,"),
    ],
)
def test_what_is_no_address_is_refused_before_a_model_is_loaded(text: object) -> None:
    assert not is_address(text)
    if text is not None:
        with pytest.raises(ConfigError, match="kv_store must be one of dir:PATH"):
            EngineConfig.from_args(model="nowhere", kv_store=text)


def test_the_home_directory_is_filled_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert expanded("dir:~/kv") == f"dir:{tmp_path}/kv"
    assert [expanded(same) for same in ("dir:/a/~", "tcp://a:1", "dir:a~")] == ["dir:/a/~", "tcp://a:1", "dir:a~"]
