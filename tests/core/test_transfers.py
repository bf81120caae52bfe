"""KV that comes from elsewhere or is read past a sequence's end: who holds what, and what a late or failed mover changes."""

from __future__ import annotations

import pytest

from core_driver import Driver, prompt
from deepinfer.errors import InvalidRequestError, TransferError

IDS = prompt(40)


def held(driver: Driver) -> int:
    driver.check_counts()
    return driver.core.counts()["groups"][0]["held"]


def test_loaded_positions_are_not_computed_again() -> None:
    driver = Driver()
    handle = driver.core.add(IDS, max_new_tokens=3, wait_kv=True)[0]
    assert driver.schedule() == -1
    assert driver.core.info(handle)["status"] == "wait_kv"
    load = driver.core.begin_load(handle, 32)
    assert (list(load["blocks"])[:2], load["tokens"], load["present"]) == ([1, 2], 32, 0)
    assert load["state_slot"] > 0 and held(driver) == 2
    driver.core.transfer_ended(load["transfer"], True)
    slot = driver.schedule()
    fields = driver.ring[slot]
    assert int(fields["header"][3]) == 8  # 40 positions, 32 came
    assert fields["pos"][:8].tolist() == list(range(32, 40))
    driver.sample(slot)
    driver.complete(slot)
    assert [row[5] for row in driver.run()] == [0, 2]
    assert held(driver) == 0


def test_failed_load_is_a_miss() -> None:
    driver = Driver()
    handle = driver.core.add(IDS, max_new_tokens=3, wait_kv=True)[0]
    driver.schedule()
    load = driver.core.begin_load(handle, 32)
    driver.core.transfer_ended(load["transfer"], False)
    slot = driver.schedule()
    assert driver.ring[slot]["pos"][:40].tolist() == list(range(40))
    driver.sample(slot)
    driver.complete(slot)
    list(driver.run())
    assert held(driver) == 0


def test_abort_during_a_load_waits_for_the_mover() -> None:
    driver = Driver()
    handle = driver.core.add(IDS, max_new_tokens=3, wait_kv=True)[0]
    driver.schedule()
    load = driver.core.begin_load(handle, 32)
    driver.core.abort(handle)
    assert driver.schedule() == -1
    assert held(driver) == 2  # the mover may still write there
    driver.core.transfer_ended(load["transfer"], True)
    driver.core.transfer_ended(load["transfer"], True)  # late: counted, nothing else
    assert driver.schedule() == -1
    assert held(driver) == 0
    assert driver.core.stats()["stale"] == 1


def test_saved_blocks_stay_past_the_end() -> None:
    driver = Driver()
    handle = driver.core.add(IDS, max_new_tokens=2)[0]
    driver.step()
    save = driver.core.begin_save(handle)
    assert (list(save["blocks"]), save["tokens"]) == ([1, 2, 3], 40)
    with pytest.raises(TransferError, match="already"):
        driver.core.begin_save(handle)
    list(driver.run())
    assert held(driver) == 3
    driver.core.transfer_ended(save["transfer"], True)
    driver.schedule()
    assert held(driver) == 0


def test_held_sequence_is_kept_until_released() -> None:
    driver = Driver()
    handle = driver.core.add(IDS, max_new_tokens=1, hold=True)[0]
    driver.step()
    assert driver.core.info(handle)["status"] == "handover"
    assert held(driver) == 3
    assert driver.core.release(handle)
    driver.schedule()
    assert held(driver) == 0
    assert not driver.core.release(handle)


def test_refusals_name_the_reason() -> None:
    driver = Driver()
    running = driver.core.add(IDS, max_new_tokens=5)[0]
    waits = driver.core.add(IDS, max_new_tokens=5, wait_kv=True)[0]
    driver.step()
    for tokens in (0, 40):
        with pytest.raises(TransferError, match="between 1 and 39"):
            driver.core.begin_load(waits, tokens)
    with pytest.raises(TransferError, match="status"):
        driver.core.begin_load(running, 16)
    with pytest.raises(TransferError, match="ended"):
        driver.core.begin_save(running + (1 << 40))
    with pytest.raises(InvalidRequestError, match="n > 1"):
        driver.core.add(IDS, max_new_tokens=5, wait_kv=True, n=2)
