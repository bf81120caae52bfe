"""One engine process and the conversation with it.

Owns: connecting, sending, reading, noticing that the process hangs, and saying once that it has ended and how. Never touches:
requests, text.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import signal
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from deepinfer.engine.async_engine import wire
from deepinfer.engine.async_engine.child import EngineChild, SharedEngine
from deepinfer.errors import DeepInferError, EngineDeadError, fresh

if TYPE_CHECKING:
    from deepinfer.structured.matcher import ReadyGrammar
    from deepinfer.structured.vocabulary import Vocabulary

_MOST_WARM = 128
"""Fewer than a process keeps (`deepinfer.structured.matcher`); a grammar that it has let go of is read again, in a step."""


class EngineLine:
    """A started engine process; the model loads from :meth:`connect` on.

    Args:
        start: what to build.
        name: what messages call the process.
        hang_timeout: seconds without a sign of life, while there is work, after which the process counts as hung and is killed; 0 = never.
        has_work: whether requests are with the process. Questions of :meth:`call` are work, too.
        child: the process; left out, it is started.
    """

    def __init__(
        self,
        start: wire.Start,
        name: str = "engine",
        hang_timeout: float = 0.0,
        has_work: Callable[[], bool] = bool,
        child: EngineChild | SharedEngine | None = None,
    ) -> None:
        self.child = child or EngineChild()
        self._start = replace(start, beat=min(1.0, hang_timeout / 4)) if hang_timeout else start
        self._name = name
        self._hang_timeout, self._has_work = hang_timeout, has_work
        self._heard = 0  # pieces read
        self._watching: asyncio.Task[None] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._reader: asyncio.StreamReader | None = None
        self._unpacker = wire.Unpacker()
        self._reading: asyncio.Task[None] | None = None
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._numbers = itertools.count()
        self._over: DeepInferError | None = None  # why no call is answered any more
        self._hung: EngineDeadError | None = None
        self._told: set[str] = set()  # fingerprints of vocabularies
        self._warm: OrderedDict[str, None] = OrderedDict()  # grammars that the process has at hand
        self.loaded = False

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self.child.alive

    async def connect(self) -> wire.Ready:
        """Has the process build its engine; waits until it has.

        Raises:
            DeepInferError: what building it found, or EngineDeadError if the process ended.
        """
        self._reader, self._writer = await asyncio.open_connection(sock=self.child.socket.dup())
        self.send(self._start)
        early: list[Any] = []
        with contextlib.suppress(ConnectionError):  # a process that is killed resets the connection
            while not early and (data := await self._reader.read(1 << 18)):
                early += self._unpacker.feed(data)
        match early[:1]:
            case [wire.Ready() as ready]:
                self.loaded = True
                return ready
            case [wire.Died(error)]:
                raise error.exception()
        raise EngineDeadError(f"the {self._name} process {await self.how_it_ended()} while the model was loading")

    def listen(self, heard: Callable[[Any], None], died: Callable[[EngineDeadError], None]) -> None:
        """From now on gives every message to ``heard``; at the end of the process calls ``died``, once."""
        self._reading = asyncio.create_task(self._read(heard, died))
        if self._hang_timeout:
            self._watching = asyncio.create_task(self._watch())

    async def _read(self, heard: Callable[[Any], None], died: Callable[[EngineDeadError], None]) -> None:
        assert self._reader is not None
        failure: EngineDeadError | None = None
        try:
            while data := await self._reader.read(1 << 18):
                self._heard += 1
                for message in self._unpacker.feed(data):
                    if isinstance(message, wire.Died):
                        failure = EngineDeadError(f"the {self._name} stopped: {message.error.message}")
                    elif isinstance(message, wire.Answer):
                        self._answer(message)
                    elif not isinstance(message, wire.Beat):
                        heard(message)
        except ConnectionError:
            pass
        except Exception as e:  # nobody would read on, and the callers would wait for ever
            failure = EngineDeadError(f"the front failed on news of the {self._name}: {type(e).__name__}: {e}")
            failure.__cause__ = e
            self.child.give_up()
        failure = self._hung or failure
        self.fail_calls(failure or EngineDeadError(f"the {self._name} process has ended"))
        died(failure or EngineDeadError(f"the {self._name} process {await self.how_it_ended()}"))

    async def _watch(self) -> None:
        """Kills a process that has work and says nothing. Only time in which this loop ran counts: what came while it was busy is
        read first."""
        tick = min(1.0, self._hang_timeout / 4)
        silent, heard = 0.0, self._heard
        while silent < self._hang_timeout:
            before, working = time.monotonic(), bool(self._calls) or self._has_work()
            await asyncio.sleep(tick)
            if heard == self._heard and working and (self._calls or self._has_work()):
                silent += min(time.monotonic() - before, 2 * tick)
            else:
                silent, heard = 0.0, self._heard
        self._hung = EngineDeadError(
            f"the {self._name} process (pid {self.child.pid}) had work and gave no sign of life for {silent:.3g} s, so it was killed; "
            "a step that may take longer needs a larger hang_timeout (0 = no limit)"
        )
        self.child.kill()
        if self._writer is not None:
            self._writer.transport.abort()  # a process that the kernel cannot end yet would keep its side open

    def send(self, message: Any) -> None:
        """Sends as soon as the connection takes it; to a process that has ended nothing."""
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(wire.pack(message))

    async def call(self, question: Callable[[int], Any]) -> Any:
        """Sends ``question(number)`` and waits for the value that answers that number. Raises what it failed with."""
        if self._over is not None:
            raise fresh(self._over)
        number = next(self._numbers)
        waiting = self._calls[number] = asyncio.get_running_loop().create_future()
        try:
            self.send(question(number))
            return await waiting
        finally:
            del self._calls[number]

    def learn(self, vocabulary: Vocabulary) -> None:
        """Tells the process a vocabulary, once."""
        if vocabulary.fingerprint not in self._told:
            self._told.add(vocabulary.fingerprint)
            self.send(wire.Learn(vocabulary))

    async def warm(self, grammar: ReadyGrammar) -> None:
        """Has the process read a grammar that it was not told of lately, and waits until it has. Raises what that failed with."""
        if grammar.key not in self._warm:
            await self.call(lambda number: wire.Warm(number, grammar))
        self._warm[grammar.key] = None
        self._warm.move_to_end(grammar.key)
        if len(self._warm) > _MOST_WARM:
            self._warm.popitem(last=False)

    def _answer(self, message: wire.Answer) -> None:
        waiting = self._calls.get(message.call)
        if waiting is None or waiting.done():
            return
        if message.error is None:
            waiting.set_result(message.value)
        else:
            waiting.set_exception(message.error.exception())

    def fail_calls(self, error: DeepInferError) -> None:
        """Nobody will answer any more."""
        self._over = error
        for waiting in self._calls.values():
            if not waiting.done():
                waiting.set_exception(fresh(error))

    async def drain(self) -> None:
        """Waits until what was sent has left."""
        if self._writer is not None:
            with contextlib.suppress(ConnectionError):
                await self._writer.drain()

    async def how_it_ended(self) -> str:
        """In words."""
        return await asyncio.to_thread(self.child.how_it_ended)

    def end(self) -> None:
        """Ends the process; blocks until it has."""
        self.child.hang_up()
        if not self.loaded and isinstance(self.child, EngineChild):
            self.child.kill(signal.SIGTERM)  # it may be loading for long
        self.child.end()

    async def close(self) -> None:
        """Gives the connection back, once the process has ended."""
        if self._watching is not None:
            self._watching.cancel()
        if self._reading is not None:
            self._reading.cancel()
            with contextlib.suppress(asyncio.CancelledError, DeepInferError):
                await self._reading
        if self._writer is not None:
            self._writer.close()
