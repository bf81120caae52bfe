"""One `LLM` and several threads, a fork, an interrupt in the middle of a submission, and what is left after `close`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

import api_kit
from deepinfer import LLM, SamplingParams
from deepinfer.errors import EngineDeadError

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def tokens(llm: LLM, prompt: str) -> list[int]:
    return llm.generate([prompt], GREEDY, use_tqdm=False)[0].outputs[0].token_ids


def test_threads_take_turns(llm: LLM) -> None:
    prompts = [f"thread {i}" for i in range(4)]
    want = {p: tokens(llm, p) for p in prompts}
    wrong: list[Any] = []

    def work(prompt: str) -> None:
        try:
            for nth in range(6):
                got = tokens(llm, prompt) if nth % 2 else [t for o in llm.stream(prompt, GREEDY) for t in o.outputs[0].token_ids]
                if got != want[prompt]:
                    wrong.append((prompt, got))
        except BaseException as e:
            wrong.append(e)

    threads = [threading.Thread(target=work, args=(p,), daemon=True) for p in prompts]
    for t in threads:
        t.start()
    for t in threads:
        t.join(120)
    assert not wrong and not any(t.is_alive() for t in threads)
    assert not llm.has_unfinished_requests()


@pytest.mark.parametrize("when", ["core has it", "engine has it"])
def test_an_interrupt_while_a_request_is_taken_in(when: str, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    want = tokens(llm, "again")
    owner: Any = llm.engine._core if when == "core has it" else llm.engine
    name = "add" if when == "core has it" else "add_request"
    plain = getattr(owner, name)

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        result = plain(*args, **kwargs)
        signal.raise_signal(signal.SIGINT)
        return result

    class Around:
        def __getattr__(self, other: str) -> Any:
            return interrupted if other == name else getattr(owner, other)

    with monkeypatch.context() as patch:
        if when == "core has it":
            patch.setattr(llm.engine, "_core", Around())
        else:
            patch.setattr(llm.engine, name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["never", "told"], GREEDY, use_tqdm=False)
        with pytest.raises(KeyboardInterrupt):
            llm.stream("neither", GREEDY)
    assert tokens(llm, "again") == want
    for _ in range(3):
        llm.engine.step()
    assert not llm.has_unfinished_requests() and not llm.engine.core_counts()["groups"][0]["held"]


FORK = """
import asyncio, gc, os, signal, sys, threading, time
sys.path.insert(0, {tests!r})
import api_kit
from deepinfer import LLM, AsyncLLM, SamplingParams
from deepinfer.errors import EngineDeadError
llm = LLM({model!r}, device={device!r}, **api_kit.SETTINGS)
run = lambda: llm.generate(["x"], SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)[0].outputs[0].finish_reason

def refused(call):
    try:
        call()
    except EngineDeadError as e:
        return "fork" in str(e)

def in_a_fork(work):
    child = os.fork()
    if not child:
        signal.alarm(60)
        os._exit(7 if work() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7

def used(stream=None):
    # Whatever touches the lock or the core, then the end, and an iterator that nobody has closed.
    calls = [run, llm.step, llm.metrics, lambda: llm.abort("a"), lambda: llm.add_request("x"), lambda: llm.stream("x")]
    calls += [lambda: llm.logits([5]), llm.engine.core_counts, llm.engine.core_stats, lambda: llm.trace(1) and llm.step()]
    wrong = [i for i, call in enumerate(calls) if not refused(call)]
    print(wrong, flush=True)
    del stream
    gc.collect()
    llm.close()
    return not wrong

assert run() == "length"
in_a_fork(used)
stream = llm.stream("left open", SamplingParams(max_tokens=50, ignore_eos=True))
next(stream)
taken, over = threading.Event(), threading.Event()

def hold():
    with llm._lock:  # as in the middle of a turn
        taken.set()
        over.wait(60)

holding = threading.Thread(target=hold)
holding.start()
assert taken.wait(20)
in_a_fork(lambda: used(stream))
over.set()
holding.join()
stream.close()
# In the middle of real turns, too: whoever forks does not wait for them.
turning = threading.Thread(target=lambda: llm.generate(["y"], SamplingParams(max_tokens=300, ignore_eos=True), use_tqdm=False))
turning.start()
for _ in range(3):
    time.sleep(0.01)
    in_a_fork(used)
turning.join()
assert run() == "length"
llm.close()

# A fork ends neither the process nor the connection that it did not start.
async def other():
    async with AsyncLLM({model!r}, device={device!r}, **api_kit.SETTINGS) as far:
        last = [o async for o in far.generate("x", SamplingParams(max_tokens=4, ignore_eos=True))][-1]
        def close():
            far.close()
            far._line.child._end()
            return True
        in_a_fork(close)
        again = [o async for o in far.generate("x", SamplingParams(max_tokens=4, ignore_eos=True))][-1]
        assert far.is_running and again.finished and last.finished
asyncio.run(other())
print("done")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_fork_is_told_and_can_close() -> None:
    """Whatever another thread held when the process forked, and without harm to what the parent runs."""
    script = FORK.format(tests=str(Path(__file__).parents[1]), model=api_kit.tiny_model(), device="cpu")
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=180, check=False)
    assert ran.stdout.rstrip().endswith("done"), ran.stdout[-500:] + ran.stderr[-2000:]


def test_a_closed_engine_answers_what_it_can(device: str) -> None:
    llm = LLM(api_kit.tiny_model(), device=device, **api_kit.SETTINGS)
    engine, stream = llm.engine, llm.stream("abc", GREEDY)
    next(stream)
    llm.close()
    engine.abort("abc")
    assert not engine.has_unfinished() and engine.rest() is None
    with pytest.raises(EngineDeadError):
        engine.step()
    with pytest.raises(EngineDeadError):
        next(stream)
    engine.close()
