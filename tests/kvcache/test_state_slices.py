"""The keeper of state slices in host memory: bounded, create-only, told to all who listen."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from deepinfer.errors import ConfigError
from deepinfer.kvcache.state_slices import HostSlices, SliceCounts


def key(n: int) -> bytes:
    return n.to_bytes(16, "little")


def test_the_one_used_longest_ago_goes_first() -> None:
    tier = HostSlices(30)
    for n in (1, 2, 3):
        assert tier.put(key(n), bytes([n]) * 10)
    assert tier.get(key(1)) == bytes([1]) * 10
    assert tier.has(key(2)), "a look is no use"
    assert tier.put(key(4), b"4" * 10) and not tier.has(key(2)) and tier.has(key(1))
    assert not tier.put(key(3), b"\x03" * 10), "there already; but it counts as a use"
    assert tier.put(key(5), b"5" * 20)
    assert [tier.has(key(n)) for n in range(1, 6)] == [False, False, True, False, True]
    assert not tier.put(key(6), b"6" * 31) and tier.has(key(5)), "larger than the tier: nothing goes for it"
    assert tier.get(key(6)) is None
    assert tier.counts() == SliceCounts(slices=2, bytes=30, kept=5, evicted=3, refused=1, differing=0, hits=1, misses=1)


def test_the_first_bytes_under_a_key_stay() -> None:
    tier = HostSlices(100)
    assert tier.put(key(1), b"first") and not tier.put(key(1), b"other") and not tier.put(key(1), b"first")
    assert tier.get(key(1)) == b"first"
    assert (tier.counts().differing, tier.counts().kept) == (1, 1)
    assert tier.drop(key(1)) and not tier.drop(key(1))
    assert tier.put(key(1), b"other") and tier.get(key(1)) == b"other"
    assert replace(tier.counts(), hits=0) == SliceCounts(1, 5, 2, 0, 0, 1, 0, 0)


def test_who_watches_hears_of_all_there_is_and_all_that_changes() -> None:
    tier = HostSlices(20)
    tier.put(key(1), b"1" * 10)
    heard: list[tuple[bytes, bool]] = []
    stop = tier.watch(lambda k, present: heard.append((k, present)))
    assert heard == [(key(1), True)]
    tier.put(key(2), b"2" * 10)
    tier.put(key(3), b"3" * 10)
    tier.drop(key(2))
    assert heard[1:] == [(key(2), True), (key(1), False), (key(3), True), (key(2), False)]
    stop()
    stop()
    tier.drop(key(3))
    assert len(heard) == 5


def test_threads_share_a_tier() -> None:
    tier = HostSlices(50 * 8)
    known: set[bytes] = set()
    tier.watch(lambda k, present: known.add(k) if present else known.remove(k))

    def work(seed: int) -> None:
        for n in range(2000):
            at = key((n * 7 + seed * 13) % 120)
            if tier.get(at) not in (None, at[:8]):
                raise AssertionError("another one's bytes")
            tier.put(at, at[:8])
            if n % 11 == 0:
                tier.drop(at)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    counts = tier.counts()
    assert counts.slices == len(known) <= 50 and counts.bytes == 8 * counts.slices
    assert all(tier.has(k) for k in known) and counts.hits + counts.misses == 8000 and counts.differing == 0


@pytest.mark.parametrize("bad", [b"", b"x" * 15, b"x" * 17, "x" * 16])
def test_other_keys_are_refused(bad: bytes) -> None:
    with pytest.raises(ValueError, match="16 bytes"):
        HostSlices(10).put(bad, b"1")


def test_a_tier_needs_room() -> None:
    with pytest.raises(ConfigError, match="at least 1 byte"):
        HostSlices(0)
