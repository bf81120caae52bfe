"""From what a request asks for to a grammar that an engine can use: screened, compiled once, kept.

Owns: who waits for which compilation, the cache, what is counted. Never touches: engines, requests, the native code.

Everybody who asks for one thing waits for one compilation; it ends when the last of them goes away. What took too long is refused at once
for a minute, so that a client that tries again and again does not hold all processes; other failures cost milliseconds and are not kept.
"""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import hashlib
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from deepinfer.errors import EngineDeadError, GrammarBusyError, GrammarError, GrammarTimeoutError
from deepinfer.structured import bindings
from deepinfer.structured.cache import GrammarCache
from deepinfer.structured.compiler import Compiled
from deepinfer.structured.matcher import ReadyGrammar
from deepinfer.structured.pool import MEMORY, CompilerPool, Task, worker_count
from deepinfer.structured.screen import Job, screen
from deepinfer.structured.vocabulary import Vocabulary
from deepinfer.structured_outputs import StructuredOutputs

SECONDS_BUCKETS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
"""Upper ends of the histogram of compilation times; the last bucket has none."""
_LEAST_PATIENCE = 20.0
"""Seconds that an asynchronous caller waits for a process to begin, if no more are given to a compilation itself: one may have to start."""
_REFUSE_SECONDS = 60.0
_MOST_REFUSED = 256


@dataclass(frozen=True, slots=True)
class PreparedGrammar:
    """What `compile_grammar` gives: ``grammar`` for the engine, and ``reports``: what of the schema is not held to, one sentence each."""

    grammar: ReadyGrammar
    reports: tuple[str, ...] = ()


@dataclass(slots=True)
class _Pending:
    """One compilation and those who wait for it."""

    task: Task
    waiters: int = 0
    future: Future[Compiled] = field(default_factory=Future)


class _Wait:
    """One caller's part in a compilation; to be left in every case."""

    def __init__(self, service: GrammarService, key: str, pending: _Pending) -> None:
        self._service, self._key, self._pending = service, key, pending
        self.future = pending.future

    @property
    def begun(self) -> bool:
        """Whether a process works on it."""
        return self._pending.task.begun

    def leave(self) -> None:
        """This caller does not wait any more."""
        self._service._leave(self._key, self._pending)


class GrammarService:
    """Compiles for one model. Used from any thread, and from event loops.

    Args:
        vocabulary: gives the model's vocabulary; called once, at the first need. Raises GrammarError where there is none.
        workers: most processes; lowered to leave a core to others.
        seconds: that a compilation may take.
        cache_bytes: most bytes of compiled grammars to keep; 0 = none.
        memory: bytes that a compilation may take.
        patience: seconds that :meth:`acompile` waits for a process to begin; ``None``: 20, or ``seconds`` where that is more.
    """

    def __init__(
        self,
        vocabulary: Callable[[], Vocabulary],
        workers: int,
        seconds: float,
        cache_bytes: int,
        memory: int = MEMORY,
        patience: float | None = None,
    ) -> None:
        self._patience = max(seconds, _LEAST_PATIENCE) if patience is None else patience
        self._make_vocabulary, self._workers = vocabulary, worker_count(workers)
        self._seconds, self._memory = seconds, memory
        self._lock = threading.Lock()
        self._first = threading.Lock()
        self._vocabulary: Vocabulary | None = None
        self._pool: CompilerPool | None = None
        self._cache = GrammarCache(cache_bytes)
        self._pending: dict[str, _Pending] = {}
        self._refused: OrderedDict[str, tuple[float, str]] = OrderedDict()
        self._counts: Counter[str] = Counter()
        self._buckets = [0] * (len(SECONDS_BUCKETS) + 1)
        self._took = 0.0
        self._closed = False

    @property
    def vocabulary(self) -> Vocabulary:
        """The model's vocabulary; made on the first use, which takes a moment."""
        with self._first:
            if self._vocabulary is None:
                bindings.check_available()
                self._vocabulary = self._make_vocabulary()
            return self._vocabulary

    def compile(self, wanted: StructuredOutputs) -> PreparedGrammar:
        """Compiles, or finds what was compiled before; blocks.

        Raises:
            GrammarError: what is asked for is malformed, or (GrammarTimeoutError) too much.
            ConfigError: xgrammar is not installed.
        """
        (made,) = self.compile_all([wanted])
        if isinstance(made, GrammarError):
            raise made
        return made

    def compile_all(self, wanted: Sequence[StructuredOutputs]) -> list[PreparedGrammar | GrammarError]:
        """Several at once; in the place of one that fails is its error. Raises ConfigError as :meth:`compile` does."""
        begun: list[tuple[Job, str, Compiled | _Wait] | GrammarError] = []
        try:
            for each in wanted:
                try:
                    job, (key, found) = self._screen_and_begin(each)
                    begun.append((job, key, found))
                except GrammarError as e:
                    begun.append(e)
            return [one if isinstance(one, GrammarError) else self._awaited(*one) for one in begun]
        finally:
            for one in begun:
                if not isinstance(one, GrammarError) and isinstance(one[2], _Wait):
                    one[2].leave()

    def _awaited(self, job: Job, key: str, found: Compiled | _Wait) -> PreparedGrammar | GrammarError:
        try:
            return self._prepared(key, job, found if isinstance(found, Compiled) else found.future.result())
        except GrammarError as e:
            return e

    async def acompile(self, wanted: StructuredOutputs) -> PreparedGrammar:
        """Compiles as :meth:`compile` does, without blocking the event loop; cancelled, it ends a compilation that nobody else wants.

        Raises:
            GrammarBusyError: no process began with it in time, since all were busy with others.
        """
        beginning = asyncio.ensure_future(asyncio.to_thread(self._screen_and_begin, wanted))
        try:
            job, (key, found) = await asyncio.shield(beginning)
        except asyncio.CancelledError:
            beginning.add_done_callback(_leave_begun)
            raise
        if isinstance(found, Compiled):
            return self._prepared(key, job, found)
        try:
            loop = asyncio.get_running_loop()
            done = asyncio.Event()

            def wake(_: object) -> None:
                with contextlib.suppress(RuntimeError):  # the loop is closed
                    loop.call_soon_threadsafe(done.set)

            found.future.add_done_callback(wake)
            try:
                await asyncio.wait_for(done.wait(), self._patience)
            except TimeoutError:
                if not found.begun:
                    self._count("starved")
                    raise GrammarBusyError(
                        f"grammars of other requests kept the processes that compile busy for {self._patience:g} s; try again later"
                    ) from None
                await done.wait()  # it has a limit of its own
            return self._prepared(key, job, found.future.result())
        finally:
            found.leave()

    def _screen_and_begin(self, wanted: StructuredOutputs) -> tuple[Job, tuple[str, Compiled | _Wait]]:
        job = self._screened(wanted)
        return job, self._begin(job)

    def _screened(self, wanted: StructuredOutputs) -> Job:
        try:
            return screen(wanted)
        except GrammarError:
            self._count("screened_out")
            raise

    def _begin(self, job: Job) -> tuple[str, Compiled | _Wait]:
        """What was compiled before, or a part in a compilation."""
        vocabulary = self.vocabulary
        h = hashlib.blake2b(digest_size=20)
        for part in (job.kind, job.source, repr(job.options), vocabulary.fingerprint):
            h.update(len(part).to_bytes(8, "little") + part.encode())
        key = h.hexdigest()
        with self._lock:
            if self._closed:
                raise EngineDeadError("grammars are compiled no more: what they are for is closed")
            if (found := self._cache.get(key)) is not None:
                self._counts["cache_hits"] += 1
                return key, found
            if (refused := self._refused.get(key)) is not None and time.monotonic() < refused[0]:
                self._counts["refused_again"] += 1
                raise GrammarTimeoutError(refused[1])
            pending = self._pending.get(key)
            if pending is None:
                if self._pool is None:
                    self._pool = CompilerPool(vocabulary, self._workers, self._seconds, self._memory)
                pending = self._pending[key] = _Pending(self._pool.submit(job.kind, job.source, dict(job.options)))
                self._counts["cache_misses"] += 1
                new = True
            else:
                self._counts["joined"] += 1
                new = False
            pending.waiters += 1
        if new:  # outside of the lock: it may have ended already
            pending.task.future.add_done_callback(lambda future: self._ended(key, pending, future))
        return key, _Wait(self, key, pending)

    def _leave(self, key: str, pending: _Pending) -> None:
        with self._lock:
            pending.waiters -= 1
            if pending.waiters or pending.future.done() or self._pending.get(key) is not pending:
                return
            del self._pending[key]
            self._counts["cancelled"] += 1
            pool = self._pool
        if pool is not None:
            pool.cancel(pending.task)

    def _ended(self, key: str, pending: _Pending, future: Future[Compiled]) -> None:
        """On the pool's thread: counts, keeps, and tells those who wait."""
        error = future.exception()
        with self._lock:
            if self._pending.get(key) is not pending:
                return  # nobody waits
            del self._pending[key]
            if error is None:
                made = future.result()
                self._counts["compiles"] += 1
                self._took += made.seconds
                self._buckets[bisect.bisect_left(SECONDS_BUCKETS, made.seconds)] += 1
                self._cache.put(key, made)
            elif isinstance(error, GrammarBusyError):
                self._counts["starved"] += 1
            elif isinstance(error, GrammarTimeoutError):
                self._counts["timeouts"] += 1
                if self._cache.limit:
                    self._refused[key] = time.monotonic() + _REFUSE_SECONDS, str(error)
                    while len(self._refused) > _MOST_REFUSED:
                        self._refused.popitem(last=False)
            else:
                self._counts["failures"] += 1
        if error is None:
            pending.future.set_result(made)
        else:
            pending.future.set_exception(error)

    def _prepared(self, key: str, job: Job, compiled: Compiled) -> PreparedGrammar:
        if job.strict and compiled.reports:
            raise GrammarError(f"strict was asked for, and the compiler says: {compiled.reports[0]}; change that, or leave strict out")
        reports = (*job.reports, *compiled.reports)
        if reports:
            self._count("reported")
        return PreparedGrammar(ReadyGrammar(key, self.vocabulary.fingerprint, compiled.data), reports)

    def _count(self, name: str) -> None:
        with self._lock:
            self._counts[name] += 1

    def stats(self) -> dict[str, float]:
        """Totals since the start (``compiles``, ``cache_hits``, ``cache_misses``, ``joined``: a compilation under way, ``timeouts``: time
        or memory, ``starved``: no processor or no process in time, ``failures``: malformed, ``screened_out``: before anything was
        compiled, ``refused_again``, ``cancelled``, ``reported``: with keywords that are not held to, ``cache_evicted``,
        ``workers_started``, ``workers_killed``), what there is now (``cache_entries``, ``cache_bytes``, ``workers``, ``queued``), and
        times: ``compile_seconds_sum``, ``compile_seconds_count`` and ``compile_seconds_le_X`` (cumulative)."""
        with self._lock:
            found: dict[str, float] = {
                name: self._counts[name]
                for name in (
                    "compiles",
                    "cache_hits",
                    "cache_misses",
                    "joined",
                    "timeouts",
                    "starved",
                    "failures",
                    "screened_out",
                    "refused_again",
                    "cancelled",
                    "reported",
                )
            }
            found |= {"cache_entries": len(self._cache), "cache_bytes": self._cache.size, "cache_evicted": self._cache.evicted}
            pool = {"workers": 0, "queued": 0, "started": 0, "killed": 0} if self._pool is None else self._pool.counts()
            found |= {"workers": pool["workers"], "queued": pool["queued"]}
            found |= {"workers_started": pool["started"], "workers_killed": pool["killed"]}
            found |= {"compile_seconds_sum": self._took, "compile_seconds_count": sum(self._buckets)}
            total = 0
            for end, count in zip((*map(str, SECONDS_BUCKETS), "+Inf"), self._buckets, strict=True):
                total += count
                found[f"compile_seconds_le_{end}"] = total
        return found

    def worker_pids(self) -> list[int]:
        """Ids of the processes that compile."""
        with self._lock:
            pool = self._pool
        return [] if pool is None else pool.pids()

    def close(self) -> None:
        """Ends the processes; whoever waits is told. Idempotent."""
        with self._lock:
            self._closed = True
            pool = self._pool
        if pool is not None:
            pool.close()


def _leave_begun(beginning: asyncio.Future[tuple[Job, tuple[str, Compiled | _Wait]]]) -> None:
    """Whoever began to wait has left meanwhile."""
    if beginning.cancelled() or beginning.exception() is not None:
        return
    _, (_, found) = beginning.result()
    if isinstance(found, _Wait):
        found.leave()
