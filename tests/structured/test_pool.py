"""The processes that compile: limits, kills, replacements, and that none of them outlives its parent."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

import grammar_kit
from deepinfer import StructuredOutputs
from deepinfer.errors import GrammarBusyError, GrammarError, GrammarTimeoutError
from deepinfer.structured.compiler import Compiler, clean
from deepinfer.structured.pool import CompilerPool, _late, worker_count
from deepinfer.structured.service import GrammarService
from process_kit import gone

HOSTILE = grammar_kit.hostile()
HARD = "json_schema: anyOf nested 2,000 deep"  # more than anybody waits for
# Each within seconds: taken whatever it looks like, malformed, out of time, out of memory.
SOME = {
    "json_schema: enum of 1,000": "fine",
    "json_schema: 2^30 ways by reference": "fine",
    "json_schema: a huge range": "fine",
    "json_schema: NUL in an enum": "fine",
    "json_schema: references in a circle": "malformed",
    "json_schema: pattern never closed": "malformed",
    "json_schema: a lone surrogate": "malformed",
    "json_schema: an integer beyond 64 bits": "malformed",
    "json_schema: minimum above maximum": "malformed",
    "regex: a back-reference": "malformed",
    "regex: 20,000 nested parentheses": "malformed",
    "regex: nested pluses": "fine",
    "grammar: 3,000 optional ones and as many": "too much",
    "grammar: 50,000 nested parentheses": "malformed",
    "grammar: an undefined rule": "malformed",
    "grammar: left recursion": "fine",
    "structural_tag: unknown format": "malformed",
    HARD: "too much",
}


def outcome(future: Future[Any]) -> str:
    """What became of a compilation."""
    try:
        assert future.result(60).data
    except GrammarTimeoutError as e:
        assert "make it" in str(e)
        return "too much"
    except GrammarError as e:
        assert str(e) and ".cc:" not in str(e) and "/project/" not in str(e) and "\n" not in str(e)
        return "malformed"
    return "fine"


def options(kind: str) -> dict[str, Any]:
    return {"any_order": False} if kind == "json_schema" else {}


@grammar_kit.despite_load
def test_hostile_inputs_end_within_their_limits() -> None:
    """Past the screen, straight to the processes."""
    pool = CompilerPool(grammar_kit.vocabulary(), 1, 4.0, 1 << 30)
    try:
        found = {}
        for name in SOME:
            kind, source = HOSTILE[name]
            found[name] = outcome(pool.submit(kind, source, options(kind)).future)
        assert found == SOME
        assert pool.counts()["killed"] >= 1 and pool.counts()["queued"] == 0
    finally:
        pool.close()
    assert pool.pids() == []


def test_a_grammar_that_has_no_room_once_it_is_compiled_says_so() -> None:
    """Its text is larger than it is: memory may run out when it is to be handed over."""

    class Compiled:
        def serialize_json(self) -> str:
            raise RuntimeError("std::bad_alloc")

    compiler = Compiler(grammar_kit.vocabulary())
    with (
        patch.object(compiler, "_made", lambda *_: Compiled()),
        patch.object(compiler, "_first_mask", lambda _: None),
        pytest.raises(GrammarTimeoutError, match="too much memory; make it smaller"),
    ):
        compiler.compile("regex", "a", {})
    assert compiler.compile("regex", "a", {}).data


def test_memory_is_limited() -> None:
    pool = CompilerPool(grammar_kit.vocabulary(), 1, 60.0, 100 << 20)
    try:
        kind, source = HOSTILE["grammar: a chain of 200,000 rules"]
        with pytest.raises(GrammarTimeoutError, match=r"memory|ended its process"):
            pool.submit(kind, source, {}).future.result(60)
        assert outcome(pool.submit("regex", "a", {}).future) == "fine"
    finally:
        pool.close()


@pytest.mark.nightly
@pytest.mark.parametrize("screened", [True, False], ids=["screened", "straight"])
def test_every_hostile_input_ends(screened: bool) -> None:
    """All of them, under the limits that hold in use, through the screen and past it."""
    with grammar_kit.service(2, 20.0) as service:
        pool = CompilerPool(grammar_kit.vocabulary(), 2, 20.0)
        try:
            for name, (kind, source) in HOSTILE.items():
                start = time.monotonic()
                if not screened:
                    result = outcome(pool.submit(kind, source, options(kind)).future)
                else:
                    field = "json" if kind == "json_schema" else kind
                    try:
                        service.compile(StructuredOutputs(**{field: source}))
                        result = "fine"
                    except GrammarError as e:
                        result = type(e).__name__
                took = time.monotonic() - start
                assert took < 90, (name, result, took)  # with a process to be started before, on a busy machine
                print(f"{name}: {result} in {took:.2f} s")
            assert outcome(pool.submit("regex", "a", {}).future) == "fine"
        finally:
            pool.close()


@grammar_kit.despite_load
def test_valid_malformed_hostile_valid_in_one_process() -> None:
    with grammar_kit.service(1, 3.0) as service:
        assert grammar_kit.accepts(service.compile(StructuredOutputs(json={"type": "integer"})), 5)
        first = service.worker_pids()
        with pytest.raises(GrammarError, match="not closed"):
            service.compile(StructuredOutputs(regex="(a"))
        assert service.worker_pids() == first, "what is malformed costs no process"
        start = time.monotonic()
        with pytest.raises(GrammarTimeoutError, match="more than 3 s"):
            service.compile(StructuredOutputs(**grammar_kit.ENDLESS))
        assert 3 <= time.monotonic() - start < 20
        start = time.monotonic()
        with pytest.raises(GrammarTimeoutError, match="more than 3 s"):  # at once this time
            service.compile(StructuredOutputs(**grammar_kit.ENDLESS))
        assert time.monotonic() - start < 1
        assert grammar_kit.accepts(service.compile(StructuredOutputs(choice=["a"])), "a")
        assert service.worker_pids() != first
        stats = service.stats()
        assert (stats["compiles"], stats["failures"], stats["timeouts"], stats["refused_again"]) == (2, 1, 1, 1)
        assert (stats["workers_started"], stats["workers_killed"]) == (2, 1)


def running(pool: CompilerPool, queued: int, seconds: float = 30.0) -> int:
    """The process that compiles now, so many others waiting; waits until one does."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for pid in pool.pids():
            with open(f"/proc/{pid}/stat", encoding="ascii") as f:
                fields = f.read().rsplit(")", 1)[1].split()
            if fields[0] == "R" and int(fields[11]) > 20 and pool.counts()["queued"] == queued:
                return pid
        time.sleep(0.02)
    raise AssertionError("nothing runs")


def test_a_process_killed_in_the_middle_costs_that_compilation_only() -> None:
    pool = CompilerPool(grammar_kit.vocabulary(), 1, 60.0)
    try:
        assert outcome(pool.submit("regex", "a", {}).future) == "fine"
        hard, behind = pool.submit(*HOSTILE[HARD], options("json_schema")), pool.submit("regex", "b", {})
        pids = []
        for _ in range(2):  # once may be chance
            while not hard.begun:
                assert not hard.future.done()
                time.sleep(0.01)
            pids.append(running(pool, 1))
            os.kill(pids[-1], signal.SIGKILL)
            assert gone(pids[-1], 5)
        with pytest.raises(GrammarTimeoutError, match="SIGKILL"):
            hard.future.result(30)
        assert outcome(behind.future) == "fine" and len(set(pids)) == 2 and not set(pids) & set(pool.pids())
    finally:
        pool.close()


def test_a_process_killed_while_it_had_nothing_to_do_is_nobodys_fault() -> None:
    with grammar_kit.service(1, 20.0) as service:
        service.compile(StructuredOutputs(regex="a"))
        (pid,) = service.worker_pids()
        os.kill(pid, signal.SIGSTOP)  # so that it is there when the next task is given to it
        killing = threading.Timer(0.3, os.kill, (pid, signal.SIGKILL))
        killing.start()
        assert grammar_kit.accepts(service.compile(StructuredOutputs(regex="b")), "b")
        killing.join()
        assert service.stats()["timeouts"] == 0 and pid not in service.worker_pids()


def test_a_process_killed_while_it_starts_is_nobodys_fault() -> None:
    with grammar_kit.service(1, 20.0) as service:
        asked = threading.Thread(target=kill_first, args=(service,))
        asked.start()
        with pytest.raises(GrammarBusyError, match="while it started"):
            service.compile(StructuredOutputs(regex="a"))
        asked.join()
        assert grammar_kit.accepts(service.compile(StructuredOutputs(regex="a")), "a")


def kill_first(service: GrammarService) -> None:
    """Kills the first process that there is."""
    while not (pids := service.worker_pids()):
        time.sleep(0.001)
    os.kill(pids[0], signal.SIGKILL)


def test_a_process_that_gets_no_processor_is_not_its_grammars_fault() -> None:
    with grammar_kit.service(1, 2.0) as service:
        service.compile(StructuredOutputs(regex="a"))
        (pid,) = service.worker_pids()
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(GrammarBusyError, match="this machine is busy; try again"):
            service.compile(StructuredOutputs(regex="b"))
        assert gone(pid, 5)
        assert grammar_kit.accepts(service.compile(StructuredOutputs(regex="b")), "b"), "it is tried again, not refused for a while"
        assert (service.stats()["timeouts"], service.stats()["starved"]) == (0, 1)


@pytest.mark.skipif(sys.platform != "linux", reason="the system does not say what a process has worked")
def test_a_compilation_that_waited_more_than_it_ran_may_be_a_good_one() -> None:
    assert type(_late(4.0, 1.9)) is GrammarBusyError and "1.9 s of a processor in 4 s" in str(_late(4.0, 1.9))
    assert type(_late(4.0, 2.0)) is GrammarTimeoutError and "more than 4 s" in str(_late(4.0, 2.0))


def test_messages_are_without_places_in_the_compilers_source() -> None:
    said = (
        "[12:00:00] /project/cpp/json.cc:12: Failed to parse JSON: [12:00:01] /project/cpp/support/guard.h:36: Check failed: (error == "
        "std::nullopt) is false: RecursionGuard: Maximum recursion depth exceeded.\n"
    )
    assert clean(said) == "Failed to parse JSON: RecursionGuard: Maximum recursion depth exceeded."


def test_a_cancelled_compilation_is_killed_or_never_begins() -> None:
    pool = CompilerPool(grammar_kit.vocabulary(), 1, 60.0)
    try:
        hard, queued, last = (pool.submit(*HOSTILE[HARD], options("json_schema")) for _ in range(3))
        running(pool, 2)
        for task in (queued, last, hard):
            pool.cancel(task)
        for task in (hard, queued, last):
            with pytest.raises(GrammarError, match="cancelled"):
                task.future.result(30)
        assert outcome(pool.submit("regex", "a", {}).future) == "fine"
        assert pool.counts()["started"] <= 2
    finally:
        pool.close()


def test_closing_fails_what_waits_and_leaves_no_process() -> None:
    pool = CompilerPool(grammar_kit.vocabulary(), 1, 60.0)
    tasks = [pool.submit(*HOSTILE[HARD], options("json_schema")) for _ in range(2)]
    end = time.monotonic() + 30
    while not pool.pids() and time.monotonic() < end:
        time.sleep(0.02)
    pids = pool.pids()
    pool.close()
    pool.close()
    assert pids and all(gone(pid, 5) for pid in pids)
    assert all(task.future.exception(5) is not None for task in tasks)
    assert pool.submit("regex", "a", {}).future.exception(5) is not None


def test_a_pool_that_nobody_closes_ends_when_it_is_forgotten() -> None:
    pool = CompilerPool(grammar_kit.vocabulary(), 1, 60.0)
    assert outcome(pool.submit("regex", "a", {}).future) == "fine"
    (pid,) = pool.pids()
    del pool
    gc.collect()
    assert gone(pid, 10)


PARENT = """
import sys, threading, time
import grammar_kit
from deepinfer.structured.pool import CompilerPool
pool = CompilerPool(grammar_kit.vocabulary(), 2, 60.0)
pool.submit("regex", "a", {}).future.result(60)
pool.submit(*grammar_kit.hostile()[sys.argv[1]], {"any_order": False})
time.sleep(0.5)
print(*pool.pids(), flush=True)
time.sleep(60)
"""


def test_no_process_outlives_a_killed_parent() -> None:
    """One is in the middle of native code at that moment; the kernel ends it, not Python."""
    path = os.pathsep.join(p for p in sys.path if p)
    parent = subprocess.Popen([sys.executable, "-c", PARENT, HARD], stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": path})
    try:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert pids and not any(gone(pid, 0) for pid in pids)
        parent.kill()
        parent.wait(10)
        assert all(gone(pid, 5) for pid in pids)
    finally:
        parent.kill()
        parent.wait(10)


def test_a_core_is_left_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    for cores, wanted, count in ((1, 4, 1), (2, 4, 1), (4, 4, 3), (16, 4, 4), (16, 1, 1)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, cores=cores: set(range(cores)))
        assert worker_count(wanted) == count


def test_processes_are_light_and_polite() -> None:
    pool = CompilerPool(grammar_kit.vocabulary(), 1, 20.0)
    try:
        assert outcome(pool.submit("regex", "a", {}).future) == "fine"
        (pid,) = pool.pids()
        with open(f"/proc/{pid}/maps", encoding="ascii") as f:
            assert "libtorch" not in f.read()
        with open(f"/proc/{pid}/stat", encoding="ascii") as f:
            assert int(f.read().rsplit(")", 1)[1].split()[16]) == 19
        assert os.getsid(pid) == pid, "it would use up its parent's share of the processors where these are shared out by session"
        shared_out = Path("/proc/sys/kernel/sched_autogroup_enabled")
        if shared_out.exists() and shared_out.read_text(encoding="ascii").strip() == "1":
            assert Path(f"/proc/{pid}/autogroup").read_text(encoding="ascii").split()[1:] == ["nice", "19"]
        with open(f"/proc/{pid}/limits", encoding="ascii") as f:
            (line,) = (each for each in f if each.startswith("Max address space"))
        assert 4 << 30 < int(line.split()[3]) < 5 << 30
    finally:
        pool.close()
