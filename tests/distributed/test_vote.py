"""Rank groups over torch.distributed: processes that agree on every step, and what becomes of them when one dies."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import deepinfer
from core_driver import Driver, prompt
from deepinfer import _core
from deepinfer.distributed import TorchVote
from deepinfer.errors import ConfigError, EngineDeadError, RankGroupError, StepOrderError

RANKS = 4
HERE = Path(__file__).resolve().parent


class Group:
    """Rank processes of one test."""

    def __init__(self, folder: Path, steps: int) -> None:
        self.folder = folder
        # The package under test, wherever it lies, before any other of its name.
        path = os.pathsep.join([str(Path(deepinfer.__file__).parent.parent), str(HERE.parent), *sys.path])
        self.ranks = [
            subprocess.Popen(
                [sys.executable, str(HERE / "rank.py"), str(rank), str(RANKS), str(folder), str(steps), "5"],
                env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
                cwd=folder,
                stderr=(folder / f"{rank}.err").open("w"),
            )
            for rank in range(RANKS)
        ]

    def result(self, rank: int, seconds: float) -> dict[str, Any]:
        """What a rank had made after so many steps. It goes on."""
        path = self.folder / f"{rank}.json"
        end = time.monotonic() + seconds
        while not path.is_file():
            if time.monotonic() > end or self.ranks[rank].poll() is not None:
                pytest.fail(self._errors(rank) or f"rank {rank} makes no steps")
            time.sleep(0.02)
        return json.loads(path.read_text())

    def end(self, rank: int, seconds: float) -> dict[str, Any]:
        """What a rank wrote at its end."""
        try:
            self.ranks[rank].wait(seconds)
        except subprocess.TimeoutExpired:
            pytest.fail(f"rank {rank} hangs")
        path = self.folder / f"{rank}.end.json"
        if not path.is_file():
            pytest.fail(self._errors(rank))
        return json.loads(path.read_text())

    def _errors(self, rank: int) -> str:
        return (self.folder / f"{rank}.err").read_text()[-2000:]


@contextlib.contextmanager
def running(folder: Path, steps: int) -> Iterator[Group]:
    group = Group(folder, steps)
    try:
        yield group
    finally:
        for rank in group.ranks:
            if rank.poll() is None:
                rank.kill()
            rank.wait()


@pytest.mark.parametrize(
    ("steps", "how"), [(600, signal.SIGKILL), pytest.param(2000, signal.SIGSTOP, marks=pytest.mark.nightly)], ids=["killed", "hanging"]
)
def test_four_processes_make_the_same_steps_and_report_a_lost_one_within_ten_seconds(
    tmp_path: Path, steps: int, how: signal.Signals
) -> None:
    with running(tmp_path, steps) as group:
        results = [group.result(rank, 120) for rank in range(RANKS)]
        group.ranks[1].send_signal(how)
        lost = time.time()
        ends = [group.end(rank, 20) for rank in (0, 2, 3)]
    first = results[0]
    assert len(first["kinds"]) == steps
    assert {1, 2} <= set(first["kinds"])
    assert all(r["kinds"] == first["kinds"] for r in results), "another kind of step on some rank"
    assert len({r["rounds"] for r in results}) == 1, "another number of rounds on some rank"
    assert all(r["votes"] == first["votes"] for r in results)
    assert all(r["output"] > 0 for r in results)
    for end in ends:
        assert end["noticed"] - lost < 10
        assert end["error"].startswith("rank group: contact with a rank is lost (rank ")


class Alone:
    """A vote of one rank in Python; the next answer can be replaced."""

    def __init__(self) -> None:
        self.words: list[int] | None = None
        self.answer: Any = None
        self.raises: Exception | None = None
        self.closed = 0

    def start(self, words: list[int]) -> None:
        assert self.words is None and len(words) == 8
        self.words = words

    def wait(self) -> Any:
        words, self.words = self.words, None
        if self.raises is not None:
            raise self.raises
        return words if self.answer is None else self.answer

    def close(self) -> None:
        self.closed += 1


def test_steps_of_a_group_hold_one_kind_of_rows() -> None:
    driver, vote = Driver(all_interval=2, any_interval=2), Alone()
    driver.core.set_vote(vote)
    for i in range(3):
        driver.core.add(prompt(20, i), max_new_tokens=12)
    assert driver.step() is None, "nothing is agreed before the first round"
    kinds = []
    for _ in range(60):
        slot = driver.schedule()
        if slot < 0:
            if driver.core.is_group_asleep() and not driver.core.has_work():
                break
            driver.core.flush()
            continue
        kinds.append(int(driver.ring[slot]["header"][0]))
        assert driver.ring[slot]["header"][23] == kinds[-1]
        assert driver.ring[slot]["header"][16] >= driver.ring[slot]["header"][3]
        driver.sample(slot)
        driver.complete(slot)
    assert set(kinds) == {1, 2}
    assert driver.core.stats()["finished_length"] == 3
    votes = driver.core.metrics()["votes"]
    assert (votes["prefill"], votes["decode"]) == (kinds.count(1), kinds.count(2))
    driver.core.close()
    assert vote.closed == 1


@pytest.mark.parametrize("answer", [[1] * 7, [1] * 9, None.__class__, "abcdefgh", [2**63] * 8, [1.5] * 8, [-1] * 8, [9] * 8])
def test_an_answer_that_no_group_gives_is_an_error_that_stays(answer: Any) -> None:
    driver, vote = Driver(), Alone()
    driver.core.set_vote(vote)
    handle = driver.core.add(prompt(5), max_new_tokens=3)[0]
    driver.step()
    vote.answer = answer
    for _ in range(2):
        with pytest.raises(RankGroupError, match="rank group"):
            driver.schedule()
        vote.answer = None
    driver.check_counts()
    assert driver.core.info(handle) is not None


def test_what_a_vote_raises_is_named_and_stays() -> None:
    driver, vote = Driver(), Alone()
    driver.core.set_vote(vote)
    vote.raises = OSError("the cable is cut")
    for _ in range(2):
        with pytest.raises(RankGroupError, match="the cable is cut"):
            driver.schedule()
        vote.raises = None


def test_a_failed_step_is_told_to_the_group_once() -> None:
    driver, vote = Driver(), Alone()
    driver.core.set_vote(vote)
    driver.core.add(prompt(5), max_new_tokens=30)
    driver.step()
    slot = driver.schedule()
    driver.core.fail_step(slot)
    driver.step()
    with pytest.raises(RankGroupError, match="failed on at least one rank"):
        driver.schedule()
    driver.core.add(prompt(5), max_new_tokens=3)
    assert sum(row[4] for _ in range(8) for row in driver.step() or []) == 3, "the group goes on"
    driver.core.fail_group()
    driver.step()
    with pytest.raises(RankGroupError):
        driver.step()


def test_what_cannot_be_a_group_is_refused() -> None:
    mixed = Driver(step_policy="mixed")
    with pytest.raises(ConfigError, match="step_policy"):
        mixed.core.set_vote(Alone())
    driver = Driver()
    driver.core.add(prompt(5), max_new_tokens=3)
    slot = driver.schedule()
    with pytest.raises(StepOrderError, match="in flight"):
        driver.core.set_vote(Alone())
    driver.core.fail_step(slot)
    with pytest.raises(RankGroupError, match="start"):
        driver.core.set_vote(object())
    driver.core.set_vote(Alone())
    with pytest.raises(StepOrderError, match="dummies"):
        driver.core.plan_dummy(1)
    with pytest.raises(ConfigError, match="init_process_group"):
        TorchVote()


def test_a_rank_that_does_not_come_is_a_group_error_for_those_that_wait(tmp_path: Path) -> None:
    """Two ranks meet; one of them never makes the group."""
    code = """
import sys, time
import torch.distributed as dist
from deepinfer.distributed import TorchVote
from deepinfer.errors import RankGroupError
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}/meet", rank=rank, world_size=2)
try:
    if rank == 0:
        TorchVote(timeout_s=0.5)
    else:
        sys.stdin.read()  # stays until the other has given up
except RankGroupError as error:
    print(error)
"""
    path = os.pathsep.join([str(Path(deepinfer.__file__).parent.parent), *sys.path])
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(rank), str(tmp_path)],
            env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        told = ranks[0].communicate(timeout=60)[0]
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    assert "met not every rank within 0.5 s" in told


def test_other_threads_may_ask_the_core_while_a_round_waits() -> None:
    """A round needs the interpreter while the core is in use: whoever asks the core meanwhile must not hold it."""
    import threading

    driver = Driver()
    inside, go = threading.Event(), threading.Event()

    class Slow(Alone):
        def wait(self) -> Any:
            inside.set()
            assert go.wait(20)
            return super().wait()

    driver.core.set_vote(Slow())
    stepping = threading.Thread(target=driver.schedule)
    stepping.start()
    assert inside.wait(20)
    asking = threading.Thread(target=driver.core.stats)
    asking.start()
    time.sleep(0.05)
    go.set()
    stepping.join(20)
    asking.join(20)
    assert not stepping.is_alive() and not asking.is_alive()
    driver.core.close()
    with pytest.raises(EngineDeadError):
        driver.core.set_vote(Alone())
    assert _core.VOTE_WORDS == 8


WITHIN = """
import gc, sys, threading
from core_driver import Driver, prompt
from deepinfer.errors import StepOrderError

class Vote:
    calls, refused, core = [], [], None
    def start(self, words): self.words = words
    def wait(self):
        for call in self.calls:
            try:
                call()
            except StepOrderError as e:
                self.refused.append("called the core" in str(e))
        gc.collect()  # whoever is a cycle ends here, with the scheduler in this thread's hands
        return self.words
    def close(self): pass

class Ends:
    said = []
    def __init__(self, core):
        self.core, self.me = core, self
    def __del__(self):
        try:
            self.core.stats()
        except StepOrderError as e:
            self.said.append(str(e))
        self.core.abort(2**40)  # what only posts a message may be called

driver, vote = Driver(), Vote()
core = driver.core
core.set_vote(vote)
handle = core.add(prompt(5), max_new_tokens=3)[0]
vote.calls = [core.stats, core.counts, core.check, core.metrics, core.close, core.flush]
vote.calls += [lambda: core.schedule(1), lambda: core.complete(0, 1), lambda: core.release(handle)]
vote.calls += [lambda: core.info(handle), lambda: core.set_vote(Vote())]
Ends(core)
gc.disable()
made = sum(row[4] for _ in range(2) for row in driver.step() or [])
print(len(vote.refused) >= len(vote.calls) and all(vote.refused), len(Ends.said), flush=True)
vote.calls = []
made += sum(row[4] for _ in range(8) for row in driver.step() or [])
print(made, core.check(), flush=True)

# Closing from another thread waits for the round without keeping the interpreter from it.
inside, go = threading.Event(), threading.Event()
vote.calls = [inside.set, lambda: go.wait(20)]
core.add(prompt(5), max_new_tokens=3)
stepping = threading.Thread(target=driver.step)
stepping.start()
assert inside.wait(20)
closing = threading.Thread(target=core.close)
closing.start()
closing.join(0.1)
go.set()
stepping.join(20), closing.join(20)
print(stepping.is_alive(), closing.is_alive(), flush=True)
"""


def test_a_round_that_calls_its_own_core_is_told_and_waits_for_nothing() -> None:
    """Also a finalizer that happens to run in it; and another thread that closes the core meanwhile."""
    path = os.pathsep.join([str(Path(deepinfer.__file__).parent.parent), str(HERE.parent), *sys.path])
    ran = subprocess.run(
        [sys.executable, "-c", WITHIN], env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=60, check=False
    )
    assert ran.stdout.split("\n")[:3] == ["True 1", "3 None", "False False"], ran.stdout + ran.stderr[-2000:]
