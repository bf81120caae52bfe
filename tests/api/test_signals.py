"""Signals to either process at start-up, idle, in the middle of a step, and twice: nothing hangs, nothing is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

import api_kit
from deepinfer import AsyncLLM, SamplingParams
from deepinfer.errors import EngineDeadError
from process_kit import gone

LONG = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)


@pytest.mark.parametrize(("when", "times"), [("starting", 1), ("loading", 2)])
def test_a_signal_during_start_up_is_not_lost(device: str, when: str, times: int) -> None:
    async def send() -> None:
        llm = AsyncLLM(api_kit.tiny_model(), device=device, **api_kit.SETTINGS)
        starting = asyncio.create_task(llm.ready())
        if when == "loading":
            await asyncio.sleep(0.5)
        for _ in range(times):
            os.kill(llm.engine_pid, signal.SIGTERM)
        began = time.monotonic()
        with pytest.raises(EngineDeadError):
            await starting
        assert time.monotonic() - began < 3 and not llm.is_running
        await llm.aclose()
        assert gone(llm.engine_pid, 1)

    asyncio.run(send())


def test_a_second_signal_in_the_middle_of_a_step_does_not_cut_the_clean_end_short(device: str) -> None:
    async def send() -> None:
        async with AsyncLLM(api_kit.tiny_model(), device=device, **api_kit.SETTINGS) as llm:
            stream = llm.generate("s", LONG)
            await anext(stream)
            os.kill(llm.engine_pid, signal.SIGINT)  # the front's to handle: the engine goes on
            await anext(stream)
            for _ in range(3):
                os.kill(llm.engine_pid, signal.SIGTERM)
                await asyncio.sleep(0.005)
            with pytest.raises(EngineDeadError):
                while True:
                    await anext(stream)
            assert llm._child.process.wait(5) == 0

    asyncio.run(send())


SCRIPT = """
import asyncio
from deepinfer import AsyncLLM, SamplingParams

async def main():
    llm = AsyncLLM({model!r}, device={device!r}, **{settings!r})
    try:
        print(llm.engine_pid, flush=True)
        await llm.ready()
        print("idle", flush=True)
        await anext(llm.generate("x", SamplingParams(max_tokens=500, ignore_eos=True, temperature=0)))
        print("stepping", flush=True)
        await asyncio.sleep(60)
    finally:
        await llm.aclose()

asyncio.run(main())
"""


@pytest.mark.parametrize(
    ("when", "signals"),
    [
        ("loading", [signal.SIGINT]),
        pytest.param("idle", [signal.SIGTERM], marks=pytest.mark.nightly),
        ("stepping", [signal.SIGINT, signal.SIGINT]),
        pytest.param("stepping", [signal.SIGTERM, signal.SIGTERM], marks=pytest.mark.nightly),
    ],
)
def test_a_signal_to_the_front_ends_both_processes(device: str, when: str, signals: list[signal.Signals]) -> None:
    script = textwrap.dedent(SCRIPT).format(model=api_kit.tiny_model(), device=device, settings=api_kit.SETTINGS)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    front = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=env)
    try:
        assert front.stdout is not None
        pid = int(front.stdout.readline())
        while when != "loading" and front.stdout.readline().strip() != when:
            assert front.poll() is None
        if when == "loading":
            time.sleep(0.3)
        for number in signals:
            front.send_signal(number)
            time.sleep(0.02)
        assert front.wait(10) != 0
        assert gone(pid, 5)
    finally:
        front.kill()
        with contextlib.suppress(Exception):
            front.communicate(timeout=5)


def test_a_process_that_still_imports_ends_with_its_parent(tmp_path: Path) -> None:
    """Before it can look for itself."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys, time\nif 'deepinfer.engine.async_engine.process' in sys.orig_argv:\n    time.sleep(60)\n"
    )
    script = "from deepinfer.engine.async_engine.child import EngineChild\nchild = EngineChild()\nprint(child.pid, flush=True)\ninput()"
    path = os.pathsep.join([str(tmp_path), *sys.path])
    environment = os.environ | {"PYTHONPATH": path}
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        time.sleep(0.5)
        assert not gone(child, 0)
        parent.kill()
        assert gone(child, 5)
