"""Chains that come from a store or go to one, as the engine sees them: keys and pages, waits, refusals, what is counted."""

from __future__ import annotations

import pytest

from core_driver import Driver, prompt
from deepinfer import _core
from deepinfer.errors import ConfigError, InvalidRequestError, TransferError

IDS = prompt(70)


def held(driver: Driver) -> int:
    driver.check_counts()
    return driver.core.counts()["groups"][0]["held"]


def two_groups() -> list[_core.PagedGroup]:
    """Blocks of 16 tokens; a block has two pages of the second group."""
    first = _core.PagedGroup(page_tokens=16, num_pages=33, sources=[(16, 64)])
    return [first, _core.PagedGroup(page_tokens=8, num_pages=70, sources=[(8, 64)])]


def test_a_sequence_begins_behind_what_was_fetched() -> None:
    driver = Driver(groups=two_groups())
    handle = driver.core.add(IDS, max_new_tokens=3, fetch=True)[0]
    chain = driver.core.chain(handle)
    assert len(chain) == 4 * 16
    assert driver.schedule() == -1
    assert driver.core.info(handle)["status"] == "wait_kv"
    assert driver.core.chain_hash(handle, 64) == chain[48:]
    fetch = driver.core.begin_fetch(handle, 70)
    assert (fetch["present"], fetch["tokens"], fetch["after_step"], fetch["pending"]) == (0, 64, 0, 0)
    assert list(fetch["blocks"]) == [1, 2, 3, 4] == list(fetch["pages"][0])
    assert len(fetch["pages"][1]) == 8 and held(driver) == 4
    assert driver.core.end_fetch(fetch["transfer"], 64)
    assert not driver.core.end_fetch(fetch["transfer"], 64)
    assert held(driver) == 0
    assert driver.core.end_wait(handle)
    assert not driver.core.end_wait(handle)
    slot = driver.schedule()
    assert driver.ring[slot]["pos"][:6].tolist() == list(range(64, 70))
    driver.sample(slot)
    driver.complete(slot)
    assert [row[5] for row in driver.run()] == [0, 2]
    stats = driver.core.stats()
    assert (stats["fetches"], stats["fetches_ended"], stats["fetched_tokens"], stats["fetch_waits_ended"]) == (1, 1, 64, 1)
    assert (stats["stale"], stats["fetches_failed"], stats["hit_tokens"]) == (2, 0, 64)


def test_a_block_is_brought_once() -> None:
    driver = Driver(groups=two_groups())
    first, second = (driver.core.add([*IDS[:-2], tail, tail], max_new_tokens=3, fetch=True)[0] for tail in (3, 4))
    fetch = driver.core.begin_fetch(first, 64)
    again = driver.core.begin_fetch(second, 64)
    assert (again["transfer"], again["present"], again["tokens"], again["pending"]) == (0, 0, 0, fetch["transfer"])
    assert len(again["blocks"]) == 0 and [len(pages) for pages in again["pages"]] == [0, 0]
    assert driver.core.end_fetch(fetch["transfer"], 32)  # half of it
    rest = driver.core.begin_fetch(second, 64)
    assert (rest["present"], rest["tokens"], len(rest["blocks"]), rest["pending"]) == (32, 64, 2, 0)
    assert driver.core.end_fetch(rest["transfer"], 0)
    assert driver.core.end_wait(first) and driver.core.end_wait(second)
    assert sorted(row[5] for row in driver.run())[-2:] == [2, 2]
    stats = driver.core.stats()
    assert (stats["fetches"], stats["fetches_failed"], stats["fetches_under_way"], stats["fetched_tokens"]) == (2, 2, 1, 32)
    assert held(driver) == 0


def test_the_lease_ends_the_wait_only() -> None:
    driver = Driver(fetch_lease_ns=5000)
    handle = driver.core.add(IDS, max_new_tokens=1, fetch=True)[0]
    other = driver.core.add(prompt(20, 7), max_new_tokens=2)[0]
    assert driver.step() is not None  # who waits holds nobody up
    assert driver.core.info(other)["output_tokens"] == 1
    assert driver.core.next_lease_ns() == driver.now - 1000 + 5000
    assert [row[5] for row in driver.run()] == [2]
    driver.now += 5000
    assert [row[5] for row in driver.run()] == [2]
    assert driver.core.next_lease_ns() is None
    stats = driver.core.stats()
    assert (stats["fetch_leases_ended"], stats["kv_leases_ended"], stats["finished_length"]) == (1, 0, 2)
    assert list(driver.core.drain_remote_releases()) == []
    assert not driver.core.end_wait(handle)


def test_saves_name_every_grain_and_are_given_once() -> None:
    driver = Driver(groups=two_groups())
    driver.core.set_saves("on_finish", 2)
    handle = driver.core.add(IDS, max_new_tokens=40)[0]
    chain = driver.core.chain(handle)
    driver.step()
    assert driver.core.take_saves() == []  # its prompt takes two steps
    driver.step()
    (save,) = driver.core.take_saves()
    assert (save["seq"], save["first"]) == (handle, 0)
    assert save["keys"] == chain[16:32] + chain[48:64]
    assert save["parents"] == bytes(16) + chain[16:32]
    assert list(save["blocks"]) == list(save["pages"][0]) == [1, 2, 3, 4]
    assert len(save["pages"][1]) == 8
    list(driver.run())
    (end,) = driver.core.take_saves()  # 70 + 40 − 1 positions
    assert (end["first"], end["parents"], len(end["keys"]), len(end["blocks"])) == (64, chain[48:64], 16, 2)
    assert driver.core.take_saves() == []
    assert held(driver) == 6
    assert driver.core.end_save(save["transfer"], False)
    assert driver.core.end_save(end["transfer"], True)
    assert not driver.core.end_save(end["transfer"], True)
    assert not driver.core.end_fetch(end["transfer"], 16)
    assert held(driver) == 0
    driver.core.add(IDS, max_new_tokens=1)
    list(driver.run())
    (again,) = driver.core.take_saves()
    assert again["keys"] == save["keys"]  # it failed
    assert driver.core.end_save(again["transfer"], True)
    stats = driver.core.stats()
    assert (stats["saves_given"], stats["saves_failed"], stats["saves_lost"]) == (3, 1, 0)


def test_written_through_a_grain_is_given_with_its_step() -> None:
    driver = Driver()
    driver.core.set_saves("write_through", 1)
    driver.core.add(IDS, max_new_tokens=1)
    driver.step()
    assert [(save["first"], len(save["blocks"])) for save in driver.core.take_saves()] == [(0, 4)]
    driver.core.set_saves("off")
    list(driver.run())
    assert driver.core.take_saves() == []


def test_refusals_name_the_reason() -> None:
    driver = Driver()
    running = driver.core.add(IDS, max_new_tokens=5)[0]
    waits = driver.core.add(IDS[1:], max_new_tokens=5, fetch=True)[0]
    driver.step()
    for tokens in (0, 15, 80):
        with pytest.raises(TransferError, match="between 16 and 64, in whole blocks"):
            driver.core.begin_fetch(waits, tokens)
    with pytest.raises(TransferError, match="status"):
        driver.core.begin_fetch(running, 16)
    with pytest.raises(TransferError, match="status"):
        driver.core.begin_load(waits, 16)
    with pytest.raises(TransferError, match="ended"):
        driver.core.begin_fetch(running + (1 << 40), 16)
    assert driver.core.chain(running + (1 << 40)) == b""
    with pytest.raises(InvalidRequestError, match="fetch and wait_kv"):
        driver.core.add(IDS, max_new_tokens=5, wait_kv=True, fetch=True)
    with pytest.raises(ValueError, match="on_finish"):
        driver.core.set_saves("sometimes")
    with pytest.raises(ConfigError, match="grain_blocks is 0"):
        driver.core.set_saves("on_finish", 0)
    with pytest.raises(ConfigError, match="prefix caching"):
        Driver(prefix_caching=False).core.set_saves("on_finish", 1)


def test_room_is_left_for_the_oldest_waiting() -> None:
    small = [_core.PagedGroup(page_tokens=16, num_pages=13, sources=[(16, 64)])]
    driver = Driver(groups=small, max_num_seqs=1, headroom_tokens=0)
    driver.core.add(prompt(30, 7), max_new_tokens=3)
    driver.core.add(prompt(90, 8), max_new_tokens=3)
    waits = driver.core.add(IDS, max_new_tokens=3, fetch=True)[0]
    driver.step()
    # 12 blocks: 2 of who runs, 6 for who comes next.
    fetch = driver.core.begin_fetch(waits, 64)
    assert driver.core.end_fetch(fetch["transfer"], 0)
    with pytest.raises(TransferError, match="4 blocks"):
        driver.core.begin_fetch(waits, 64)  # what the mover may have written comes back with the next step
    driver.step()
    assert len(driver.core.begin_fetch(waits, 64)["blocks"]) == 4
