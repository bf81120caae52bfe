"""The KV store as an engine calls it: an embedded one in a directory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from deepinfer import _core, errors

EACH = 1000


def key(number: int) -> bytes:
    return number.to_bytes(16, "little")


def chain(*numbers: int) -> bytes:
    """Keys of a chain."""
    return b"".join(map(key, numbers))


def content(number: int, length: int = EACH) -> bytes:
    return bytes((number * 31 + at) % 251 for at in range(length))


@pytest.fixture
def open_tier(tmp_path: Path) -> Any:
    tiers = []

    def make(**options: Any) -> _core.KvTier:
        tiers.append(_core.KvTier(f"dir:{tmp_path / 'kv'}", **options))
        return tiers[-1]

    yield make
    for tier in tiers:
        tier.close()


def test_what_was_put_is_found_and_read_also_by_the_next_tier(open_tier: Callable[..., _core.KvTier]) -> None:
    keys = chain(1, 2, 3)
    data = b"".join(map(content, (1, 2, 3)))
    tier = open_tier(tenant="one")
    assert tier.put("block", keys, b"", [EACH] * 3, data, "agent") == b"sss"
    assert tier.put("slice", key(2), b"", [77], data) == b"s"
    assert tier.put("block", keys, b"", [EACH] * 3, data) == b"eee"
    assert tier.put("block", key(1), b"", [EACH], content(9)) == b"c"
    assert tier.put("block", key(8), key(7), [EACH], data) == b"p"
    assert tier.flush(1.0)
    tier.close()
    tier.close()
    with pytest.raises(errors.KvStoreUnavailableError, match="closed"):
        tier.check(keys)

    tier = open_tier(tenant="one")
    assert tier.address.startswith("dir:/")
    assert tier.check(keys + key(4), 5) == (3, [1], 0)
    into = bytearray(4 * EACH)
    assert tier.get("block", key(3) + key(9) + key(1), into, EACH) == b"\1\0\1"
    assert into[:EACH] == content(3) and into[2 * EACH : 3 * EACH] == content(1)
    assert tier.get("slice", key(2), into, 77) == b"\1" and into[:77] == content(1, 77)
    assert tier.get("block", key(1), into, EACH - 1) == b"\0"  # of another length: a miss, not a part
    stats = tier.stats()
    assert (stats["store_blocks"], stats["store_slices"], stats["hits"], stats["misses"]) == (3, 1, 3, 2)


def test_tensors_are_buffers_too(open_tier: Callable[..., _core.KvTier]) -> None:
    tier = open_tier()
    given = torch.arange(2 * EACH, dtype=torch.int64).to(torch.uint8)
    keys = chain(1, 2)
    assert tier.put("block", keys, b"", [EACH, EACH], given) == b"ss"
    into = torch.zeros(2 * EACH, dtype=torch.uint8)
    assert tier.get("block", keys, into, EACH) == b"\1\1"
    assert torch.equal(given, into)
    with pytest.raises(errors.InvalidRequestError, match="not contiguous"):
        tier.get("block", key(1), torch.zeros(EACH, 2, dtype=torch.uint8).t(), EACH)


def test_tenants_share_nothing_but_what_is_everybodys(open_tier: Callable[..., _core.KvTier]) -> None:
    keys = chain(1, 2)
    tier = open_tier(tenant="one")
    assert tier.put("block", keys, b"", [EACH] * 2, content(1, 2 * EACH)) == b"ss"
    tier.close()
    tier = open_tier(tenant="two")
    into = bytearray(EACH)
    assert tier.check(keys) == (0, [], 0)
    assert tier.get("block", key(1), into, EACH) == b"\0" and not any(into)
    tier.close()
    tier = open_tier()
    assert tier.put("block", key(5), b"", [EACH], content(5)) == b"s"
    tier.close()
    tier = open_tier(tenant="two")
    assert tier.get("block", key(5), into, EACH) == b"\1" and into == content(5)


def test_the_first_write_stays_where_bytes_may_differ(open_tier: Callable[..., _core.KvTier]) -> None:
    tier = open_tier(first_stays=True)
    assert tier.put("block", key(1), b"", [EACH], content(1)) == b"s"
    assert tier.put("block", key(1), b"", [EACH], content(2)) == b"e"
    into = bytearray(EACH)
    assert tier.get("block", key(1), into, EACH) == b"\1" and into == content(1)
    assert tier.stats()["store_differs"] == 1 and tier.stats()["store_conflicts"] == 0


WRONG: list[tuple[str, type[Exception], Callable[[_core.KvTier], Any]]] = [
    ("16 for each object", errors.InvalidRequestError, lambda t: t.check(b"123")),
    ("16 for each object", errors.InvalidRequestError, lambda t: t.put("block", key(1), b"1", [1], b"x")),
    ('give "block" or "slice"', errors.InvalidRequestError, lambda t: t.get("row", key(1), bytearray(1), 1)),
    ('"chat", "agent"', errors.InvalidRequestError, lambda t: t.put("block", key(1), b"", [1], b"x", "spam")),
    ("read-only", errors.InvalidRequestError, lambda t: t.get("block", key(1), b"x", 1)),
    ("do not fit a buffer of 9", errors.KvStoreRefusedError, lambda t: t.get("block", key(1) + key(2), bytearray(9), 5)),
    ("do not fit a buffer of 9", errors.KvStoreRefusedError, lambda t: t.get("block", key(1), bytearray(9), 0)),
    ("do not fit a buffer of 9", errors.KvStoreRefusedError, lambda t: t.get("block", key(1) * 2, bytearray(9), 2**63)),
    ("the buffer has 9", errors.KvStoreRefusedError, lambda t: t.put("block", key(1), b"", [10], bytes(9))),
    ("one of each", errors.KvStoreRefusedError, lambda t: t.put("block", key(1) + key(2), b"", [1], bytes(9))),
    ("one of each", errors.KvStoreRefusedError, lambda t: t.put("block", key(1), b"", [1, 1], bytes(9))),
    ("8192", errors.KvStoreRefusedError, lambda t: t.check(key(1) * 8193)),
    ("seconds", errors.ConfigError, lambda t: t.flush(float("nan"))),
]


@pytest.mark.parametrize(("said", "kind", "call"), WRONG, ids=range(len(WRONG)))
def test_what_makes_no_sense_is_refused_before_anything_happens(
    open_tier: Callable[..., _core.KvTier], said: str, kind: type[Exception], call: Callable[[_core.KvTier], Any]
) -> None:
    tier = open_tier()
    with pytest.raises(kind, match=said) as refused:
        call(tier)
    assert "\n" not in str(refused.value)
    stats = tier.stats()
    assert stats["stored"] == stats["hits"] == stats["misses"] == 0


@pytest.mark.parametrize(
    ("address", "options", "said"),
    [
        ("", {}, "no address of a KV store"),
        ("nfs:/x", {}, "no address of a KV store"),
        ("dir:{}", {"capacity": 5}, "capacity is 5"),
        ("dir:{}", {"segment_bytes": 5}, "segment_bytes is 5"),
        ("dir:{}", {"tenant": "t" * 200}, "tenant"),
        ("dir:{}", {"fingerprint": b"12"}, "fingerprint has 2 bytes"),
        ("dir:{}", {"tokens": {"root": b"x" * 16}}, "'root' is no role|\"root\" is no role"),
    ],
)
def test_an_address_or_a_size_that_cannot_be_is_refused(tmp_path: Path, address: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises((errors.KvStoreRefusedError, errors.ConfigError), match=said):
        _core.KvTier(address.format(tmp_path / "kv"), **options)


def test_a_newer_format_is_refused_and_a_taken_directory_too(open_tier: Callable[..., _core.KvTier], tmp_path: Path) -> None:
    tier = open_tier()
    with pytest.raises(errors.KvStoreUnavailableError, match="open in another process"):
        open_tier()
    tier.close()
    form = tmp_path / "kv" / "FORMAT"
    form.write_text(form.read_text().replace("kvstore 1", "kvstore 2"))
    with pytest.raises(errors.KvStoreFormatError, match="newer than this version reads"):
        open_tier()


def test_calls_let_go_of_the_interpreter_lock(open_tier: Callable[..., _core.KvTier]) -> None:
    """While one thread puts and syncs, another one runs Python."""
    tier = open_tier()
    data = content(1, 4 << 20)
    rounds = 0
    done = threading.Event()

    def put() -> None:
        for number in range(1, 13):
            assert tier.put("block", key(number), b"", [len(data)], data) == b"s"
        done.set()

    thread = threading.Thread(target=put)
    thread.start()
    while not done.is_set():
        rounds += 1
        time.sleep(0.0005)
    thread.join()
    assert rounds > 12


KILLED = """
import sys
from deepinfer import _core
tier = _core.KvTier(sys.argv[1], tenant="one")
before = b""
for number in range(1, 8000):
    key = number.to_bytes(16, "little")
    data = bytes((number * 31 + at) % 251 for at in range(1000))
    assert tier.put("block", key, before, [1000], data) == b"s"
    before += key
    print(number, flush=True)
"""


def test_what_was_acknowledged_is_there_after_a_kill(open_tier: Callable[..., _core.KvTier], tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", KILLED, f"dir:{tmp_path / 'kv'}"], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    try:
        last = 0
        while last < 40:
            last = int(child.stdout.readline())
    finally:
        os.kill(child.pid, signal.SIGKILL)
        rest = child.stdout.read().split()
        child.wait(10)
    last = max([last, *(int(line) for line in rest)])
    tier = open_tier(tenant="one")
    keys = chain(*range(1, last + 1))
    assert tier.check(keys)[0] == last
    into = bytearray(last * EACH)
    assert tier.get("block", keys, into, EACH) == b"\1" * last
    assert all(into[at * EACH : (at + 1) * EACH] == content(at + 1) for at in range(last))
