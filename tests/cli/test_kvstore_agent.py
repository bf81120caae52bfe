"""``deepinfer kvstore agent`` in front of real servers: shared by engines, drained, killed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cli.running import run
from cli.test_kvstore import put_chain, read_chain
from cli.test_surface import assert_one_line
from deepinfer import _core
from kvstore_kit import EACH, chain, content, served

SMALL = ("agent.arena=64MiB", "agent.backlog=16MiB", "agent.at_once=16MiB", "agent.metrics=127.0.0.1:0")


@contextlib.contextmanager
def agent(folder: Path, upstream: str, *more: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """An agent until the block ends; killed then if it still runs."""
    given = [f"agent.socket={folder / 'host' / 'agent.sock'}", f"agent.upstream={upstream}", *SMALL, *more]
    argv = [sys.executable, "-m", "deepinfer.cli", "kvstore", "agent", "--json", *[part for one in given for part in ("--set", one)]]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=dict(os.environ))
    try:
        assert process.stdout is not None and process.stderr is not None
        line = process.stdout.readline()
        assert line, process.stderr.read()
        yield process, json.loads(line)
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def test_what_one_engine_put_another_one_reads_and_the_store_has_after_a_drain(tmp_path: Path) -> None:
    with served(tmp_path / "kv") as server:
        with agent(tmp_path, server.address) as (process, about):
            one, other = _core.KvTier(about["address"], tenant="t"), _core.KvTier(about["address"], tenant="t")
            put_chain(one, 20)
            read_chain(other, 20)
            assert other.check(chain(20))[2] == 20  # in memory of this host
            assert _core.KvTier(about["address"], tenant="u").check(chain(20))[0] == 0
            with urllib.request.urlopen(f"http://{about['metrics']}/metrics", timeout=30) as answer:
                text = answer.read().decode()
            assert "deepinfer_kvstore_agent_put_total 20" in text and "deepinfer_kvstore_agent_hits_total" in text
            assert f"deepinfer_kvstore_agent_arena_bytes {64 << 20}" in text
            process.send_signal(signal.SIGTERM)  # without a flush: the drain writes what engines put
            assert process.wait(60) == 0
        read_chain(_core.KvTier(server.address, tenant="t"), 20)
        assert server.end() == 0


def test_a_killed_agent_is_misses_and_its_successor_finds_what_the_store_has(tmp_path: Path) -> None:
    with served(tmp_path / "kv") as server:
        with agent(tmp_path, server.address) as (process, about):
            tier = _core.KvTier(about["address"])
            put_chain(tier, 10)
            assert tier.flush(60)
            process.kill()
            process.wait(60)
            began = time.monotonic()
            assert tier.get("block", chain(1), bytearray(EACH), EACH) == b"\0"
            assert time.monotonic() - began < 5
        with agent(tmp_path, server.address):
            end = time.monotonic() + 30
            while tier.get("block", chain(1), bytearray(EACH), EACH) != b"\1":
                assert time.monotonic() < end
                time.sleep(0.1)
            read_chain(tier, 10)
        assert server.end() == 0


def test_an_agent_with_a_store_of_its_own(tmp_path: Path) -> None:
    own = f"root={tmp_path / 'kv'}"
    with agent(tmp_path, "own", own) as (process, about):
        put_chain(_core.KvTier(about["address"], tenant="t"), 10)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    with agent(tmp_path, "own", own) as (process, about):
        tier = _core.KvTier(about["address"], tenant="t")
        read_chain(tier, 10)
        assert tier.put("block", chain(1), b"", [EACH], content(7)) in (b"c", b"e")
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0


def test_an_agent_says_why_the_store_behind_it_fails(tmp_path: Path) -> None:
    secret = "a-long-token-of-putting"
    with served(tmp_path / "kv", env={"DEEPINFER_KVSTORE_TOKEN_PUT": secret}) as server:
        with agent(tmp_path, server.address) as (process, about):
            tier = _core.KvTier(about["address"])
            put_chain(tier, 2)  # on this host
            assert not tier.flush(30)
            with urllib.request.urlopen(f"http://{about['metrics']}/metrics", timeout=30) as answer:
                assert "deepinfer_kvstore_agent_store_failures_total 0" not in answer.read().decode()
            assert process.stderr is not None
            while "the store behind this agent fails" not in (line := process.stderr.readline()):
                assert line
            assert "role put" in line and secret not in line
        assert server.end() == 0


@pytest.mark.parametrize(
    ("given", "says"),
    [("agent.upstream=nowhere", 'agent.upstream: "nowhere"'), ("agent.socket=x", "agent.socket"), ("agent.arena=1MiB", "agent.arena")],
)
def test_an_agent_that_makes_no_sense_takes_one_line(given: str, says: str) -> None:
    assert_one_line(run("kvstore", "agent", "--set", given), says)


def test_a_directory_that_others_may_enter_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir(mode=0o755)
    argv = [part for one in (*SMALL, f"agent.socket={tmp_path / 'open' / 's'}") for part in ("--set", one)]
    assert_one_line(run("kvstore", "agent", *argv), "has to be yours alone")
