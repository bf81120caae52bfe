"""Many short lives at once: engines side by side in one process, and callers that come, leave and are cancelled at any moment."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from typing import Any

import pytest

import api_kit
from deepinfer import LLM, AsyncLLM, RequestOutput, SamplingParams
from process_kit import in_use

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
LONG = GREEDY.clone(max_tokens=300)


def test_engines_of_one_process_do_not_disturb_each_other(device: str) -> None:
    """Two threads, each with an engine of its own again and again: one is closed, with work in it, while the others run."""
    prompts = [f"prompt {i} " + "z" * i for i in range(6)]

    def answers(llm: LLM) -> list[list[int]]:
        return [o.outputs[0].token_ids for o in llm.generate(prompts, GREEDY, use_tqdm=False)]

    with LLM(api_kit.tiny_model(), device=device, **api_kit.SETTINGS) as llm:
        want = answers(llm)
    wrong: list[Any] = []
    begin, before = threading.Barrier(2), set(threading.enumerate())

    def work(overlap: bool) -> None:
        try:
            begin.wait(60)
            for _ in range(2):
                llm = LLM(api_kit.tiny_model(), device=device, zero_overhead=overlap, **api_kit.SETTINGS)
                if answers(llm) != want:
                    wrong.append("other tokens")
                next(llm.stream(prompts[0], LONG))
                left = llm.stream(prompts[1], LONG)
                next(left)
                llm.close()
        except BaseException as e:
            wrong.append(e)

    threads = [threading.Thread(target=work, args=(overlap,), daemon=True) for overlap in (True, False)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not wrong and not any(thread.is_alive() for thread in threads)
    assert not [t for t in set(threading.enumerate()) - before if t.name.startswith("deepinfer")]


async def last_of(stream: Any) -> RequestOutput:
    last: RequestOutput = [output async for output in stream][-1]
    return last


class Caller:
    """One of many; what it gets is checked against answers that were given in peace."""

    def __init__(self, llm: AsyncLLM, peace: dict[str, Any], rng: random.Random) -> None:
        self._llm, self._peace, self._rng = llm, peace, rng

    async def call(self, number: int) -> None:
        prompt = self._rng.choice(list(self._peace))
        delay = self._rng.random() * self._rng.choice((0.0, 0.01, 0.2, 1.0))
        await getattr(self, self._rng.choice(("_read", "_stop", "_cancel", "_cancel", "_abort", "_leave")))(prompt, delay, f"id {number}")

    async def _read(self, prompt: str, delay: float, name: str) -> None:
        mode: Any = self._rng.choice(("final", "cumulative"))
        assert (await last_of(self._llm.generate(prompt, GREEDY, mode=mode))).outputs[0].token_ids == self._peace[prompt].token_ids

    async def _stop(self, prompt: str, delay: float, name: str) -> None:
        text = self._peace[prompt].text
        stop = text[3:5]
        assert (await last_of(self._llm.generate(prompt, GREEDY.clone(stop=stop)))).outputs[0].text == text[: text.index(stop)]

    async def _cancel(self, prompt: str, delay: float, name: str) -> None:
        params = SamplingParams(n=self._rng.choice((1, 2)), max_tokens=300, ignore_eos=True)
        task = asyncio.create_task(last_of(self._llm.generate(prompt, params, request_id=name)))
        await asyncio.sleep(delay)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        if self._rng.random() < 0.5:  # the id is free again
            await last_of(self._llm.generate(prompt, GREEDY, request_id=name))

    async def _abort(self, prompt: str, delay: float, name: str) -> None:
        async def abort() -> None:
            await asyncio.sleep(delay)
            await self._llm.abort(name)

        task = asyncio.create_task(abort())
        last = await last_of(self._llm.generate(prompt, LONG, request_id=name))
        await task
        assert last.outputs[0].finish_reason in ("abort", "length")

    async def _leave(self, prompt: str, delay: float, name: str) -> None:
        stream = self._llm.generate(prompt, LONG)
        await anext(stream)
        await stream.aclose()  # type: ignore[attr-defined]


@pytest.mark.parametrize("callers", [80, pytest.param(1500, marks=pytest.mark.nightly)])
def test_a_storm_of_callers_that_come_and_go_leaves_nothing(device: str, callers: int) -> None:
    async def storm() -> None:
        async with AsyncLLM(api_kit.tiny_model(), device=device, **api_kit.SETTINGS) as llm:
            peace = {p: (await last_of(llm.generate(p, GREEDY))).outputs[0] for p in (f"prompt {i}" for i in range(5))}
            caller = Caller(llm, peace, random.Random(callers))
            await asyncio.wait_for(asyncio.gather(*(caller.call(i) for i in range(callers))), 240)
            assert not llm._boxes and not len(llm._outputs)
            for _ in range(200):
                counts = await llm.core_counts()
                if not in_use(counts):
                    break
                await asyncio.sleep(0.02)
            assert not in_use(counts)

    asyncio.run(storm())
