"""`AsyncLLM`: many asynchronous callers, one engine process.

Owns: which process computes, and what happens when it ends. Never touches: tensors, the step loop, text.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from deepinfer.engine.async_engine import wire
from deepinfer.engine.async_engine.child import EngineChild
from deepinfer.engine.async_engine.front import HANG_TIMEOUT, AsyncFront, check_hang_timeout
from deepinfer.engine.async_engine.line import EngineLine
from deepinfer.engine.config import EngineConfig
from deepinfer.engine.request import EngineRequest
from deepinfer.engine.text_side import load_text_side
from deepinfer.errors import DeepInferError, EngineDeadError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from deepinfer import _core
    from deepinfer.engine.step_log import EngineMetrics
    from deepinfer.structured.matcher import ReadyGrammar


_ENGINE = "deepinfer.engine.engine:Engine"
_GROUP_ENGINE = "deepinfer.engine.data_parallel.group_engine:GroupEngine"


def engine_start(config: EngineConfig) -> wire.Start:
    """The first message to a process that is to be the engine of these settings."""
    from deepinfer.models.registry import registrations

    group = config.data_parallel_size > 1 and config.rank is None
    return wire.Start(config, _GROUP_ENGINE if group else _ENGINE, registrations())


class AsyncLLM(AsyncFront):
    """A model whose engine runs in a process of its own; for use within one event loop.

    Use it as an asynchronous context manager, or await :meth:`aclose`. Making one starts the process; :meth:`ready`, and the
    first request, wait until the model is loaded.

    Args:
        hang_timeout: seconds without a sign of life from an engine process that has work, after which it is killed and its requests
            fail with EngineDeadError; 0 = never. Above the longest step that can be: a loop in a step gives no sign.
        settings: see :class:`~deepinfer.engine.config.EngineConfig`.

    Raises:
        ConfigError, ModelNotFoundError, UnsupportedModelError: here already where they can be seen without loading; what loading
            finds is raised by :meth:`ready`.
    """

    _mark = ""  # tells this front's requests from those of others

    def __init__(self, model: str, *, hang_timeout: float = HANG_TIMEOUT, **settings: Any) -> None:
        from deepinfer.models import resolve_model

        super().__init__()
        self.config = EngineConfig.from_args(model, **settings)
        self._numbers = itertools.count()
        c = self.config
        resolved = resolve_model(c.model, revision=c.revision, load_format=c.load_format)
        check_hang_timeout(hang_timeout)
        self._line = self._make_line(engine_start(c), hang_timeout)
        try:
            self._text = load_text_side(c, resolved)
        except BaseException:
            self.close()
            raise

    def _make_line(self, start: wire.Start, hang_timeout: float) -> EngineLine:
        return EngineLine(start, hang_timeout=hang_timeout, has_work=lambda: len(self._outputs) > 0)

    # What it is

    @property
    def is_running(self) -> bool:
        """Whether requests can be served; False at once when the engine has died or was closed."""
        return self._dead is None and self._line.alive

    @property
    def engine_pid(self) -> int:
        """Process id of the engine."""
        return self._line.child.pid

    @property
    def _child(self) -> EngineChild:
        assert isinstance(self._line.child, EngineChild)
        return self._line.child

    async def logits(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """Logits float32 ``[len(token_ids), vocab_size]`` of every position, in one forward."""
        await self.ready()
        ids = [int(i) for i in token_ids]
        values: NDArray[np.float32] = await self._line.call(lambda number: wire.Logits(number, ids))
        return values

    async def core_counts(self) -> _core.Counts:
        """The engine's blocks and state slots by state."""
        await self.ready()
        counts: _core.Counts = await self._line.call(wire.Count)
        return counts

    @property
    def engines(self) -> tuple[str, ...]:
        """``"engine"``, or of several ranks ``"rank0"`` and so on."""
        ranks = self.config.data_parallel_size
        return ("engine",) if ranks == 1 else tuple(f"rank{rank}" for rank in range(ranks))

    async def measure(self, engine: str) -> EngineMetrics:
        """See the base. Raises NoAnswerError if a rank does not answer."""
        await self.ready()
        rank = self.engines.index(engine)
        measured: EngineMetrics = await self._line.call(lambda number: wire.Measure(number, rank))
        return measured

    @property
    def restarts(self) -> dict[str, int]:
        """None: an engine that has ended is not started again."""
        return {"engine": 0}

    # The other process

    async def _connect(self) -> wire.Ready:
        ready = await self._line.connect()
        self._line.listen(self._hear, lambda error: self._die(EngineDeadError(f"{error}; start another one")))
        return ready

    def _submit(self, request: EngineRequest) -> None:
        # An id that its caller uses again must not bring the new request what is still on its way for the old one.
        key = self._boxes[request.request_id].key = f"{request.request_id}/{self._mark}{next(self._numbers)}"
        self._line.send(wire.Add.of(replace(request, request_id=key)))

    def _cancel(self, request_id: str) -> None:
        self._line.send(wire.Abort(self._boxes[request_id].key))

    def _stop_at(self, request_id: str, index: int, num_tokens: int) -> None:
        if request_id in self._boxes:
            self._line.send(wire.StopAt(self._boxes[request_id].key, index, num_tokens))

    def _caller_of(self, key: str) -> str | None:
        """The caller's id of the request that the engine has under ``key``; ``None`` if nobody waits for it any more."""
        request_id = key.rpartition("/")[0]
        box = self._boxes.get(request_id)
        return request_id if box is not None and box.key == key else None

    def _hear(self, message: Any) -> None:
        match message:
            case wire.Deltas(deltas):
                known = []
                for delta in deltas:
                    if (request_id := self._caller_of(delta.request_id)) is not None:
                        delta.request_id = request_id
                        known.append(delta)
                self._take(known)
            case wire.Rejected(key, error):
                request_id = self._caller_of(key)
                if request_id is not None:
                    self._fail(request_id, error.exception())

    def _die(self, error: DeepInferError) -> None:
        if self._dead is not None:
            return
        super()._die(error)
        self._line.fail_calls(error)

    async def _shelve(self, grammar: ReadyGrammar) -> None:
        assert self._grammars is not None
        self._line.learn(self._grammars.vocabulary)
        await self._line.warm(grammar)

    # The end

    async def _drain(self) -> None:
        await self._line.drain()

    def _end_processes(self) -> None:
        self._line.end()

    async def _close_lines(self) -> None:
        await self._line.close()
