"""An engine process that hangs without dying: noticed, ended by its own pid, and told with how long it was silent."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

import api_kit
from deepinfer import AsyncLLM, PrefillDecodePair, SamplingParams
from deepinfer.errors import ConfigError, EngineDeadError
from process_kit import Run, event_loop, gone

LONG = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
SHORT = LONG.clone(max_tokens=6)
PATIENCE = 1.0


async def last_of(stream: Any) -> Any:
    return [output async for output in stream][-1]


@pytest.fixture(scope="module")
def run() -> Iterator[Run[Any]]:
    """Runs a coroutine in one event loop that lives as long as the module."""
    with event_loop(120) as run:
        yield run


@pytest.fixture(scope="module")
def llm(run: Run[Any], device: str) -> Iterator[AsyncLLM]:
    """An engine process for both tests below; the last one ends it."""
    made = AsyncLLM(api_kit.tiny_model(), device=device, hang_timeout=PATIENCE, **api_kit.SETTINGS)
    run(made.ready())
    yield made
    run(made.aclose())


def test_an_engine_that_works_long_and_a_front_that_was_busy_are_no_hang(llm: AsyncLLM, run: Run[Any]) -> None:
    """Steps give signs however little they tell; time in which the front did not look counts for nothing; nor does time without work."""

    async def work() -> None:
        began = time.monotonic()
        while time.monotonic() - began < 1.5 * PATIENCE:
            # One output at its end: between them only the signs of life tell that the engine works.
            assert all(o.finished for o in await asyncio.gather(*(last_of(llm.generate(f"{i}", LONG, mode="final")) for i in range(8))))
        stream = llm.generate("x", LONG)
        await anext(stream)
        time.sleep(2 * PATIENCE)  # the caller's own event loop stands still
        await asyncio.sleep(0)
        assert (await last_of(stream)).finished
        os.kill(llm.engine_pid, signal.SIGSTOP)
        await asyncio.sleep(1.5 * PATIENCE)  # without work nobody minds
        os.kill(llm.engine_pid, signal.SIGCONT)
        assert (await last_of(llm.generate("x", SHORT))).finished and llm.is_running

    run(work())


def test_a_hung_engine_is_told_with_how_long_it_was_silent_and_killed(llm: AsyncLLM, run: Run[Any]) -> None:
    async def hang() -> None:
        os.kill(llm.engine_pid, signal.SIGSTOP)
        began = time.monotonic()
        waiting = [asyncio.create_task(last_of(llm.generate(f"w{i}", LONG))) for i in range(3)]
        asked = asyncio.create_task(llm.core_counts())
        errors = await asyncio.gather(*waiting, asked, return_exceptions=True)
        assert PATIENCE <= time.monotonic() - began < PATIENCE + 3
        assert all(isinstance(e, EngineDeadError) and "no sign of life for 1" in str(e) for e in errors), errors
        assert str(llm.engine_pid) in str(errors[0]) and "hang_timeout" in str(errors[0])
        assert not llm.is_running and gone(llm.engine_pid, 2)
        with pytest.raises(EngineDeadError, match="no sign of life"):
            await last_of(llm.generate("later", SHORT))

    run(hang())


def test_a_front_that_fails_on_news_tells_its_callers(device: str) -> None:
    """Nobody would read on: without an end the callers would wait for ever."""

    async def fail() -> None:
        async with AsyncLLM(api_kit.tiny_model(), device=device, hang_timeout=0, **api_kit.SETTINGS) as llm:
            assert llm._line._watching is None, "0 is no limit"

            def broken(deltas: object) -> None:
                raise ZeroDivisionError("in the front")

            llm._take = broken  # type: ignore[method-assign,assignment]
            with pytest.raises(EngineDeadError, match="ZeroDivisionError"):
                await asyncio.wait_for(last_of(llm.generate("x", LONG)), 30)
            assert gone(llm.engine_pid, 2)

    asyncio.run(fail())


@pytest.mark.parametrize("bad", [-1, "5", float("inf"), float("nan"), True, None])
def test_a_timeout_that_is_none_is_refused(bad: Any) -> None:
    for front in (AsyncLLM, PrefillDecodePair):
        with pytest.raises(ConfigError, match="hang_timeout"):
            front(api_kit.tiny_model(), device="cpu", hang_timeout=bad, **api_kit.SETTINGS)
