"""`PrefillDecodePair`: one model served by two engine processes, one for prompts and one for what follows.

Owns: which process has which request, passing hand-overs on, and what becomes of requests whose process ended. Never touches: KV, text.

A process that ends is started again. Its requests are made again from their prompts, `max_reruns` times at most: seeds are fixed when a
request comes in, so the tokens are the same, and those already given out are not given out twice. Requests of the other process go on.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from deepinfer.engine.async_engine import wire
from deepinfer.engine.async_engine.client import engine_start
from deepinfer.engine.async_engine.front import HANG_TIMEOUT, AsyncFront, check_hang_timeout
from deepinfer.engine.async_engine.line import EngineLine
from deepinfer.engine.config import EngineConfig
from deepinfer.engine.request import EngineRequest, SequenceDelta
from deepinfer.engine.text_side import load_text_side
from deepinfer.errors import ConfigError, DeepInferError, EngineDeadError, ErrorData, HandoverError, NoRoomError, fresh

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from deepinfer import _core
    from deepinfer.engine.step_log import EngineMetrics
    from deepinfer.structured.matcher import ReadyGrammar

_WINDOW = 60.0
"""Seconds within which more restarts than allowed end the pair."""

_AGAIN = frozenset(kind.__name__ for kind in (HandoverError, NoRoomError))
"""Errors of a hand-over after which the answer is made again from its prompt."""


class _Side:
    """One of the two processes, in all its lives."""

    def __init__(self, name: str, start: wire.Start, hang_timeout: float, has_work: Callable[[_Side], bool]) -> None:
        self.name = name
        self._make = lambda: EngineLine(start, f"{name} engine", hang_timeout, lambda: has_work(self))
        self.line = self._make()
        self.started = asyncio.Event()  # set while this life takes messages, and for good at the end of the pair
        self.up = False
        self.waiting: list[tuple[str, Any]] = []  # (key, message) for the next life
        self.ends: deque[float] = deque()
        self.restarts = 0

    def start_again(self) -> None:
        """Begins the next life; its line is to be connected."""
        self.line = self._make()
        self.restarts += 1

    def tell(self, message: Any) -> None:
        """To this life only."""
        if self.up:
            self.line.send(message)


@dataclass(slots=True, eq=False)
class _Flight:
    """One answer on its way."""

    request: EngineRequest  # of this answer alone; its id is the caller's
    index: int
    side: _Side
    key: str = ""  # id in the engines; never used twice, so that late news of one run are not taken for another's
    run: int = 0  # reruns that count
    made: int = 0  # tokens of this run
    given: int = 0  # tokens given out
    told_prompt: bool = False


class PrefillDecodePair(AsyncFront):
    """A model in two engine processes: one computes prompts and first tokens, the other goes on. Used like `AsyncLLM`.

    Decoding is never held up by somebody's long prompt, and answers are those of one engine, bit for bit.

    Args:
        model: as for `AsyncLLM`.
        kv_transfer: how KV goes from one process to the other: ``"shm"`` or ``"tcp"``.
        max_reruns: how often an answer is made again when its process ended; 0 = the request fails with EngineDeadError.
        max_restarts: how often each process is started again within a minute before the pair gives up.
        hang_timeout: seconds without a sign of life from a process that has work, after which it is killed and started again; 0 = never.
        prompt_settings, completion_settings: settings of one side only (``num_kv_blocks``, ``device``, ``num_threads``, ...).
        settings: of both; see :class:`~deepinfer.engine.config.EngineConfig`. A ``kv_store`` is the prompt engine's.

    Raises:
        ConfigError, ModelNotFoundError, UnsupportedModelError: here already where they can be seen without loading.
    """

    def __init__(
        self,
        model: str,
        *,
        kv_transfer: str = "shm",
        max_reruns: int = 1,
        max_restarts: int = 5,
        hang_timeout: float = HANG_TIMEOUT,
        prompt_settings: Mapping[str, Any] | None = None,
        completion_settings: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        from deepinfer.models import resolve_model

        super().__init__()
        for name, value in (("max_reruns", max_reruns), ("max_restarts", max_restarts)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise ConfigError(f"{name} must be an integer of at least 0, got {value!r}")
        if "engine_type" in settings:
            raise ConfigError("a pair has an engine of each type; leave engine_type out")
        both = {"kv_transfer_token": secrets.token_bytes(32), **settings, "kv_transfer": kv_transfer}
        self.config = EngineConfig.from_args(model, **{**both, **(prompt_settings or {}), "engine_type": "prompt"})
        # Prompts are what a KV store is asked for.
        rest = {name: value for name, value in both.items() if not name.startswith("kv_store")}
        other = EngineConfig.from_args(model, **{**rest, **(completion_settings or {}), "engine_type": "completion"})
        self._max_reruns, self._max_restarts = max_reruns, max_restarts
        self._flights: dict[str, _Flight] = {}
        self._later: dict[str, list[_Flight]] = {}  # further answers to a prompt, until the first one's prompt is in the index
        self._restarting: set[asyncio.Task[None]] = set()
        self._with_grammars = False
        self._numbers = itertools.count()
        self._orders = itertools.count(1)
        resolved = resolve_model(self.config.model, revision=self.config.revision, load_format=self.config.load_format)
        check_hang_timeout(hang_timeout)
        self._prompt = _Side("prompt", engine_start(self.config), hang_timeout, self._has_work)
        self._completion = _Side("completion", engine_start(other), hang_timeout, self._has_work)
        try:
            self._text = load_text_side(self.config, resolved)
        except BaseException:
            self.close()
            raise

    # What it is

    @property
    def is_running(self) -> bool:
        """Whether requests are taken; they may wait for a process that is being started again."""
        return self._dead is None

    @property
    def prompt_pid(self) -> int:
        """Id of the process that computes prompts."""
        return self._prompt.line.child.pid

    @property
    def completion_pid(self) -> int:
        """Id of the process that computes what follows."""
        return self._completion.line.child.pid

    async def core_counts(self) -> dict[str, _core.Counts]:
        """Blocks and state slots by state, of ``"prompt"`` and ``"completion"``. Raises EngineDeadError if one of them ends meanwhile."""
        return {side.name: await self._ask(side, wire.Count) for side in self._sides}

    @property
    def engines(self) -> tuple[str, ...]:
        """``"prompt"`` and ``"completion"``."""
        return tuple(side.name for side in self._sides)

    async def measure(self, engine: str) -> EngineMetrics:
        """See the base; since its process was started last."""
        measured: EngineMetrics = await self._ask(self._sides[self.engines.index(engine)], wire.Measure)
        return measured

    @property
    def restarts(self) -> dict[str, int]:
        """How often each process was started again."""
        return {side.name: side.restarts for side in self._sides}

    async def logits(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """Logits float32 ``[len(token_ids), vocab_size]`` of every position, in one forward of the prompt engine."""
        ids = [int(i) for i in token_ids]
        values: NDArray[np.float32] = await self._ask(self._prompt, lambda number: wire.Logits(number, ids))
        return values

    async def _ask(self, side: _Side, question: Callable[[int], Any]) -> Any:
        """A process's answer; one that is being started again is asked when it is up."""
        await self.ready()
        await side.started.wait()
        if self._dead is not None:
            raise fresh(self._dead)
        return await side.line.call(question)

    @property
    def _sides(self) -> tuple[_Side, _Side]:
        return self._prompt, self._completion

    # The processes

    async def _connect(self) -> wire.Ready:
        ready = await asyncio.gather(*(side.line.connect() for side in self._sides))
        for side in self._sides:
            self._listen(side)
        return wire.Ready(
            max_model_len=min(r.max_model_len for r in ready),
            vocab_size=min(r.vocab_size for r in ready),
            max_num_seqs=min(r.max_num_seqs for r in ready),
            images=ready[0].images,
        )

    def _has_work(self, side: _Side) -> bool:
        unsent = {key for key, _ in side.waiting}
        return any(f.side is side and f.key not in unsent for f in self._flights.values())

    def _listen(self, side: _Side) -> None:
        line = side.line
        if self._with_grammars and self._grammars is not None:
            line.learn(self._grammars.vocabulary)  # before what waits for this life and follows a grammar
        side.up = True
        side.started.set()
        line.listen(lambda message: self._hear(side, message), lambda error: self._lost(side, line, error))
        for each in self._sides if self._prompt.up and self._completion.up else ():
            waiting, each.waiting = each.waiting, []
            for key, message in waiting:
                if key in self._flights:  # else nobody wants it any more
                    each.line.send(message)

    def _lost(self, side: _Side, line: EngineLine, error: EngineDeadError) -> None:
        """A process has ended: its requests are made again, and it is started again."""
        if self._dead is not None or side.line is not line:
            return
        side.up = False
        side.started.clear()
        now = time.monotonic()
        side.ends.append(now)
        while side.ends[0] < now - _WINDOW:
            side.ends.popleft()
        if len(side.ends) > self._max_restarts:
            self._die(EngineDeadError(f"{error}, for the {len(side.ends)}. time within a minute; create another pair"))
            return
        task = asyncio.get_running_loop().create_task(self._restart(side, line))
        self._restarting.add(task)
        task.add_done_callback(self._restarting.discard)
        unsent = {key for key, _ in side.waiting}
        for flight in [f for f in self._flights.values() if f.side is side and f.key not in unsent]:
            if flight.key not in self._flights:
                continue  # its request has failed with another answer's
            if flight.side is self._completion:
                self._prompt.tell(wire.Abort(flight.key))  # nobody will take it over any more
            self._again(flight, error)

    async def _restart(self, side: _Side, line: EngineLine) -> None:
        if self._dead is not None:
            return  # closed meanwhile: a process that starts now would be nobody's
        try:
            side.start_again()
            await asyncio.to_thread(line.end)
            await line.close()
            await side.line.connect()
        except (DeepInferError, OSError) as e:
            self._lost(side, side.line, e if isinstance(e, EngineDeadError) else EngineDeadError(f"the {side.name} engine: {e}"))
            return
        if self._dead is None:
            self._listen(side)

    # Requests

    def _submit(self, request: EngineRequest) -> None:
        flights = []
        for index, seed in enumerate(request.seeds):
            params = request.params.clone(n=1, prompt_logprobs=None if index else request.params.prompt_logprobs)
            # Whatever becomes of it, an answer stands where it came: under overload a rerun at the tail would starve.
            one = replace(request, params=params, seeds=(seed,), order=next(self._orders))
            flights.append(_Flight(one, index, self._prompt))
        if len(flights) > 1:
            self._later[request.request_id] = flights[1:]
        self._start_flight(flights[0])

    async def _shelve(self, grammar: ReadyGrammar) -> None:
        assert self._grammars is not None
        self._with_grammars = True
        for side in self._sides:
            if side.up:
                side.line.learn(self._grammars.vocabulary)
        # One that ends meanwhile reads the grammar with the request, in its next life.
        found = await asyncio.gather(*(side.line.warm(grammar) for side in self._sides if side.up), return_exceptions=True)
        for error in found:
            if isinstance(error, BaseException) and not isinstance(error, EngineDeadError):
                raise error

    def _start_flight(self, flight: _Flight) -> None:
        flight.key = f"{flight.request.request_id}/{flight.index}/{next(self._numbers)}"
        flight.side, flight.made = self._prompt, 0
        self._flights[flight.key] = flight
        self._send(self._prompt, flight.key, wire.Add.of(replace(flight.request, request_id=flight.key)))

    def _send(self, side: _Side, key: str, message: Any) -> None:
        """At once, or when both processes are up: a prompt that nobody can take over would only hold blocks until its lease ends."""
        if self._prompt.up and self._completion.up:
            side.line.send(message)
        else:
            side.waiting.append((key, message))

    def _again(self, flight: _Flight, error: DeepInferError) -> None:
        """Makes an answer again from its prompt, or fails its request."""
        self._flights.pop(flight.key, None)
        # Only a full house: nothing has failed, and as long as others finish there will be room.
        counts = not isinstance(error, NoRoomError)
        if counts and flight.run >= self._max_reruns:
            self._give_up(flight.request.request_id, error)
            return
        flight.run += counts
        self._outputs.note_rerun(flight.request.request_id)
        self._start_flight(flight)

    def _give_up(self, request_id: str, error: DeepInferError) -> None:
        self._cancel(request_id)
        self._fail(request_id, error)

    def _cancel(self, request_id: str) -> None:
        self._later.pop(request_id, None)
        for flight in [f for f in self._flights.values() if f.request.request_id == request_id]:
            self._end_flight(flight)

    def _end_flight(self, flight: _Flight) -> None:
        """Nobody wants what this answer would still bring."""
        self._flights.pop(flight.key, None)
        for side in self._sides:  # the prompt engine may still hold what it has handed over
            side.tell(wire.Abort(flight.key))

    def _stop_at(self, request_id: str, index: int, num_tokens: int) -> None:
        for flight in [f for f in self._flights.values() if f.request.request_id == request_id and f.index == index]:
            self._end_flight(flight)

    # News

    def _hear(self, side: _Side, message: Any) -> None:
        match message:
            case wire.Deltas(deltas):
                for delta in deltas:
                    flight = self._flights.get(delta.request_id)
                    if flight is not None and flight.side is side:
                        self._move(flight, delta)
            case wire.Rejected(key, error):
                flight = self._flights.get(key)
                if flight is not None and error.kind in _AGAIN:
                    self._again(flight, error.exception())
                elif flight is not None:
                    self._give_up(flight.request.request_id, error.exception())

    def _move(self, flight: _Flight, delta: SequenceDelta) -> None:
        request_id = flight.request.request_id
        if delta.error_kind in _AGAIN:
            self._again(flight, ErrorData(delta.error_kind, delta.error or "").exception())
            return
        for later in self._later.pop(request_id, ()):
            self._start_flight(later)
        if delta.finish_reason is not None:
            self._flights.pop(flight.key, None)
        new = len(delta.new_token_ids)
        known = min(max(flight.given - flight.made, 0), new)  # of an earlier run
        flight.made += new
        flight.given = max(flight.given, flight.made)
        told = replace(
            delta,
            request_id=request_id,
            index=flight.index,
            new_token_ids=delta.new_token_ids[known:],
            logprobs=None if delta.logprobs is None else delta.logprobs[known:],
            prompt_logprobs=None if flight.told_prompt else delta.prompt_logprobs,
            handover=None,
        )
        flight.told_prompt = flight.told_prompt or delta.prompt_logprobs is not None
        if told.new_token_ids or told.finish_reason is not None:
            self._take([told])  # a stop string in it ends the flight
        if delta.handover is not None and flight.key in self._flights:
            flight.side = self._completion
            self._send(self._completion, flight.key, wire.TakeOver(flight.key, delta.handover, wire.pack_grammar(flight.request.grammar)))

    # The end

    def _die(self, error: DeepInferError) -> None:
        if self._dead is not None:
            return
        super()._die(error)
        self._flights.clear()
        self._later.clear()
        for side in self._sides:
            side.line.fail_calls(error)
            side.started.set()

    async def _drain(self) -> None:
        await asyncio.gather(*(side.line.drain() for side in self._sides))

    def _end_processes(self) -> None:
        for side in self._sides:
            side.line.child.hang_up()  # both at once: they end at the same time
        for side in self._sides:
            side.line.end()

    async def _close_lines(self) -> None:
        for task in list(self._restarting):
            task.cancel()
        await asyncio.gather(*self._restarting, return_exceptions=True)
        for side in self._sides:
            await asyncio.to_thread(side.line.end)
            await side.line.close()
