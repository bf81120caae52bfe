"""Both processes of a pair killed, stopped and started again at random while requests come, go and are aborted."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import api_kit
from deepinfer import LLM, PrefillDecodePair, RequestOutput, SamplingParams
from deepinfer.errors import EngineDeadError
from process_kit import at_rest

LEASE = 2.0
SETTINGS: dict[str, Any] = {**api_kit.SETTINGS, "max_num_batched_tokens": 64, "handover_lease": LEASE}
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
KINDS = (
    GREEDY,
    GREEDY.clone(max_tokens=1),
    GREEDY.clone(max_tokens=90),
    SamplingParams(temperature=0.9, seed=3, max_tokens=40, presence_penalty=0.4, frequency_penalty=0.2, logprobs=1),
    SamplingParams(temperature=1.0, n=3, seed=4, max_tokens=12, ignore_eos=True, repetition_penalty=1.2),
    SamplingParams(temperature=0.7, seed=6, max_tokens=20, prompt_logprobs=1, logit_bias={9: 2.0}),
)
TEXTS = ["x", "once upon a time there was a fox", "long " * 60, "once upon a time there was a " + "y" * 90]


def essence(output: RequestOutput) -> Any:
    """What must be equal, bit for bit."""
    return [(a.text, a.token_ids, a.finish_reason, a.stop_reason, a.logprobs) for a in output.outputs], output.prompt_logprobs


def fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def children() -> set[int]:
    """Processes that this one has started and that have not ended."""
    found = set()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            found |= {int(p) for p in (task / "children").read_text().split()}
    alive = set()
    for pid in found:
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z":
                alive.add(pid)
    return alive


@pytest.fixture(scope="module")
def wanted(device: str) -> Iterator[dict[tuple[int, int], Any]]:
    """What one engine answers, by text and kind."""
    with LLM(api_kit.tiny_model(), device=device, **SETTINGS) as llm:
        pairs = [(t, k) for t in range(len(TEXTS)) for k in range(len(KINDS))]
        outputs = llm.generate([TEXTS[t] for t, _ in pairs], [KINDS[k] for _, k in pairs])
    yield dict(zip(pairs, map(essence, outputs), strict=True))


async def chaos(seed: int, rounds: int, transfer: str, device: str, wanted: dict[tuple[int, int], Any]) -> dict[str, int]:
    """One pair, ``rounds`` random acts; gives how requests ended."""
    rng = random.Random(seed)
    ends: dict[str, int] = {"same": 0, "abort": 0, "left": 0, "dead": 0}
    before, mine = fds(), children()
    side = {"completion_settings": rng.choice([{}, {"speculative": "ngram"}, {"num_kv_blocks": 34}, {"zero_overhead": False}])}
    pair = PrefillDecodePair(
        api_kit.tiny_model(), kv_transfer=transfer, max_reruns=3, max_restarts=10_000, device=device, **side, **SETTINGS
    )
    stopped: dict[int, float] = {}

    async def ask(text: int, kind: int, leave: int, name: str | None) -> None:
        outputs: list[RequestOutput] = []
        stream = pair.generate(TEXTS[text], KINDS[kind], mode=rng.choice(("cumulative", "final")), request_id=name)
        try:
            async for output in stream:
                assert not outputs or not outputs[-1].finished, "an output after the last one"
                outputs.append(output)
                if len(outputs) == leave:
                    await stream.aclose()
                    ends["left"] += 1
                    return
        except EngineDeadError as e:
            assert "killed by SIGKILL" in str(e), e
            ends["dead"] += 1
            return
        if outputs[-1].outputs[0].finish_reason == "abort" or any(a.finish_reason == "abort" for a in outputs[-1].outputs):
            ends["abort"] += 1
            return
        assert essence(outputs[-1]) == wanted[text, kind], (text, kind, outputs[-1], wanted[text, kind])
        ends["same"] += 1

    tasks: list[asyncio.Task[None]] = []
    names: list[str] = []
    try:
        await pair.ready()
        for _ in range(rounds):
            act = rng.random()
            pids = pair.prompt_pid, pair.completion_pid
            if act < 0.55:
                name = None
                if rng.random() < 0.5:
                    name = f"q{rng.randrange(12)}"
                    if name in pair._boxes:
                        name = None
                    else:
                        names.append(name)
                kind = rng.randrange(len(KINDS))
                tasks.append(asyncio.create_task(ask(rng.randrange(len(TEXTS)), kind, rng.choice((0, 0, 0, 1, 2)), name)))
            elif act < 0.70 and names:
                await pair.abort(rng.choice(names))
            elif act < 0.74:
                for pid in pids if rng.random() < 0.3 else (rng.choice(pids),):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                    stopped.pop(pid, None)
            elif act < 0.82:
                pid = rng.choice(pids)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGSTOP)
                stopped[pid] = time.monotonic() + rng.choice((0.05, 0.3, LEASE + 0.5))
            await asyncio.sleep(rng.choice((0, 0, 0.001, 0.01, 0.05)))
            for pid in [p for p, ends_at in stopped.items() if time.monotonic() > ends_at]:
                del stopped[pid]
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
        for pid in stopped:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        await asyncio.wait_for(asyncio.gather(*tasks), 60)
        assert sum(ends.values()) == len(tasks)
        await at_rest(pair, LEASE + 2)
    finally:
        for pid in (pair.prompt_pid, pair.completion_pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        await pair.aclose()
    assert children() <= mine
    end = time.monotonic() + 2
    while fds() > before and time.monotonic() < end:
        await asyncio.sleep(0.05)
    assert fds() <= before
    return ends


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("transfer", ["shm", "tcp"])
def test_whatever_dies_every_request_ends_once_and_nothing_is_left(device: str, transfer: str, seed: int, wanted: Any) -> None:
    ends = asyncio.run(chaos(seed, 120, transfer, device, wanted))
    assert ends["same"]
