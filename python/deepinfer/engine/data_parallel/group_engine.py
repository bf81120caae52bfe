"""Several ranks as one engine: what `deepinfer.engine.request.EngineLike` says, by processes of which each has an engine.

Owns: the ranks' processes, which of them has which request, and what the end of one of them means. Never touches: text, tensors.
All of it belongs to the thread that drives the group; there is no other.

To who drives it the group is one, so the end of one rank is the end of all: the others are ended, and every request is told which it was
and how. Whether ranks step together, or each by itself like an engine alone, is `EngineConfig.steps_together`.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from deepinfer.engine.async_engine import wire
from deepinfer.engine.async_engine.client import engine_start
from deepinfer.engine.config import EngineConfig
from deepinfer.engine.data_parallel.balancer import Balancer, FewestTokens, RankLoad
from deepinfer.engine.data_parallel.place import RankPlace
from deepinfer.engine.data_parallel.questions import Questions
from deepinfer.engine.data_parallel.rank_line import RankLine
from deepinfer.engine.request import EngineRequest, SequenceDelta
from deepinfer.errors import ConfigError, DeepInferError, EngineDeadError, ErrorData, InvalidRequestError
from deepinfer.models import resolve_model
from deepinfer.platforms import Platform, get_platform
from deepinfer.scratch import ScratchFolder

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from deepinfer import _core
    from deepinfer.engine.step_log import EngineMetrics
    from deepinfer.structured.vocabulary import Vocabulary

_STEP_TIMEOUT = 300.0
"""Longest wait for a rank that has work, by the others within a step or by who reads what it says, seconds; the end of its process is
noticed at once."""
_MOST_PASSED = 2.0
"""Most seconds between two looks at the ranks that count as their silence: who did not look may have been stopped with them."""
_FELLOWS = 1.0
"""Time in which ranks are seen to have ended, once one that steps with them has told of an error, seconds."""
_CLOSING = 2.0
"""Time that all ranks together have to end by themselves, seconds."""
_PATIENCE = 60.0
"""Longest wait for the answer to a question, seconds. It costs nobody but who asked: the group goes on meanwhile."""


@dataclass(slots=True)
class _Flight:
    """A request and where it is."""

    rank: int
    unfinished: set[int]
    tokens: int  # that count against its rank


class GroupEngine:
    """Engines of ``config.data_parallel_size`` ranks, each in a process of its own, driven by calls of :meth:`step` from one thread.

    Args:
        config: settings of every rank; a device ``cuda`` gives each rank a GPU of its own.
        balancer: which rank gets a request.

    Attributes:
        run: settings of a rank as they hold on this machine.
        resolved: as of `deepinfer.engine.engine.Engine`; ``max_model_len`` and ``max_num_seqs`` are those of all ranks together.
        fault: why the group has ended by itself; ``None`` while it works.

    Raises:
        ConfigError, CapacityError, ...: what a rank found while it loaded, the rank named.
    """

    def __init__(self, config: EngineConfig, balancer: Balancer | None = None) -> None:
        self.config, self.run = config, config.resolve()
        self.resolved = resolve_model(config.model, config.revision, config.load_format)
        self.fault: EngineDeadError | None = None
        self._balancer: Balancer = balancer or FewestTokens()
        self._flights: dict[str, _Flight] = {}
        self._news: list[SequenceDelta] = []
        self._questions = Questions()
        self._looked = time.monotonic()
        self._told: set[str] = set()
        self._folder = ScratchFolder("meet") if config.steps_together else None
        self._ranks: list[RankLine] = []
        self._poll = select.epoll()
        self._process = os.getpid()
        self._closed = False
        try:
            self._start()
            ready = self._wait_until_ready()
        except BaseException:
            self.close()
            raise
        self.max_model_len = min(r.max_model_len for r in ready)
        self.vocab_size = ready[0].vocab_size
        self.max_num_seqs = sum(r.max_num_seqs for r in ready)
        self.images = ready[0].images
        self.loads = [RankLoad(r.kv_tokens, r.max_num_seqs) for r in ready]

    def _start(self) -> None:
        meet = None if self._folder is None else str(Path(self._folder.place) / "file")
        configs = rank_configs(self.config, self.run.platform, meet)
        for number, config in enumerate(configs):
            line = RankLine(f"rank {number} of {len(configs)}", engine_start(config))
            self._ranks.append(line)
            self._poll.register(line.socket, select.EPOLLIN)

    def _wait_until_ready(self) -> list[wire.Ready]:
        ready: dict[int, wire.Ready] = {}
        while len(ready) < len(self._ranks):
            self._poll.poll(1.0)
            for number, line in enumerate(self._ranks):
                try:
                    messages = line.receive()
                except DeepInferError as e:
                    raise self._first_cause(e) from e
                for message in messages:
                    if isinstance(message, wire.Ready):
                        ready[number] = message
        return [ready[number] for number in range(len(self._ranks))]

    # What it is

    @property
    def pids(self) -> list[int]:
        """Process ids of the ranks."""
        return [line.child.pid for line in self._ranks]

    # Requests

    def add_request(self, request: EngineRequest) -> None:
        """Queues a request with one of the ranks.

        Raises:
            InvalidRequestError: its id is in use. What its rank finds wrong with it comes as its end, with the error.
            EngineDeadError: the group has ended.
        """
        self._check_open()
        if request.request_id in self._flights:
            raise InvalidRequestError(f"request id {request.request_id!r} is in use by an unfinished request; choose another")
        tokens, answers = len(request.prompt_ids), len(request.seeds)
        message = wire.Add.of(request)
        rank = self._balancer.choose(self.loads, tokens, answers)
        if not self._flights:
            self._looked = time.monotonic()  # nobody had work until now
            if self.config.steps_together:  # the ranks may rest, and whoever has work waits for all
                for number, line in enumerate(self._ranks):
                    if number != rank:
                        line.send(wire.Wake())
        self._flights[request.request_id] = _Flight(rank, set(range(answers)), tokens)
        self.loads[rank].tokens += tokens
        self.loads[rank].requests += answers
        self._ranks[rank].send(message)

    def take_over(self, record: bytes, grammar: Any = None) -> NoReturn:
        """Ranks of a group take nothing over."""
        raise ConfigError("an engine of several ranks does not take sequences over; leave data_parallel_size out of a pair")

    def learn(self, vocabulary: Vocabulary) -> None:
        """Tells every rank a vocabulary, once, before requests come whose grammars belong to it."""
        if vocabulary.fingerprint not in self._told:
            self._told.add(vocabulary.fingerprint)
            for line in self._ranks:
                line.send(wire.Learn(vocabulary))

    def abort(self, request_id: str) -> None:
        """Ends all answers of a request at once; no delta of it follows. Unknown and finished ids are ignored."""
        if (flight := self._flights.get(request_id)) is not None and not self._closed:
            self._ranks[flight.rank].send(wire.Abort(request_id))
            self._forget(request_id)
            self._news = [delta for delta in self._news if delta.request_id != request_id]

    def stop_at(self, request_id: str, index: int, num_tokens: int) -> None:
        """Ends one answer after its first ``num_tokens`` tokens, because a stop string was found; no delta of it follows."""
        if (flight := self._flights.get(request_id)) is not None and index in flight.unfinished and not self._closed:
            self._ranks[flight.rank].send(wire.StopAt(request_id, index, num_tokens))
            self._end(request_id, index)

    def has_unfinished(self) -> bool:
        """Whether a request has not ended, or there is something to tell."""
        return not self._closed and self.fault is None and bool(self._flights or self._news)

    # Turns

    def step(self) -> list[SequenceDelta]:
        """What the ranks have told since the last turn; does not wait for more.

        Raises:
            EngineDeadError: a rank has ended, and with it the group.
        """
        self._check_open()
        self._read()
        news, self._news = self._news, []
        return news

    def rest(self) -> tuple[int, float] | None:
        """After a turn without news: a descriptor that becomes readable when a rank has told something, and the seconds after which to
        look anyway."""
        if self._closed or self.fault is not None or os.getpid() != self._process:
            return None
        return self._poll.fileno(), 0.01 if any(line.unsent for line in self._ranks) else min(1.0, self._questions.patience)

    def wake(self) -> None:
        """Nothing: who starts the ranks wakes them."""

    def tend(self) -> tuple[int, float] | None:
        """While there is nothing to step for: notices the end of a rank. As :meth:`rest`.

        Raises:
            EngineDeadError: a rank has ended.
        """
        if not self._closed:
            self._check_open()
            self._read()
        return self.rest()

    def _read(self) -> None:
        now = time.monotonic()
        passed, self._looked = min(now - self._looked, _MOST_PASSED), now
        try:
            for number, line in enumerate(self._ranks):
                messages = line.receive()
                for message in messages:
                    self._hear(number, message)
                self._check_silence(line, 0.0 if messages or not self.loads[number].requests else passed)
        except DeepInferError as e:
            self._die(e)
            raise EngineDeadError(str(self.fault)) from e
        self._questions.wait(passed)

    def _check_silence(self, line: RankLine, passed: float) -> None:
        """A rank that hangs is missed here, unless others step with it and miss it. ``passed``: seconds of silence since the last look, 0
        for a rank that has said something or has no work."""
        line.silent = line.silent + passed if passed else 0.0
        if line.silent > _STEP_TIMEOUT and not self.config.steps_together:
            raise EngineDeadError(f"{line.name} (pid {line.child.pid}) had work and gave no sign of life for {line.silent:.3g} s")

    def _hear(self, rank: int, message: Any) -> None:
        match message:
            case wire.Deltas(deltas):
                for delta in deltas:
                    flight = self._flights.get(delta.request_id)
                    if flight is None or delta.index not in flight.unfinished:
                        continue  # on its way when it was aborted or stopped
                    made = len(delta.new_token_ids)
                    flight.tokens += made
                    self.loads[rank].tokens += made
                    self._news.append(delta)
                    if delta.finish_reason is not None:
                        self._end(delta.request_id, delta.index)
            case wire.Rejected(request_id, error):
                if (flight := self._flights.get(request_id)) is not None:
                    for index in sorted(flight.unfinished):
                        self._news.append(SequenceDelta(request_id, index, []).failed(error.exception()))
                    self._forget(request_id)
            case wire.Answer():
                self._questions.hear(message)

    def _end(self, request_id: str, index: int) -> None:
        flight = self._flights[request_id]
        flight.unfinished.discard(index)
        self.loads[flight.rank].requests -= 1
        if not flight.unfinished:
            self._forget(request_id)

    def _forget(self, request_id: str) -> None:
        flight = self._flights.pop(request_id)
        load = self.loads[flight.rank]
        load.tokens -= flight.tokens
        load.requests -= len(flight.unfinished)

    # Questions

    def ask(self, question: wire.Question, answered: Callable[[wire.Answer], None]) -> None:
        """Asks the rank that the question names, and waits for nothing: turns bring the answer. ``answered`` is called once, in this
        call or a later one, with the value or with an error: what the rank found wrong, NoAnswerError, or the end of the group."""
        try:
            self._check_open()
        except EngineDeadError as e:
            answered(wire.Answer(question.call, error=ErrorData.of(e)))
            return
        if not self._flights and not self._questions:
            self._looked = time.monotonic()  # nobody looked until now
        self._questions.ask(self._ranks[question.rank], question, _PATIENCE, answered)

    def _wait_for(self, questions: Sequence[wire.Question]) -> list[Any]:
        """Asks, and turns until there are answers; news of requests are kept for the next :meth:`step`. The questions' numbers are those
        of their places."""
        self._check_open()
        found: dict[int, wire.Answer] = {}
        for question in questions:
            self.ask(question, lambda answer: found.update({answer.call: answer}))
        while len(found) < len(questions):
            self._poll.poll(min(0.05, self._questions.patience))
            self._read()
        for answer in found.values():
            if answer.error is not None:
                raise answer.error.exception()
        return [found[number].value for number in range(len(questions))]

    def logits(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """As of an engine, by rank 0. Raises InvalidRequestError where experts are spread: such a forward needs all ranks."""
        values: NDArray[np.float32] = self._wait_for([wire.Logits(0, [int(i) for i in token_ids])])[0]
        return values

    def core_counts(self) -> _core.Counts:
        """Blocks and state slots of rank 0; see :meth:`rank_counts`."""
        counts: _core.Counts = self._wait_for([wire.Count(0)])[0]
        return counts

    def rank_counts(self) -> list[_core.Counts]:
        """Blocks and state slots of every rank by state."""
        return self._wait_for([wire.Count(number, number) for number in range(len(self._ranks))])

    def metrics(self) -> EngineMetrics:
        """Everything that is counted, of all ranks together; see :meth:`rank_metrics`."""
        from deepinfer.engine.step_log import EngineMetrics

        return EngineMetrics.together(self.rank_metrics())

    def rank_metrics(self) -> list[EngineMetrics]:
        """Everything that each rank counts. Raises what a rank's counters raise, or NoAnswerError, the rank named."""
        return self._wait_for([wire.Measure(number, number) for number in range(len(self._ranks))])

    def kv_identity(self) -> NoReturn:
        """Names of KV are those of an engine alone."""
        raise ConfigError("the names of KV are the same with one engine; leave data_parallel_size out")

    def trace(self, steps: int, path: Path) -> NoReturn:
        """A trace is of one process's steps."""
        raise ConfigError("a trace shows the steps of one engine, and there are several; leave data_parallel_size out for one")

    # Faults and the end

    def _die(self, error: DeepInferError) -> None:
        """The end of one rank is the end of all."""
        error = self._first_cause(error)
        said = f"{error}; the ranks of a group end together, and this one had {len(self._flights)} unfinished requests"
        self.fault = EngineDeadError(said)
        self.fault.__cause__ = error
        for line in self._ranks:
            line.child.kill(signal.SIGKILL)
        self._flights.clear()
        self._news.clear()
        self._questions.fail(self.fault)

    def _first_cause(self, error: DeepInferError) -> DeepInferError:
        """Ranks that step with one that has gone fail, too, and may be heard first: who has gone without a word is the cause."""
        end = time.monotonic() + (_FELLOWS if self.config.steps_together else 0.0)
        lines = [line for line in self._ranks if not line.told]
        while lines and time.monotonic() < end:
            for line in lines:
                with contextlib.suppress(DeepInferError):
                    line.receive()
                if not line.open and not line.told:
                    return EngineDeadError(f"the process of {line.name} {line.child.how_it_ended()}")
            lines = [line for line in lines if not line.told]
            time.sleep(0.01)
        return error

    def close(self) -> None:
        """Ends every rank; idempotent. Blocks until they have ended."""
        if self._closed or os.getpid() != self._process:
            self._closed = True
            return
        self._closed = True
        for line in self._ranks:
            line.child.hang_up()
        for line in self._ranks:  # one that waits for another is not left waiting
            line.child.kill(signal.SIGTERM)
        end = time.monotonic() + _CLOSING
        for line in self._ranks:
            line.child.wait(end - time.monotonic())
        for line in self._ranks:  # one that is stopped does not end by itself
            line.child.kill(signal.SIGKILL)
        for line in self._ranks:
            line.child.end(2.0)
        self._flights.clear()
        self._questions.fail(EngineDeadError("the engine was closed"))
        self._poll.close()
        if self._folder is not None:
            self._folder.remove()

    def _check_open(self) -> None:
        if os.getpid() != self._process:
            raise EngineDeadError(f"the ranks belong to process {self._process}, of which this one is a fork; create another engine here")
        if self._closed:
            raise EngineDeadError("the engine is closed; create another one")
        if self.fault is not None:
            raise EngineDeadError(f"{self.fault}; create another one")


def rank_configs(config: EngineConfig, platform: Platform, meet: str | None) -> list[EngineConfig]:
    """Settings of each rank, which find each other in ``meet`` if they step together. Raises ConfigError where there are fewer GPUs than
    ranks."""
    size = config.data_parallel_size
    found = []
    for rank in range(size):
        place = RankPlace(rank, size, meet, config.expert_parallel, _STEP_TIMEOUT)
        changes: dict[str, Any] = {"rank": place}
        if platform.name == "cuda":
            changes["device"] = f"cuda:{rank}"
            get_platform(changes["device"])
        else:
            # The ranks share one machine.
            changes["num_threads"] = config.num_threads or max(1, (os.cpu_count() or 1) // size)
            if config.kv_memory_fraction is None and config.num_kv_blocks is None:
                changes["kv_memory_fraction"] = changes["gpu_memory_utilization"] = 0.5 / size
        if rank:
            changes["quiet"] = True
        found.append(replace(config, **changes))
    return found
