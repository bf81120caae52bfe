"""`AsyncLLM`: many asynchronous callers, one engine process.

Owns: the callers' requests and mailboxes, tokenizing and text. Never touches: tensors, the step loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any

from deepinfer.engine.async_engine import wire
from deepinfer.engine.async_engine.child import EngineChild
from deepinfer.engine.chat_template import Message
from deepinfer.engine.config import EngineConfig
from deepinfer.engine.input_processor import InputProcessor, ModelLimits, Prompt, PromptDict
from deepinfer.engine.output_processor import OutputMode, OutputProcessor, check_mode, merge_deltas
from deepinfer.engine.text_side import TextSide, load_text_side
from deepinfer.engine.tokenizer import Tokenizer
from deepinfer.errors import DeepInferError, EngineDeadError, InvalidRequestError
from deepinfer.outputs import RequestOutput
from deepinfer.sampling import SamplingParams

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

ENGINE = "deepinfer.engine.engine:Engine"
_CLOSED = "this AsyncLLM is closed; create another one"
_LONG_PROMPT = 20_000
"""Characters above which tokenizing leaves the event loop's thread."""


class _Mailbox:
    """The newest outputs of one request, for one reader; a slow reader finds several as one."""

    def __init__(self, mode: OutputMode) -> None:
        self._mode = mode
        self._output: RequestOutput | None = None
        self._error: DeepInferError | None = None
        self._news = asyncio.Event()

    def put(self, output: RequestOutput) -> None:
        merge = self._mode == "delta" and self._output is not None
        self._output = merge_deltas(self._output, output) if merge and self._output is not None else output
        self._news.set()

    def fail(self, error: DeepInferError) -> None:
        self._error = error
        self._news.set()

    async def get(self) -> RequestOutput:
        """The next output. Raises what the request failed with, after what came before it."""
        await self._news.wait()
        output, self._output = self._output, None
        if output is None:
            assert self._error is not None
            raise type(self._error)(*self._error.args)
        if self._error is None:
            self._news.clear()
        return output


class AsyncLLM:
    """A model whose engine runs in a process of its own; for use within one event loop.

    Use it as an asynchronous context manager, or await :meth:`aclose`. Making one starts the process; :meth:`ready`, and the
    first request, wait until the model is loaded.

    Args: see :class:`~deepinfer.engine.config.EngineConfig`.

    Raises:
        ConfigError, ModelNotFoundError, UnsupportedModelError: here already where they can be seen without loading; what loading
            finds is raised by :meth:`ready`.
    """

    def __init__(self, model: str, **settings: Any) -> None:
        from deepinfer.models import resolve_model
        from deepinfer.models.registry import registrations

        self.config = EngineConfig.from_args(model, **settings)
        c = self.config
        resolved = resolve_model(c.model, revision=c.revision, load_format=c.load_format)
        self._begin(EngineChild(), wire.Start(c, ENGINE, registrations()))
        try:
            self._text: TextSide = load_text_side(c, resolved)
        except BaseException:
            self.close()
            raise

    def _begin(self, child: EngineChild, start: wire.Start) -> None:
        self._child = child
        self._start = start
        self._loop: asyncio.AbstractEventLoop | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._reading: asyncio.Task[None] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._dead: DeepInferError | None = None
        self._inputs: InputProcessor | None = None
        self._outputs = OutputProcessor(None)
        self._boxes: dict[str, _Mailbox] = {}
        self._logits: dict[int, asyncio.Future[NDArray[np.float32]]] = {}
        self._calls = itertools.count()
        self.max_num_seqs = 0

    def __repr__(self) -> str:
        state = f"dead: {self._dead}" if self._dead else "ready" if self._inputs else "starting"
        return f"AsyncLLM({self.config.model!r}, {state}, {len(self._boxes)} unfinished)"

    # Start

    async def ready(self) -> None:
        """Waits until the model is loaded.

        Raises:
            ConfigError, CapacityError, CheckpointError, ...: what loading it found.
            EngineDeadError: the process has ended.
        """
        loop = asyncio.get_running_loop()
        if self._loop is not None and self._loop is not loop:
            raise InvalidRequestError("this AsyncLLM belongs to another event loop; create one in each loop")
        if self._dead is not None:
            raise type(self._dead)(*self._dead.args)
        if self._connecting is None:
            self._loop = loop
            self._connecting = loop.create_task(self._connect())
        await asyncio.shield(self._connecting)

    async def _connect(self) -> None:
        reader, self._writer = await asyncio.open_connection(sock=self._child.socket.dup())
        self._send(self._start)
        unpacker = wire.Unpacker()
        early: list[Any] = []
        with contextlib.suppress(ConnectionError):  # a process that is killed resets the connection
            while not early and (data := await reader.read(1 << 18)):
                early += unpacker.feed(data)
        match early[:1]:
            case [wire.Ready(max_model_len, vocab_size, max_num_seqs)]:
                self.max_num_seqs = max_num_seqs
                self._inputs = self._text.input_processor(ModelLimits(max_model_len, vocab_size))
                self._outputs = OutputProcessor(self._text.tokenizer)
                self._reading = asyncio.create_task(self._read(reader, unpacker))
                return
            case [wire.Died(error)]:
                failure = error.exception()
            case _:
                failure = EngineDeadError(f"the engine process {await self._how_it_ended()} while the model was loading")
        self._die(failure)
        raise failure

    @property
    def _ready_inputs(self) -> InputProcessor:
        if self._inputs is None:
            raise EngineDeadError("the model is not loaded yet; await ready() first") if self._dead is None else self._dead
        return self._inputs

    # What it is

    @property
    def max_model_len(self) -> int:
        """Longest prompt plus answer, in tokens; known after :meth:`ready`."""
        return self._ready_inputs.limits.max_model_len

    @property
    def vocab_size(self) -> int:
        """Number of token ids the model gives logits for; known after :meth:`ready`."""
        return self._ready_inputs.limits.vocab_size

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """All ids that end a sequence."""
        return self._text.eos_ids

    @property
    def has_chat_template(self) -> bool:
        """Whether :meth:`chat_prompt` can be used."""
        return self._text.chat_template is not None

    @property
    def is_running(self) -> bool:
        """Whether requests can be served; False at once when the engine has died or was closed."""
        return self._dead is None and self._child.process.poll() is None

    @property
    def engine_pid(self) -> int:
        """Process id of the engine."""
        return self._child.pid

    def get_tokenizer(self) -> Tokenizer:
        """The tokenizer. Raises ConfigError if the model has none."""
        return self._ready_inputs.tokenizer

    def default_sampling_params(self, **values: Any) -> SamplingParams:
        """The sampling defaults of the model's `generation_config.json`, overridden by ``values``."""
        return SamplingParams.from_generation_config(self._text.generation_config, **values)

    # Requests

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        mode: OutputMode = "cumulative",
    ) -> AsyncIterator[RequestOutput]:
        """Answers one prompt, output by output.

        Args:
            prompt: text, token ids, or a mapping of either.
            sampling_params: ``None`` = the model's defaults.
            request_id: chosen if ``None``; must differ from those of unfinished requests.
            mode: ``"cumulative"``: each output holds all so far; ``"delta"``: only what is new; ``"final"``: one output at the
                end. A reader that falls behind gets several outputs as one, nothing is lost.

        Closing the iterator, or cancelling the task that waits for it, aborts the request.

        Raises (from the first step of the iterator):
            InvalidRequestError: the request is wrong; no other is affected.
            EngineDeadError: the engine has ended; within a second of it for every waiting request.
        """
        check_mode(mode)
        await self.ready()
        inputs = self._ready_inputs
        params = inputs.default_params() if sampling_params is None else sampling_params
        request_id = inputs.new_request_id() if request_id is None else request_id
        if not isinstance(request_id, str) or request_id in self._boxes:
            raise InvalidRequestError(f"request id {request_id!r} is in use or no string; choose another")
        box = self._boxes[request_id] = _Mailbox(mode)
        try:
            if isinstance(prompt, str) and len(prompt) > _LONG_PROMPT:
                request, text = await asyncio.to_thread(inputs.prepare, prompt, params, request_id, stream=mode != "final")
            else:
                request, text = inputs.prepare(prompt, params, request_id, stream=mode != "final")
            if self._dead is not None:
                raise type(self._dead)(*self._dead.args)
            self._outputs.add(request, text, mode)
            self._send(wire.Add(request))
            finished = False
            while not finished:
                output = await box.get()
                finished = output.finished
                yield output
        finally:
            del self._boxes[request_id]
            if self._outputs.drop(request_id) is not None:
                self._send(wire.Abort(request_id))

    def chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        mode: OutputMode = "cumulative",
        **template_values: Any,
    ) -> AsyncIterator[RequestOutput]:
        """Answers a conversation as :meth:`generate` does; without ``sampling_params`` as long as the model's length allows."""
        params = self.default_sampling_params(max_tokens=None) if sampling_params is None else sampling_params
        return self.generate(self.chat_prompt(messages, **template_values), params, request_id=request_id, mode=mode)

    def chat_prompt(self, messages: Sequence[Message], **template_values: Any) -> PromptDict:
        """A conversation as a prompt. Raises InvalidRequestError if there is no template or it refuses the messages."""
        limits = ModelLimits(0, 0)  # a conversation is rendered the same whatever the limits
        return (self._inputs or self._text.input_processor(limits)).chat_prompt(messages, **template_values)

    async def abort(self, request_id: str) -> None:
        """Ends a request; its iterator gives a last output with finish reason "abort". Unknown ids are ignored."""
        last = self._outputs.drop(request_id)
        if last is not None:
            self._send(wire.Abort(request_id))
            self._boxes[request_id].put(last)

    async def logits(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """Logits float32 ``[len(token_ids), vocab_size]`` of every position, in one forward."""
        await self.ready()
        call = next(self._calls)
        waiting = self._logits[call] = asyncio.get_running_loop().create_future()
        try:
            self._send(wire.Logits(call, [int(i) for i in token_ids]))
            return await waiting
        finally:
            del self._logits[call]

    # The other process

    def _send(self, message: Any) -> None:
        if self._writer is not None and self._dead is None:
            self._writer.write(wire.pack(message))

    def _stop_at(self, request_id: str, index: int, num_tokens: int) -> None:
        self._send(wire.StopAt(request_id, index, num_tokens))

    async def _read(self, reader: asyncio.StreamReader, unpacker: wire.Unpacker) -> None:
        failure: DeepInferError | None = None
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 18):
                for message in unpacker.feed(data):
                    if isinstance(message, wire.Died):
                        failure = EngineDeadError(f"the engine stopped: {message.error.message}")
                    else:
                        self._handle(message)
        if self._dead is None:
            self._die(failure or EngineDeadError(f"the engine process {await self._how_it_ended()}; create another AsyncLLM"))

    def _handle(self, message: Any) -> None:
        match message:
            case wire.Deltas(deltas):
                for output in self._outputs.process(deltas, self._stop_at):
                    box = self._boxes.get(output.request_id)
                    if box is not None:
                        box.put(output)
            case wire.Rejected(request_id, error):
                self._outputs.drop(request_id)
                if request_id in self._boxes:
                    self._boxes[request_id].fail(error.exception())
            case wire.LogitsDone(call, values, error):
                waiting = self._logits.get(call)
                if waiting is None or waiting.done():
                    return
                if values is not None:
                    waiting.set_result(values)
                elif error is not None:
                    waiting.set_exception(error.exception())

    async def _how_it_ended(self) -> str:
        return await asyncio.to_thread(self._child.how_it_ended)

    def _die(self, error: DeepInferError) -> None:
        """Everybody who waits, and everybody who comes, gets the error."""
        if self._dead is not None:
            return
        self._dead = error
        for request_id, box in self._boxes.items():
            self._outputs.drop(request_id)
            box.fail(error)
        for waiting in self._logits.values():
            if not waiting.done():
                waiting.set_exception(type(error)(*error.args))

    # The end

    def close(self) -> None:
        """Ends the engine process and fails what is waiting; idempotent. Blocks until it has ended; see :meth:`aclose`."""
        self._die(EngineDeadError(_CLOSED))
        self._end_child()

    def _end_child(self) -> None:
        self._child.hang_up()
        if self._inputs is None:
            self._child.process.terminate()  # it may be loading for long
        self._child.end()

    async def aclose(self) -> None:
        """Like :meth:`close`, without blocking the event loop."""
        if self._writer is not None and self._dead is None:
            with contextlib.suppress(ConnectionError):
                await self._writer.drain()
        self._die(EngineDeadError(_CLOSED))
        await asyncio.to_thread(self._end_child)
        for task in (self._connecting, self._reading):
            if task is not None:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, DeepInferError):
                    await task
        if self._writer is not None:
            self._writer.close()

    async def __aenter__(self) -> AsyncLLM:
        try:
            await self.ready()
        except BaseException:
            await self.aclose()
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()
