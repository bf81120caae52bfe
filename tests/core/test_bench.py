"""The timed loops do what they claim, and the command prints the rows that are asked of it."""

from __future__ import annotations

import argparse
import json

import pytest

from core_driver import Driver, prompt
from deepinfer import _core
from deepinfer.cli import bench_scheduler
from deepinfer.errors import ConfigError


def test_timed_loop_makes_the_steps_that_python_makes() -> None:
    timed, driven = Driver(rule=lambda _s, _p: 50), Driver(rule=lambda _s, _p: 50)
    handles = [d.core.add(prompt(20), max_new_tokens=30)[0] for d in (timed, driven)]
    samples = _core.bench_steps(timed.core, 10, 0, 50, (), 0, 0)
    for _ in range(10):
        driven.step()
    assert len(samples) == 10 and all(0 < ns < 10**9 for ns in samples)
    histories = [list(d.core.history(h) or ()) for d, h in zip((timed, driven), handles, strict=True)]
    assert histories[0] == histories[1] == prompt(20) + [50] * 10
    assert timed.core.stats()["decode_steps"] == driven.core.stats()["decode_steps"] == 9


def test_timed_loop_ends_when_nothing_is_left() -> None:
    driver = Driver()
    driver.core.add(prompt(20), max_new_tokens=3)
    assert len(_core.bench_steps(driver.core, 10, 0, 50, (), 0, 0)) == 3


def test_timed_loop_replaces_what_ended() -> None:
    driver = Driver()
    driver.core.add(prompt(20), max_new_tokens=3)
    assert len(_core.bench_steps(driver.core, 30, 0, 50, prompt(16), 24, 3)) == 30
    assert driver.core.stats()["added"] == 10  # the eleventh is queued and not seen yet
    assert driver.core.stats()["hit_tokens"] == 16 * 9
    driver.check_counts()


def test_matched_chain_must_fit_the_pool() -> None:
    assert len(_core.bench_prefix_match(1024, 64, 50, 7)) == 7
    with pytest.raises(ConfigError, match="pool"):
        _core.bench_prefix_match(64, 16, 3, 1)
    with pytest.raises(ConfigError, match="pool"):
        _core.bench_prefix_match(8, 16, 3, 1)
    assert len(_core.bench_chain_hash(1000, 64, 3)) == 3


def test_sizes_that_would_take_all_memory_are_refused() -> None:
    driver = Driver()
    for call in (
        lambda: _core.bench_chain_hash(2**62, 64, 1),
        lambda: _core.bench_chain_hash(64, 64, 2**62),
        lambda: _core.bench_prefix_match(64, 64, 2**32 - 1, 1),
        lambda: _core.bench_prefix_match(64, 64, 4, 2**62),
        lambda: _core.bench_steps(driver.core, 1, 0, 50, (), 2**62, 2),
        lambda: _core.bench_steps(driver.core, 2**62, 0, 50, (), 0, 2),
    ):
        with pytest.raises(ConfigError, match="at most"):
            call()
    driver.core.add(prompt(20), max_new_tokens=3)
    assert len(_core.bench_steps(driver.core, 9, 2**64 - 1, 50, (), 0, 0)) == 3


def test_command_prints_every_row(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    bench_scheduler.add_arguments(parser)
    args = parser.parse_args(["--json", "--runs", "1", "--steps", "40", "--num-seqs", "4", "--block", "16"])
    assert bench_scheduler.run(args) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["machine"] and printed["load"] >= 0 and "schedule" in printed["counted"]
    rows = printed["rows"]
    assert [row["case"] for row in rows] == [*bench_scheduler.CASES, "prefix_match", "prefix_match"]
    assert rows[0].keys() >= {"num_seqs", "block", "python_us_median", "python_us_p99", "rust_us_median", "rust_us_p99"}
    assert (rows[0]["num_seqs"], rows[0]["block"]) == (4, 16)
    by_case = {row["case"]: row for row in rows}
    assert by_case["tight_pool"]["preemptions_per_step"] > 0
    assert by_case["preemption_storm"]["preempted"] > 1
    assert by_case["abort_storm"]["aborted"] == 256 + 4096
    assert by_case["drafts_6"]["rows_per_step"] == 6 * 256
    assert by_case["prompts_64k"]["prompt_rows_per_step"] > 7000
    assert all(value > 0 for row in rows for key, value in row.items() if key.endswith("_us_median"))
