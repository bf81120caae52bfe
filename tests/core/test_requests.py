"""Requests through the binding: token containers, refusals, the life of a sequence, and what can be asked about it."""

from __future__ import annotations

import array
from typing import Any

import numpy as np
import pytest

from core_driver import EOS, VOCAB, Driver, prompt
from deepinfer.errors import (
    EmptyPromptError,
    InvalidRequestError,
    PromptTooLongError,
    StepOrderError,
    TokenOutOfRangeError,
)

IDS = prompt(20)


@pytest.mark.parametrize(
    "tokens",
    [
        IDS,
        tuple(IDS),
        range(10, 30),
        array.array("i", IDS),
        array.array("I", IDS),
        np.array(IDS, np.int32),
        np.array(IDS, np.uint32),
        np.array(IDS, np.int64),
        np.array([IDS, IDS], np.int32)[0],
    ],
    ids=["list", "tuple", "range", "array-i", "array-I", "int32", "uint32", "int64", "row"],
)
def test_token_containers(tokens: Any) -> None:
    driver = Driver()
    handle = driver.core.add(tokens, max_new_tokens=4)[0]
    slot = driver.schedule()
    assert driver.ring[slot]["ids"][:20].tolist() == list(tokens)
    assert list(driver.core.history(handle) or ()) == list(tokens)


@pytest.mark.parametrize(
    ("tokens", "settings", "error", "said"),
    [
        ([], {}, EmptyPromptError, "empty"),
        (np.array([], np.int32), {}, EmptyPromptError, "empty"),
        ([5, -1], {}, TokenOutOfRangeError, "-1"),
        (np.array([5, -7], np.int64), {}, TokenOutOfRangeError, "-7"),
        (np.array([5, -7], np.int32), {}, TokenOutOfRangeError, "-7"),
        ([5, VOCAB], {}, TokenOutOfRangeError, f"{VOCAB}"),
        ([5, 1 << 40], {}, TokenOutOfRangeError, f"{1 << 40}"),
        ([5], {"eos_ids": [VOCAB]}, TokenOutOfRangeError, f"{VOCAB}"),
        (prompt(128), {}, PromptTooLongError, "at most 127"),
        ([5], {"max_new_tokens": 0}, InvalidRequestError, "max_tokens is 0"),
        ([5], {"min_new_tokens": 5}, InvalidRequestError, "min_tokens"),
        ([5], {"n": 0}, InvalidRequestError, "n is 0"),
        ([5], {"n": 2**32 - 1}, InvalidRequestError, "n is above 16384"),
    ],
)
def test_bad_request_is_refused_and_nothing_else_is_lost(tokens: Any, settings: dict[str, Any], error: type[Exception], said: str) -> None:
    driver = Driver()
    good = driver.core.add(IDS, max_new_tokens=3)[0]
    driver.step()
    with pytest.raises(error, match=said):
        driver.core.add(tokens, **({"max_new_tokens": 4} | settings))
    ended = [row for row in driver.run() if row[5]]
    assert [row[1] << 32 | row[0] for row in ended] == [good]
    driver.check_counts()


def test_request_larger_than_the_pool_is_refused() -> None:
    driver = Driver(max_model_len=1024)  # 32 blocks of 16
    with pytest.raises(PromptTooLongError, match="33 KV blocks and the whole pool has 32"):
        driver.core.add(prompt(500), max_new_tokens=29)
    assert driver.core.add(prompt(500), max_new_tokens=13)


def test_largest_numbers_mean_the_longest_answer() -> None:
    driver = Driver()
    driver.core.add(IDS, max_new_tokens=2**32 - 1, min_new_tokens=2**32 - 1, eos_ids=[EOS])
    rows = list(driver.run())
    assert len(rows) == 128 - len(IDS) and rows[-1][5] == 2  # length
    driver.check_counts()


@pytest.mark.parametrize("tokens", ["text", 5, None, [1.5], ["a"], {"a": 1}])
def test_what_is_no_token_sequence_is_a_type_error(tokens: Any) -> None:
    with pytest.raises(TypeError):
        Driver().core.add(tokens, max_new_tokens=1)


def test_life_of_a_sequence() -> None:
    driver = Driver()
    core = driver.core
    handle = core.add(IDS, max_new_tokens=3, eos_ids=[EOS], user=77)[0]
    assert core.has_work()
    rows = driver.step()
    info = core.info(handle)
    assert rows == [[handle & 0xFFFFFFFF, handle >> 32, info["state_slot"], 10 + 20, 1, 0, 2, 0]]
    assert list(core.notify()) == []  # neither streaming nor finished
    assert (info["status"], info["finish"], info["prompt_tokens"], info["output_tokens"]) == ("running", None, 20, 1)
    assert (info["computed_tokens"], info["cached_tokens"], info["user"]) == (20, 0, 77)
    assert 0 < info["arrived_ns"] <= info["admitted_ns"] < info["first_token_ns"]
    driver.step()
    rows = driver.step()
    assert rows is not None and rows[0][5] == 2  # length
    assert list(core.notify()) == [0]
    assert list(core.output_tokens(handle)) == [30, 31, 32]
    assert list(core.history(handle)) == [*IDS, 30, 31, 32]
    assert core.info(handle)["finish"] == "length"
    assert driver.step() is None
    driver.check_counts()
    held = core.counts()["groups"][0]["held"]
    assert held == 0


def test_stop_id_ends_with_stop() -> None:
    driver = Driver(rule=lambda _seq, position: EOS if position == 22 else 50)
    handle = driver.core.add(IDS, max_new_tokens=30, eos_ids=[EOS])[0]
    *_, last = driver.run()
    assert last[5] == 1
    assert list(driver.core.output_tokens(handle)) == [50, 50, EOS]


def test_ignore_eos_goes_on() -> None:
    driver = Driver(rule=lambda _seq, _position: EOS)
    driver.core.add(IDS, max_new_tokens=5, eos_ids=[EOS], ignore_eos=True)
    assert [row[5] for row in driver.run()] == [0, 0, 0, 0, 2]


def test_streaming_rows_are_notified() -> None:
    driver = Driver()
    driver.core.add(IDS, max_new_tokens=3, stream=True)
    seen = []
    while driver.step() is not None:
        seen.append(list(driver.core.notify()))
    assert seen == [[0], [0], [0]]


def test_abort_returns_everything_and_is_told_once() -> None:
    driver = Driver()
    handles = [driver.core.add(IDS, max_new_tokens=50)[0] for _ in range(6)]  # two of them wait
    driver.step()
    for handle in handles:
        driver.core.abort(handle)
    told = []
    rows = driver.step()
    if rows is None:
        assert driver.core.flush() >= 0
        rows = np.asarray(driver.core.outputs()).reshape(-1, 8).tolist()
    told += rows
    assert sorted(row[1] << 32 | row[0] for row in told if row[5] == 3) == sorted(handles)
    assert driver.step() is None
    assert driver.core.counts()["groups"][0]["held"] == 0
    driver.check_counts()


def test_stale_handle_names_nothing() -> None:
    driver = Driver()
    handle = driver.core.add(IDS, max_new_tokens=1)[0]
    list(driver.run())
    driver.core.flush()
    second = driver.core.add(IDS, max_new_tokens=5)[0]
    driver.step()
    assert second != handle
    assert driver.core.info(handle) is None
    assert driver.core.output_tokens(handle) is None
    assert driver.core.history(handle) is None
    driver.core.abort(handle)
    driver.core.stop_at(handle, 1)
    before = driver.core.stats()["stale"]
    driver.step()
    assert driver.core.stats()["stale"] == before + 2
    assert driver.core.info(second)["finish"] is None


def test_stop_at_cuts_the_answer() -> None:
    driver = Driver()
    handle = driver.core.add(IDS, max_new_tokens=50, stream=True)[0]
    for _ in range(5):
        driver.step()
    driver.core.stop_at(handle, 3)
    rows = driver.step()
    if rows is None:
        driver.core.flush()
    assert list(driver.core.output_tokens(handle)) == [30, 31, 32]
    assert driver.core.info(handle)["finish"] == "stop"
    with pytest.raises(ValueError, match="reason"):
        driver.core.stop_at(handle, 3, "because")


def test_second_request_hits_the_first_ones_blocks() -> None:
    driver = Driver()
    long = prompt(60)
    driver.core.add(long, max_new_tokens=4)
    list(driver.run())
    second = driver.core.add(long, max_new_tokens=4)[0]
    driver.step()
    assert driver.core.info(second)["cached_tokens"] == 48
    other = driver.core.add(long, max_new_tokens=4, salt=b"tenant")[0]
    image = driver.core.add(long, max_new_tokens=4, extras=[("image", 3, b"sha")])[0]
    driver.step()
    assert driver.core.info(other)["cached_tokens"] == 0
    assert driver.core.info(image)["cached_tokens"] == 0
    with pytest.raises(ValueError, match="extra kind"):
        driver.core.add(long, max_new_tokens=4, extras=[("video", 3, b"sha")])


def test_forks_share_the_prompt() -> None:
    driver = Driver(rule=lambda seq, position: 10 + (seq + position) % 500)
    handles = driver.core.add(IDS, max_new_tokens=4, n=3)
    assert len(set(handles)) == 3
    ended = {}
    for row in driver.run():
        handle = row[1] << 32 | row[0]
        if row[5]:
            ended[handle] = list(driver.core.output_tokens(handle))
    assert ended == {h: [10 + (h + position) % 500 for position in range(20, 24)] for h in handles}
    assert driver.core.stats()["prefill_tokens"] < 2 * 20  # the prompt was computed once, but for the tail
    driver.check_counts()


def test_grammar_holds_a_sequence_back() -> None:
    driver = Driver()
    ready = driver.core.add(IDS, max_new_tokens=2, grammar=True)[0]
    failed = driver.core.add(IDS, max_new_tokens=2, grammar=True)[0]
    assert driver.schedule() == -1
    assert driver.core.info(ready)["status"] == "wait_grammar"
    driver.core.grammar_ready(ready, True)
    driver.core.grammar_ready(failed, False)
    finishes = {row[1] << 32 | row[0]: row[5] for row in driver.run() if row[5]}
    assert finishes == {ready: 2, failed: 4}


def test_failed_step_ends_its_sequences_only() -> None:
    driver = Driver(max_num_seqs=2)
    first = [driver.core.add(IDS, max_new_tokens=5)[0] for _ in range(2)]
    waiting = driver.core.add(prompt(10), max_new_tokens=5)[0]
    slot = driver.schedule()
    rows = driver.core.fail_step(slot)
    out = np.asarray(driver.core.outputs()).reshape(-1, 8)[:rows].tolist()
    assert {row[1] << 32 | row[0]: row[5] for row in out} == dict.fromkeys(first, 4)
    ended = {row[1] << 32 | row[0]: row[5] for row in driver.run() if row[5]}
    assert ended == {waiting: 2}
    driver.check_counts()


def test_calls_out_of_order_are_refused() -> None:
    driver = Driver()
    driver.core.add(IDS, max_new_tokens=5)
    with pytest.raises(StepOrderError):
        driver.core.complete(0, 1)
    slot = driver.schedule()
    with pytest.raises(StepOrderError, match="in flight"):
        driver.core.schedule(2)
    with pytest.raises(StepOrderError):
        driver.core.complete((slot + 1) % 3, 2)
    with pytest.raises(StepOrderError):
        driver.core.complete(99, 2)
    driver.sample(slot)
    assert len(driver.complete(slot)) == 1
    with pytest.raises(StepOrderError):
        driver.core.complete(slot, 3)


def test_dummy_step_touches_the_null_page_only() -> None:
    driver = Driver()
    slot = driver.core.plan_dummy(1)
    f = driver.ring[slot]
    header = f["header"].tolist()
    assert (header[0], header[3], header[4], header[6], header[7]) == (4, 1, 1, 0, 0)
    assert (f["pos"][0], f["state_row"][0], f["cu_q"][:2].tolist()) == (0, 0, [0, 1])
    assert f["slots0"][0] < 16  # page 0, or nothing at all
    assert driver.core.complete(slot, 2) == 0


def test_events_tell_what_entered_the_index() -> None:
    driver = Driver(event_capacity=100)
    driver.core.add(prompt(40), max_new_tokens=4)
    list(driver.run())
    events = driver.core.drain_events()
    assert [event[0] for event in events] == ["stored", "stored"]
    (_, first, root, namespace), (_, second, parent, _) = events
    assert all(isinstance(h, bytes) and len(h) == 16 for h in (first, second, root))
    assert (parent, root) == (first, namespace)
    assert driver.core.drain_events() == []


def test_outputs_outlive_the_step() -> None:
    driver = Driver()
    driver.core.add(IDS, max_new_tokens=3)
    driver.step()
    kept = driver.core.outputs()
    words = list(kept)
    driver.step()
    assert kept.readonly and kept.format == "i" and list(kept) == words


def test_drafts_are_verified() -> None:
    driver = Driver(max_draft=2)
    handle = driver.core.add(IDS, max_new_tokens=10)[0]
    driver.step()
    assert driver.core.propose(handle, [31, 99])
    slot = driver.schedule()
    f = driver.ring[slot]
    assert int(f["header"][3]) == 3
    assert f["ids"][:3].tolist() == [30, 31, 99]
    f["tokens"][:2] = [31, 32]
    f["accepted"][0] = 2
    rows = driver.complete(slot)
    assert rows[0][3:5] == [31, 2]
    assert list(driver.core.output_tokens(handle)) == [30, 31, 32]
    assert not driver.core.propose(handle + (1 << 32), [31])
