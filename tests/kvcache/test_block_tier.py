"""The tier in memory: prefixes, first bytes stay, leaves go first, and a bound that holds."""

from __future__ import annotations

import random
import threading

import pytest

from deepinfer.errors import ConfigError
from deepinfer.kvcache.block_tier import MemoryTier


def name(n: int) -> bytes:
    return n.to_bytes(16, "little")


def names(*ns: int) -> bytes:
    return b"".join(map(name, ns))


def put(tier: MemoryTier, key: int, parent: int, data: bytes, kind: str = "block") -> str:
    return tier.put(kind, name(key), name(parent) if parent else b"", [len(data)], data, "chat").decode()  # type: ignore[arg-type]


def filled(capacity: int = 1000) -> MemoryTier:
    """Chains 1-2-3 and 1-2-4-5, ten bytes each; slices at 2 and 4."""
    tier = MemoryTier(capacity)
    assert tier.put("block", names(1, 2, 3), b"", [10] * 3, bytes(range(30)), "chat") == b"sss"
    assert tier.put("block", names(4, 5), names(1, 2), [10] * 2, bytes(range(30, 50)), "chat") == b"ss"
    assert put(tier, 2, 2, b"slice of 2", "slice") == put(tier, 4, 4, b"4", "slice") == "s"
    return tier


def test_a_chain_is_found_as_far_as_it_goes_with_its_deepest_slices() -> None:
    tier = filled()
    assert tier.check(names(1, 2, 4, 5, 6), 9) == (4, [2, 1], 0)
    assert tier.check(names(1, 2, 4, 5, 6), 1) == (4, [2], 0)
    assert tier.check(names(1, 2, 3), 0) == (3, [], 0)
    assert tier.check(names(9, 1), 3) == (0, [], 0) == tier.check(b"", 3)


def test_bytes_come_back_to_their_places_and_what_is_missing_or_of_another_length_is_told() -> None:
    tier, into = filled(), bytearray(40)
    assert tier.get("block", names(5, 7, 1), into, 10) == bytes([1, 0, 1])
    assert into == bytes([*range(40, 50), *[0] * 10, *range(10), *[0] * 10])
    assert tier.get("block", names(5), into, 9) == bytes([0])
    assert tier.get("slice", names(2, 4), into, 10) == bytes([1, 0]) and into[:10] == b"slice of 2"
    with pytest.raises(ValueError, match="16 bytes"):
        tier.get("block", b"short", into, 10)


def test_the_first_bytes_under_a_name_stay() -> None:
    tier = filled()
    assert put(tier, 5, 4, bytes(range(40, 50))) == "e" and put(tier, 5, 4, bytes(10)) == "c"
    assert put(tier, 2, 2, b"another", "slice") == "c"
    into = bytearray(10)
    tier.get("block", name(5), into, 10)
    assert into == bytes(range(40, 50)) and tier.stats()["conflicts"] == 2
    tolerant = MemoryTier(100, first_stays=True)
    assert put(tolerant, 1, 0, b"a") == "s" and put(tolerant, 1, 0, b"b") == "e"


def test_nothing_is_kept_without_its_parent_or_larger_than_the_tier() -> None:
    tier = MemoryTier(100)
    assert put(tier, 2, 1, b"x") == "p" == put(tier, 2, 2, b"x", "slice")
    assert put(tier, 1, 0, bytes(101)) == "f" and tier.stats()["bytes"] == 0
    with pytest.raises(ValueError, match="announced"):
        tier.put("block", names(1), b"", [5], b"1234", "chat")
    with pytest.raises(ConfigError):
        MemoryTier(0)


def test_slices_go_first_then_leaves_in_the_order_of_use() -> None:
    tier = filled(61)  # 50 of blocks, 11 of slices
    assert put(tier, 6, 0, bytes(11)) == "s"  # both slices, and nothing else
    assert tier.check(names(1, 2, 4, 5), 9) == (4, [], 0)  # 5 is the oldest leaf
    tier.check(names(6), 0)
    tier.check(names(1, 2, 3), 0)
    assert put(tier, 7, 0, bytes(10)) == "s"
    assert [tier.check(names(*chain), 0)[0] for chain in ((1, 2, 3), (1, 2, 4, 5), (6,))] == [3, 3, 1]
    assert put(tier, 8, 7, bytes(45)) == "s", "room is made by all that may go but the parent"
    assert tier.check(names(7, 8), 0)[0] == 2 and tier.stats()["bytes"] == 55
    assert put(tier, 9, 8, bytes(20)) == "f", "an ancestor cannot make room for its child"


def test_what_is_present_has_its_ancestors_and_fits_whatever_comes() -> None:
    draw, tier = random.Random(1), MemoryTier(400)
    parents = {n: 0 if n <= 3 else draw.randrange(1, n) for n in range(1, 80)}
    for _ in range(3000):
        key = draw.randrange(1, 80)
        if draw.random() < 0.6:
            put(tier, key, parents[key], bytes([key]) * draw.randrange(5, 40))
        else:
            chain = [key]
            while parents[chain[0]]:
                chain.insert(0, parents[chain[0]])
            found = tier.check(names(*chain), 0)[0]
            assert all(n in tier._blocks for n in map(name, chain[:found]))
        held = dict(tier._blocks)
        assert sum(len(b.data) for b in held.values()) == tier._bytes <= 400
        assert all(b.parent == bytes(16) or b.parent in held for b in held.values())
        assert all(b.children == sum(c.parent == n for c in held.values()) for n, b in held.items())
    assert tier.stats()["evicted"] > 100


def test_threads_share_it_and_a_closed_one_says_so() -> None:
    tier = MemoryTier(1 << 20)

    def work(first: int) -> None:
        for n in range(first, first + 200):
            assert put(tier, n, n - 1 if n > first else 0, bytes([n % 256]) * 16) == "s"
            into = bytearray(16)
            assert tier.get("block", name(n), into, 16) == b"\1" and into[0] == n % 256

    threads = [threading.Thread(target=work, args=(1 + 1000 * i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert tier.stats()["blocks"] == 800 and tier.flush(0)
    tier.close()
    tier.close()
    with pytest.raises(ConnectionError):
        tier.check(name(1), 0)
