"""`AsyncLLM` with its real engine process: many callers, errors across the boundary, deaths on either side."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import api_kit
import engine_kit
from deepinfer import LLM, AsyncLLM, SamplingParams, register_model
from deepinfer.engine.async_engine.child import EngineChild
from deepinfer.errors import (
    CapacityError,
    ConfigError,
    EmptyPromptError,
    EngineDeadError,
    InvalidRequestError,
    ModelNotFoundError,
    PromptTooLongError,
    TokenOutOfRangeError,
)
from process_kit import Run, event_loop, gone

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
LONG = GREEDY.clone(max_tokens=400)
SECONDS = 60.0
"""Time for a process to end by itself on a machine that is busy with others; it ends in a fraction of one."""


@pytest.fixture(scope="module", autouse=True)
def patience() -> Iterator[None]:
    """A front that closes waits as long before it makes its process end, so that how that ended does not depend on the machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EngineChild.end, "__defaults__", (SECONDS,))
        yield


@pytest.fixture(scope="module")
def run() -> Iterator[Run[Any]]:
    """Runs a coroutine in one event loop that lives as long as the module."""
    with event_loop(120) as run:
        yield run


@pytest.fixture(scope="module")
def shared(run: Run[Any], device: str) -> Iterator[AsyncLLM]:
    """An engine process for all tests that leave it alive."""
    made = AsyncLLM(api_kit.tiny_model(), device=device, **api_kit.SETTINGS)
    run(made.ready())
    yield made
    run(made.aclose())
    assert made._child.process.poll() == 0


async def last_of(stream: Any) -> Any:
    return [output async for output in stream][-1]


async def ids_of(llm: AsyncLLM, prompt: str, params: SamplingParams = GREEDY) -> list[int]:
    ids: list[int] = (await last_of(llm.generate(prompt, params))).outputs[0].token_ids
    return ids


def test_answers_equal_those_of_an_engine_in_this_process(shared: AsyncLLM, run: Run[Any], device: str) -> None:
    prompts = [f"prompt {i} " + "y" * i for i in range(10)]
    with LLM(api_kit.tiny_model(), device=device, **api_kit.SETTINGS) as llm:
        wanted = [o.outputs[0].token_ids for o in llm.generate(prompts, GREEDY)]
        chat = llm.chat([{"role": "user", "content": "hi"}], GREEDY)[0].outputs[0].text
        seeded = llm.generate("s", SamplingParams(n=2, seed=3, max_tokens=6, ignore_eos=True))[0]
        logits = llm.logits([5, 6, 7])

    async def all_at_once() -> None:
        assert await asyncio.gather(*(ids_of(shared, p) for p in prompts)) == wanted
        assert (await last_of(shared.chat([{"role": "user", "content": "hi"}], GREEDY))).outputs[0].text == chat
        again = await last_of(shared.generate("s", SamplingParams(n=2, seed=3, max_tokens=6, ignore_eos=True)))
        assert [a.token_ids for a in again.outputs] == [a.token_ids for a in seeded.outputs]
        assert (await shared.logits([5, 6, 7])).tobytes() == logits.tobytes()

    run(all_at_once())
    assert (shared.max_model_len, shared.vocab_size, shared.eos_token_ids) == (512, engine_kit.VOCAB, (2, 3))
    assert shared.default_sampling_params() == SamplingParams(temperature=0.5, top_p=0.9)


def test_modes_agree_and_a_slow_reader_loses_nothing(shared: AsyncLLM, run: Run[Any]) -> None:
    async def read() -> None:
        whole = (await last_of(shared.generate("modes", GREEDY, mode="final"))).outputs[0]
        cumulative = [o.outputs[0].text async for o in shared.generate("modes", GREEDY)]
        assert cumulative[-1] == whole.text and all(whole.text.startswith(t) for t in cumulative)
        text, ids, logprobs = "", [], 0
        async for o in shared.generate("modes", GREEDY.clone(logprobs=1), mode="delta"):
            text += o.outputs[0].text
            ids += o.outputs[0].token_ids
            logprobs += len(o.outputs[0].logprobs or ())
            await asyncio.sleep(0.05)
        assert (text, ids, logprobs) == (whole.text, whole.token_ids, 8)

    run(read())


def test_stop_strings_cross_the_boundary(shared: AsyncLLM, run: Run[Any]) -> None:
    async def read() -> None:
        free = (await last_of(shared.generate("stop strings", LONG.clone(max_tokens=24)))).outputs[0]
        stop = free.text[4:6]
        answer = (await last_of(shared.generate("stop strings", LONG.clone(stop=stop)))).outputs[0]
        assert (answer.text, answer.stop_reason) == (free.text[: free.text.index(stop)], stop)

    run(read())


@pytest.mark.parametrize(
    ("prompt", "error"),
    [("", EmptyPromptError), ([99999], TokenOutOfRangeError), ([5] * 600, PromptTooLongError), (7, InvalidRequestError)],
)
def test_a_bad_request_is_a_typed_error_and_others_finish(shared: AsyncLLM, run: Run[Any], prompt: Any, error: type[Exception]) -> None:
    async def both() -> None:
        alone = await ids_of(shared, "others")
        other = asyncio.create_task(ids_of(shared, "others"))
        with pytest.raises(error):
            await last_of(shared.generate(prompt, GREEDY))
        assert await other == alone
        assert not shared._boxes

    run(both())


def test_a_request_id_is_used_once_at_a_time(shared: AsyncLLM, run: Run[Any]) -> None:
    async def twice() -> None:
        first = shared.generate("x", LONG, request_id="one")
        await anext(first)
        with pytest.raises(InvalidRequestError, match="in use"):
            await anext(shared.generate("x", GREEDY, request_id="one"))
        await first.aclose()  # type: ignore[attr-defined]
        assert len(await ids_of(shared, "x")) == 8

    run(twice())


def test_an_id_that_is_used_again_brings_nothing_of_the_request_before(shared: AsyncLLM, run: Run[Any]) -> None:
    """Also where the request before had more answers than the new one."""

    async def reuse() -> None:
        async def last(**values: Any) -> list[int]:
            return [o async for o in shared.generate("others", GREEDY, **values)][-1].outputs[0].token_ids

        want = await last()
        for tokens in (1, 2, 4, 8, 3):
            stream = shared.generate("before", SamplingParams(n=2, seed=1, max_tokens=200, ignore_eos=True), request_id="again")
            while sum(len(a.token_ids) for a in (await anext(stream)).outputs) < tokens:
                pass
            await stream.aclose()  # type: ignore[attr-defined]
            assert await last(request_id="again") == want

    run(reuse())


def test_leaving_or_cancelling_aborts_the_request(shared: AsyncLLM, run: Run[Any]) -> None:
    async def leave() -> None:
        stream = shared.generate("left", LONG)
        await anext(stream)
        await stream.aclose()  # type: ignore[attr-defined]
        task = asyncio.create_task(last_of(shared.generate("cancelled", LONG)))
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not shared._boxes and not len(shared._outputs)
        # The engine has let go of them too: nothing of theirs is in the way of a request that needs nearly all blocks.
        assert (await last_of(shared.generate([5] * 100, GREEDY))).finished

    run(leave())


def test_abort_gives_a_last_output(shared: AsyncLLM, run: Run[Any]) -> None:
    async def abort() -> None:
        outputs = []
        async for output in shared.generate("aborted", LONG, request_id="a"):
            outputs.append(output)
            await shared.abort("a")
        assert outputs[-1].outputs[0].finish_reason == "abort" and outputs[-1].finished
        await shared.abort("a")

    run(abort())


def test_another_event_loop_is_refused(shared: AsyncLLM, run: Run[Any]) -> None:
    with pytest.raises(InvalidRequestError, match="another event loop"):
        asyncio.run(shared.ready())


def test_the_death_of_the_engine_reaches_every_caller_within_a_second(device: str) -> None:
    async def die() -> None:
        async with AsyncLLM(api_kit.tiny_model(), device=device, **api_kit.SETTINGS) as llm:
            waiting = [asyncio.create_task(last_of(llm.generate(f"w{i}", LONG))) for i in range(5)]
            stream = llm.generate("s", LONG)
            await anext(stream)
            os.kill(llm.engine_pid, signal.SIGKILL)
            killed = time.monotonic()
            errors = await asyncio.gather(*waiting, return_exceptions=True)
            assert all(isinstance(e, EngineDeadError) and "SIGKILL" in str(e) for e in errors), errors
            with pytest.raises(EngineDeadError):
                await last_of(stream)
            assert time.monotonic() - killed < 1.0
            assert not llm.is_running
            with pytest.raises(EngineDeadError):
                await last_of(llm.generate("later", GREEDY))
            with pytest.raises(EngineDeadError):
                await llm.logits([5])

    asyncio.run(die())


def test_an_engine_killed_while_it_starts_is_a_typed_error(device: str) -> None:
    async def die_while_reading() -> None:
        llm = AsyncLLM(api_kit.tiny_model(), device=device, **api_kit.SETTINGS)
        os.kill(llm.engine_pid, signal.SIGSTOP)
        starting = asyncio.create_task(llm.ready())
        await asyncio.sleep(0.2)  # the start message is sent and nobody reads it: the kill resets the connection
        os.kill(llm.engine_pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            await starting
        await llm.aclose()

    asyncio.run(die_while_reading())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_to_the_engine_process(device: str, number: signal.Signals) -> None:
    async def send() -> None:
        async with AsyncLLM(api_kit.tiny_model(), device=device, **api_kit.SETTINGS) as llm:
            stream = llm.generate("s", GREEDY)
            await anext(stream)
            os.kill(llm.engine_pid, number)
            if number == signal.SIGINT:  # the terminal's Ctrl-C is the front's to handle
                assert (await last_of(stream)).finished
            else:
                with pytest.raises(EngineDeadError):
                    await last_of(llm.generate("s", LONG))
                assert llm._child.process.wait(SECONDS) == 0

    asyncio.run(send())


def test_what_loading_finds_is_raised_with_its_type(device: str) -> None:
    async def start(**settings: Any) -> None:
        async with AsyncLLM(api_kit.tiny_model(), device=device, **{**api_kit.SETTINGS, **settings}):
            pass

    with pytest.raises(CapacityError, match="num_kv_blocks"):
        asyncio.run(start(num_kv_blocks=10**9))
    with pytest.raises(ConfigError, match="block_size"):
        asyncio.run(start(block_size=48))
    with pytest.raises(ModelNotFoundError):
        AsyncLLM("/no/such/model")


def test_requests_that_the_engine_rejects_are_typed_errors(device: str) -> None:
    async def reject() -> None:
        async with AsyncLLM(api_kit.tiny_model(), device=device, **{**api_kit.SETTINGS, "num_kv_blocks": 3, "max_model_len": 300}) as llm:
            with pytest.raises(InvalidRequestError):
                await last_of(llm.generate([5] * 200, GREEDY))
            assert (await last_of(llm.generate([5] * 20, GREEDY))).finished

    asyncio.run(reject())


HOUSE = """
from deepinfer.models.llama.forward import LlamaModel

class HouseLlama(LlamaModel):
    @classmethod
    def from_config(cls, config, dtype, device):
        return super().from_config({**config, "architectures": ["LlamaForCausalLM"]}, dtype, device)
"""


def test_architectures_registered_here_are_known_there(device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(api_kit.tiny_model(), tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["HouseLlamaForCausalLM"]}))
    (tmp_path / "house_llama.py").write_text(HOUSE)
    monkeypatch.syspath_prepend(tmp_path)
    register_model("HouseLlamaForCausalLM", "house_llama:HouseLlama")

    async def answer() -> None:
        async with AsyncLLM(str(tmp_path), device=device, **api_kit.SETTINGS) as llm:
            assert len(await ids_of(llm, "house")) == 8

    asyncio.run(answer())


def test_closing_ends_the_process_and_fails_who_waits(device: str) -> None:
    async def close() -> None:
        llm = AsyncLLM(api_kit.tiny_model(), device=device, **api_kit.SETTINGS)
        await llm.ready()
        waiting = asyncio.create_task(last_of(llm.generate("w", LONG)))
        await asyncio.sleep(0.1)
        await llm.aclose()
        with pytest.raises(EngineDeadError, match="closed"):
            await waiting
        assert llm._child.process.poll() == 0
        await llm.aclose()
        with pytest.raises(EngineDeadError, match="closed"):
            await llm.ready()

    asyncio.run(close())


def test_a_forgotten_front_takes_its_process_with_it(device: str) -> None:
    llm = AsyncLLM(api_kit.tiny_model(), device=device, **api_kit.SETTINGS)
    pid = llm.engine_pid
    del llm
    gc.collect()
    assert gone(pid, SECONDS)


@pytest.mark.parametrize(("where", "when"), [("main", "loading"), ("main", "idle"), ("thread", "idle"), ("main", "stepping")])
def test_no_engine_outlives_a_killed_front(device: str, where: str, when: str) -> None:
    script = textwrap.dedent(
        f"""
        import asyncio, sys, threading, time
        from deepinfer import AsyncLLM, SamplingParams

        def make():
            made.append(AsyncLLM({api_kit.tiny_model()!r}, device={device!r}, **{api_kit.SETTINGS!r}))

        made = []
        if {where!r} == "thread":
            thread = threading.Thread(target=make)
            thread.start()
            thread.join()
        else:
            make()

        async def main():
            llm = made[0]
            if {when!r} != "loading":
                await llm.ready()
            if {when!r} == "stepping":
                params = SamplingParams(max_tokens=500, ignore_eos=True, temperature=0)
                await anext(llm.generate("x", params))
            print(llm.engine_pid, flush=True)
            await asyncio.sleep(60)

        asyncio.run(main())
        """
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    front = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=env)
    try:
        assert front.stdout is not None
        pid = int(front.stdout.readline())
        assert not gone(pid, 0.2)
        front.kill()
        front.wait()
        assert gone(pid, SECONDS)
    finally:
        front.kill()
        with contextlib.suppress(Exception):
            front.communicate(timeout=5)


def test_metrics_come_from_an_engine_that_works(shared: AsyncLLM, run: Run[Any]) -> None:
    async def measure() -> None:
        before = (await shared.metrics())["engine"]
        stream = shared.generate("metrics", LONG)
        await anext(stream)
        during = (await shared.metrics())["engine"]
        assert during.running == 1 and during.totals["steps"] > before.totals["steps"]
        last = await last_of(stream)
        after = (await shared.metrics())["engine"]
        assert len(last.outputs[0].token_ids) == LONG.max_tokens
        assert after.totals["output_tokens"] - before.totals["output_tokens"] == LONG.max_tokens
        assert after.asked_tokens - before.asked_tokens == len(last.prompt_token_ids) <= after.chunk_rows <= after.chunk_budget
        assert after.idle_ns >= during.idle_ns and after.host_time.sum_ns >= after.hidden_ns
        assert shared.restarts == {"engine": 0}

    run(measure())


def test_metrics_of_a_dead_engine_are_an_error(device: str) -> None:
    async def kill() -> None:
        async with AsyncLLM(api_kit.tiny_model(), device=device, **api_kit.SETTINGS) as llm:
            os.kill(llm.engine_pid, signal.SIGKILL)
            with pytest.raises(EngineDeadError):
                await asyncio.wait_for(llm.metrics(), 10)

    asyncio.run(kill())
