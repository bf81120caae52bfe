"""Questions to the ranks of a group: nobody waits for an answer but who asked."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

import engine_kit
from deepinfer import LLM, AsyncLLM, RequestOutput, SamplingParams
from deepinfer.engine.async_engine import wire
from deepinfer.engine.async_engine.process import EngineLoop
from deepinfer.engine.config import EngineConfig
from deepinfer.engine.data_parallel import group_engine
from deepinfer.engine.data_parallel.group_engine import GroupEngine
from deepinfer.errors import ConfigError, EngineDeadError, ErrorData, NoAnswerError
from deepinfer.server.metrics.snapshots import Snapshots
from engine_kit import request
from process_kit import children, pause

SETTINGS: dict[str, Any] = {
    "dtype": "float32", "max_model_len": 512, "max_num_seqs": 4, "block_size": 16, "num_kv_blocks": 100, "max_num_batched_tokens": 128,
    "num_threads": 1, "quiet": True, "swap_space_gib": 0, "state_snapshot_gib": 0,
}  # fmt: skip
LONG = SamplingParams(max_tokens=480, temperature=0, ignore_eos=True, detokenize=False)


@pytest.fixture(scope="module")
def llama() -> str:
    return engine_kit.tiny_checkpoint("llama")


class Front:
    """The other end of an engine's loop, message by message."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket, self._unpacker = sock, wire.Unpacker()
        self._heard: list[Any] = []

    def send(self, *messages: Any) -> None:
        for message in messages:
            self._socket.sendall(wire.pack(message))

    def wait_for(self, wanted: Callable[[Any], bool], seconds: float = 20.0) -> Any:
        """The next message of that kind; others are forgotten."""
        self._socket.settimeout(seconds)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            while self._heard:
                if wanted(message := self._heard.pop(0)):
                    return message
            data = self._socket.recv(1 << 16)
            assert data, "the loop has ended"
            self._heard += self._unpacker.feed(data)
        raise AssertionError("it did not come")

    def answer(self, call: int) -> wire.Answer:
        message: wire.Answer = self.wait_for(lambda m: isinstance(m, wire.Answer))
        assert message.call == call
        return message

    def tokens(self, request_id: str, count: int) -> None:
        """Waits for so many of a request."""
        while count > 0:
            deltas = self.wait_for(lambda m: isinstance(m, wire.Deltas)).deltas
            count -= sum(len(d.new_token_ids) for d in deltas if d.request_id == request_id)


@pytest.fixture(scope="module")
def ranks(llama: str) -> Iterator[GroupEngine]:
    """Two that step by themselves."""
    engine = GroupEngine(EngineConfig.from_args(llama, **SETTINGS, data_parallel_size=2))
    try:
        yield engine
    finally:
        engine.close()


@pytest.fixture
def group(ranks: GroupEngine) -> Iterator[GroupEngine]:
    """The ranks, which run again afterwards, without requests."""
    yield ranks
    for pid in ranks.pids:
        os.kill(pid, signal.SIGCONT)
    for request_id in list(ranks._flights):
        ranks.abort(request_id)
    assert len(ranks.rank_counts()) == 2 and not ranks._questions


@pytest.fixture
def front(group: GroupEngine) -> Iterator[Front]:
    """Of the loop that drives the group, in a thread of this process."""
    ours, theirs = socket.socketpair()
    loop = EngineLoop(theirs)
    loop.beat = 0.1
    thread = threading.Thread(target=loop.run, args=(group,))
    thread.start()
    with ours, theirs:
        yield Front(ours)
        loop.stop()
        thread.join(10)
        assert not thread.is_alive()


def test_a_rank_that_does_not_answer_keeps_nobody_else_waiting(group: GroupEngine, front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in "ab":  # one on each rank
        front.send(wire.Add.of(request(name, [3, 4, 5], LONG, stream=True)))
        front.tokens(name, 1)
    pause(group.pids[1:])
    front.send(wire.Measure(7, rank=1), wire.Count(8, rank=1), wire.Measure(9, rank=0))
    assert front.answer(9).value.totals["output_tokens"] > 0, "the other rank's"
    front.tokens("a", 20)
    os.kill(group.pids[1], signal.SIGCONT)
    assert {(a := front.wait_for(lambda m: isinstance(m, wire.Answer))).call for _ in range(2)} == {7, 8} and a.error is None
    front.tokens("b", 20)


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "busy"])
def test_a_question_that_is_given_up_is_an_error_of_the_question(
    busy: bool, group: GroupEngine, front: Front, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever was asked; the answer that comes later is nobody's, and the next question gets its own."""
    monkeypatch.setattr(group_engine, "_PATIENCE", 0.5)
    if busy:
        front.send(wire.Add.of(request("a", [3, 4, 5], LONG, stream=True)))
        front.tokens("a", 1)
    pause(group.pids[:1])
    for number, question in enumerate((wire.Count(0), wire.Measure(1), wire.Logits(2, [1, 2]))):
        begin = time.monotonic()
        front.send(question)
        error = front.answer(number).error
        assert error is not None and 0.4 < time.monotonic() - begin < 10
        with pytest.raises(NoAnswerError, match=r"^rank 0 of 2 \(pid \d+\) gave no answer within 0.5 s"):
            raise error.exception()
    monkeypatch.setattr(group_engine, "_PATIENCE", 60.0)
    os.kill(group.pids[0], signal.SIGCONT)
    front.send(wire.Count(3))
    assert front.answer(3).value["slots"]["total"] > 0
    assert len(group._questions) == 0 and group.fault is None
    if busy:
        front.tokens("a", 100)


def test_a_loop_that_waits_for_an_answer_gives_signs_of_life(group: GroupEngine, front: Front) -> None:
    """Else who asked would take its process for one that hangs."""
    pause(group.pids[1:])
    front.send(wire.Measure(1, rank=1))
    for _ in range(5):
        front.wait_for(lambda m: isinstance(m, wire.Beat), 2.0)


def test_what_a_rank_finds_wrong_is_told_with_its_name(group: GroupEngine) -> None:
    answers: list[wire.Answer] = []
    pause(group.pids[1:])
    group.ask(wire.Measure(5, rank=1), answers.append)
    (number,) = group._questions._open
    group._hear(1, wire.Answer(number, error=ErrorData.of(ConfigError("a counter is broken"))))
    group._hear(1, wire.Answer(number, error=ErrorData.of(ConfigError("twice"))))
    assert [(a.call, a.value, a.error) for a in answers] == [(5, None, ErrorData("ConfigError", "rank 1 of 2: a counter is broken"))]
    os.kill(group.pids[1], signal.SIGCONT)
    assert len(group.rank_metrics()) == 2


def test_outputs_that_come_while_a_script_waits_for_an_answer_are_kept(llama: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_engine, "_PATIENCE", 1.0)
    with LLM(llama, **SETTINGS, data_parallel_size=2) as llm:
        assert isinstance(llm.engine, GroupEngine)
        for i in range(2):
            llm.add_request({"prompt_token_ids": [3 + i, 4, 5]}, LONG)
        pause(llm.engine.pids[1:])
        with pytest.raises(NoAnswerError, match="rank 1 of 2"):
            llm.metrics()
        os.kill(llm.engine.pids[1], signal.SIGCONT)
        found = []
        while llm.has_unfinished_requests():
            found += llm.step()
        assert [len(o.outputs[0].token_ids) for o in found if o.finished] == [480, 480]
        assert llm.metrics().totals["output_tokens"] == 960


def test_streams_go_on_while_a_scrape_waits_for_a_rank_that_was_stopped(llama: str) -> None:
    async def run() -> None:
        async with AsyncLLM(llama, **SETTINGS, data_parallel_size=2) as llm:
            await llm.ready()
            snapshots, (_, second) = Snapshots(llm), children(llm.engine_pid)
            assert all(s.answers for s in (await snapshots.newest()).values())
            await asyncio.sleep(0.6)  # a snapshot is good for half a second
            pause([second])
            try:
                scrape = asyncio.create_task(snapshots.newest())
                await asyncio.sleep(0.1)
                stream = llm.generate({"prompt_token_ids": [3, 4, 5]}, LONG, mode="delta")  # to the first of two idle ranks
                assert await asyncio.wait_for(collect(stream), 60) == 480
                told = await scrape
                assert [told[name].answers for name in ("rank0", "rank1")] == [True, False]
                assert told["rank0"].age < told["rank1"].age > 1.5
                assert [task.done() for task in snapshots.asking] == [False]
            finally:
                os.kill(second, signal.SIGCONT)
            await asyncio.wait(snapshots.asking, timeout=20)
            assert all(s.answers for s in (await snapshots.newest()).values())
            assert set(await llm.metrics()) == {"rank0", "rank1"}

    async def collect(stream: AsyncIterator[RequestOutput]) -> int:
        return sum([len(output.outputs[0].token_ids) async for output in stream])

    asyncio.run(run())


def test_a_question_ends_with_the_group(ranks: GroupEngine) -> None:
    """The last one: it ends them."""
    answers: list[wire.Answer] = []
    pause(ranks.pids[1:])
    ranks.ask(wire.Measure(5, rank=1), answers.append)
    os.kill(ranks.pids[1], signal.SIGKILL)
    with pytest.raises(EngineDeadError, match="rank 1 of 2 was killed by SIGKILL"):
        while not answers:
            ranks.tend()
            time.sleep(0.01)
    ranks.ask(wire.Measure(6, rank=0), answers.append)
    assert [(a.call, a.error and a.error.kind) for a in answers] == [(5, "EngineDeadError"), (6, "EngineDeadError")]
    assert "rank 1 of 2" in str(answers[0].error)
