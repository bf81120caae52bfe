"""The edge: a panic stops the core and not the process, a closed core says so, and the interpreter lock is let go of."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from core_driver import Driver, prompt
from deepinfer import _core
from deepinfer.errors import DeepInferError, EngineDeadError

CALLS: dict[str, Callable[[_core.Core], object]] = {
    "schedule": lambda core: core.schedule(1),
    "set_vote": lambda core: core.set_vote(None),
    "fail_group": lambda core: core.fail_group(),
    "is_group_asleep": lambda core: core.is_group_asleep(),
    "plan_dummy": lambda core: core.plan_dummy(1),
    "complete": lambda core: core.complete(0, 1),
    "fail_step": lambda core: core.fail_step(0),
    "flush": lambda core: core.flush(),
    "add": lambda core: core.add([1], max_new_tokens=1),
    "abort": lambda core: core.abort(1),
    "stop_at": lambda core: core.stop_at(1, 1),
    "grammar_ready": lambda core: core.grammar_ready(1, True),
    "propose": lambda core: core.propose(1, [1]),
    "outputs": lambda core: core.outputs(),
    "notify": lambda core: core.notify(),
    "begin_save": lambda core: core.begin_save(1),
    "begin_load": lambda core: core.begin_load(1, 16),
    "transfer_ended": lambda core: core.transfer_ended(1, True),
    "release": lambda core: core.release(1),
    "set_rates": lambda core: core.set_rates(1.0, 1.0),
    "drain_remote_releases": lambda core: core.drain_remote_releases(),
    "next_lease_ns": lambda core: core.next_lease_ns(),
    "set_draft_budget": lambda core: core.set_draft_budget(1),
    "set_ngram": lambda core: core.set_ngram(1),
    "propose_ngram": lambda core: core.propose_ngram(),
    "output_tokens": lambda core: core.output_tokens(1),
    "history": lambda core: core.history(1),
    "info": lambda core: core.info(1),
    "counts": lambda core: core.counts(),
    "stats": lambda core: core.stats(),
    "metrics": lambda core: core.metrics(),
    "note_step_times": lambda core: core.note_step_times(1, 1, 0, 1),
    "check": lambda core: core.check(),
    "set_state_slices": lambda core: core.set_state_slices(False),
    "take_state_slices": lambda core: core.take_state_slices(),
    "note_state_slice": lambda core: core.note_state_slice(bytes(16), "host", True),
    "chain_hash": lambda core: core.chain_hash(1, 16),
    "give_up_start": lambda core: core.give_up_start(1),
    "chain": lambda core: core.chain(1),
    "begin_fetch": lambda core: core.begin_fetch(1, 16),
    "end_fetch": lambda core: core.end_fetch(1, 16),
    "end_wait": lambda core: core.end_wait(1),
    "set_saves": lambda core: core.set_saves("off"),
    "take_saves": lambda core: core.take_saves(),
    "end_save": lambda core: core.end_save(1, True),
    "has_work": lambda core: core.has_work(),
    "drain_events": lambda core: core.drain_events(),
    "layout": lambda core: core.layout(),
    "register_ring": lambda core: core.register_ring([]),
}


def test_the_table_names_every_method() -> None:
    public = {name for name in dir(_core.Core) if not name.startswith("_")}
    assert public - set(CALLS) == {"close", "inject_fault", "slot_maps", "table_columns"}


@pytest.mark.parametrize("name", CALLS)
def test_panic_stops_the_core(name: str) -> None:
    driver = Driver()
    driver.core.add(prompt(5), max_new_tokens=5)
    driver.step()
    with pytest.raises(EngineDeadError, match="after a fault: pages went missing"):
        driver.core.inject_fault("pages went missing")
    with pytest.raises(EngineDeadError, match="after a fault: pages went missing"):
        CALLS[name](driver.core)
    driver.core.close()


@pytest.mark.parametrize("name", CALLS)
def test_closed_core_says_so(name: str) -> None:
    driver = Driver()
    driver.core.close()
    driver.core.close()
    with pytest.raises(EngineDeadError, match="closed"):
        CALLS[name](driver.core)


def test_another_core_is_not_touched_by_a_fault() -> None:
    broken, sound = Driver(), Driver()
    handle = sound.core.add(prompt(5), max_new_tokens=3)[0]
    with pytest.raises(DeepInferError):
        broken.core.inject_fault("x")
    assert [row[5] for row in sound.run()] == [0, 0, 2]
    assert list(sound.core.output_tokens(handle)) == [15, 16, 17]


@pytest.fixture
def switching_often() -> Iterator[None]:
    """The interpreter lock changes hands far more often than a long call takes."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    yield
    sys.setswitchinterval(usual)


@pytest.mark.usefixtures("switching_often")
def test_threads_run_while_a_call_has_let_go_of_the_lock() -> None:
    """A long call in another thread does not stop this one: the timed loop runs 5,000 steps without the interpreter lock."""

    def counted_amid_a_call() -> int:
        driver = Driver(max_model_len=1 << 20, groups=[_core.PagedGroup(page_tokens=16, num_pages=1 << 13, sources=[(16, 64)])])
        driver.core.add(prompt(5), max_new_tokens=6000)
        call: list[float] = []

        def work() -> None:
            call.append(time.perf_counter())
            _core.bench_steps(driver.core, 5000, 1, 50, (), 0, 0)
            call.append(time.perf_counter())

        thread = threading.Thread(target=work)
        thread.start()
        passes = []
        while len(call) < 2:
            passes.append(time.perf_counter())
        thread.join()
        quarter = (call[1] - call[0]) / 4
        return sum(call[0] + quarter < at < call[1] - quarter for at in passes)

    # With the lock kept no pass falls amid a call. On a busy machine this thread may miss one call, hardly twenty.
    assert any(counted_amid_a_call() > 100 for _ in range(20))
