"""Engine types and swap rates as Python sees them."""

from __future__ import annotations

import numpy as np
import pytest

from core_driver import VOCAB, Driver, make_config, prompt
from deepinfer import _core
from deepinfer.errors import ConfigError, InvalidRequestError, TokenOutOfRangeError

IDS = prompt(40)


def test_a_prompt_engine_hands_over_and_its_lease_says_when_to_come_back() -> None:
    driver = Driver(engine_type="prompt", handover_lease_ns=5000)
    handle = driver.core.add(IDS, max_new_tokens=3)[0]
    rows = driver.step()
    assert [row[5] for row in rows] == [5]
    info = driver.core.info(handle)
    assert info is not None
    assert (info["status"], info["finish"], info["output_tokens"]) == ("handover", "handover", 1)
    assert driver.core.next_lease_ns() == driver.now + 5000
    assert driver.core.release(handle) and not driver.core.release(handle)
    assert driver.core.next_lease_ns() is None
    assert driver.core.stats()["finished_handover"] == 1
    with pytest.raises(InvalidRequestError, match="n > 1"):
        driver.core.add(IDS, max_new_tokens=3, n=2)


def test_produced_tokens_count_as_output() -> None:
    driver = Driver()
    handle = driver.core.add(IDS, max_new_tokens=4, produced=3)[0]
    driver.step()
    info = driver.core.info(handle)
    assert info is not None
    assert (info["prompt_tokens"], info["output_tokens"], info["finish"]) == (37, 4, "length")
    assert np.asarray(driver.core.output_tokens(handle)).tolist()[:3] == IDS[37:]


def test_whoever_is_turned_away_is_released_too() -> None:
    driver = Driver(engine_type="completion")
    handle = driver.core.add(IDS, max_new_tokens=3, produced=1, wait_kv=True, user=1)[0]
    with pytest.raises(InvalidRequestError, match="completion"):
        driver.core.add(IDS, max_new_tokens=3, user=2)
    with pytest.raises(InvalidRequestError, match="produced"):
        driver.core.add(IDS, max_new_tokens=3, produced=3, wait_kv=True, user=3)
    for number, wrong in enumerate(([VOCAB], [-1], [1 << 40]), start=4):
        with pytest.raises(TokenOutOfRangeError):
            driver.core.add(wrong, max_new_tokens=3, wait_kv=True, user=number)
    with pytest.raises(TypeError):
        driver.core.add("text", max_new_tokens=3, wait_kv=True, user=7)
    driver.schedule()
    driver.core.abort(handle)
    driver.schedule()
    assert driver.core.drain_remote_releases() == [(handle, 1), (0, 3), (0, 4), (0, 5), (0, 6), (0, 7)]
    assert driver.core.drain_remote_releases() == []


def test_rates_choose_who_is_swapped_and_counts_show_where() -> None:
    made: dict[bool, list[int]] = {}
    for swaps in (False, True):
        groups = [_core.PagedGroup(page_tokens=16, num_pages=9, sources=[(16, 64)])]
        driver = Driver(groups=groups, host_blocks=16, host_slots=2, headroom_tokens=0)
        driver.core.set_rates(1e12 if swaps else 1, 1 if swaps else 1e12)
        for i in range(3):
            driver.core.add(prompt(40, start=i), max_new_tokens=30)
        most = 0
        rows = []
        for row in driver.run():
            rows.append(row[3])
            counts = driver.core.counts()
            most = max(most, counts["host_blocks"]["held"])
            assert counts["host_blocks"]["total"] == 17 and counts["host_slots"]["held"] == 0
        stats = driver.core.stats()
        assert stats["preemptions"] > 0
        assert (stats["swapped_out"] > 0, stats["swapped_in"] > 0, most > 0) == (swaps,) * 3
        assert driver.core.check() is None and driver.core.counts()["host_blocks"]["held"] == 0
        made[swaps] = sorted(rows)
    assert made[False] == made[True]


def test_settings_are_named_when_they_cannot_be() -> None:
    with pytest.raises(ConfigError, match="engine_type"):
        make_config(engine_type="decode")  # type: ignore[arg-type, unused-ignore]
    with pytest.raises(ConfigError, match="host_blocks"):
        _core.Core(make_config(host_blocks=1 << 31))
    config = make_config(engine_type="prompt", host_blocks=3, host_slots=1)
    assert (config.engine_type, config.host_blocks, config.host_slots) == ("prompt", 3, 1)
