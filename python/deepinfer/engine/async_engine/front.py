"""What every asynchronous front does: many callers, their requests and mailboxes, text.

Owns: from a prompt to outputs, whoever computes them. Never touches: tensors, the step loop, which process does what (see `client` and
`deepinfer.engine.roles.pair`).
"""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self, cast

from deepinfer.engine.async_engine import wire
from deepinfer.engine.chat_template import ChatTemplate, Message
from deepinfer.engine.config import EngineConfig
from deepinfer.engine.content_parts import has_images
from deepinfer.engine.grammars import make_grammar_service
from deepinfer.engine.image_input import image_rules
from deepinfer.engine.input_processor import InputProcessor, ModelLimits, Prompt, PromptDict
from deepinfer.engine.output_processor import OutputMode, OutputProcessor, check_mode, merge_deltas
from deepinfer.engine.request import EngineRequest, SequenceDelta
from deepinfer.engine.text_side import TextSide
from deepinfer.engine.tokenizer import Tokenizer
from deepinfer.errors import ConfigError, DeepInferError, EngineDeadError, InvalidRequestError, fresh
from deepinfer.outputs import RequestOutput
from deepinfer.sampling import SamplingParams
from deepinfer.structured.matcher import ReadyGrammar
from deepinfer.structured.service import GrammarService, PreparedGrammar
from deepinfer.structured_outputs import StructuredOutputs

if TYPE_CHECKING:
    from deepinfer.engine.step_log import EngineMetrics

_LONG_PROMPT = 20_000
"""Characters above which tokenizing leaves the event loop's thread, as images do."""


HANG_TIMEOUT = 300.0
"""Seconds of silence that no engine with work in it is given to; a first step may compile or page in for minutes."""


def check_hang_timeout(seconds: float) -> None:
    """Raises ConfigError unless it is a number of seconds from 0 up."""
    if not isinstance(seconds, int | float) or isinstance(seconds, bool) or not 0 <= seconds < float("inf"):
        raise ConfigError(f"hang_timeout must be a number of seconds of at least 0 (0 = no limit), got {seconds!r}")


class _Mailbox:
    """The newest outputs of one request, for one reader; a slow reader finds several as one."""

    def __init__(self, mode: OutputMode) -> None:
        self.key = ""  # id of the request in its engine, if that is not the caller's
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
            raise fresh(self._error)
        if self._error is None:
            self._news.clear()
        return output


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request that is ready for the engine, of :meth:`AsyncFront.prepare`; run it once. One that was aborted meanwhile gives its last
    output, and the engine never hears of it."""

    request: EngineRequest
    text: str | None
    mode: OutputMode
    aborted: bool = False


@dataclass(slots=True)
class _Preparing:
    """A request that is not ready yet; ``waits``: for its grammar."""

    aborted: bool = False
    waits: asyncio.Task[PreparedGrammar] | None = None

    def abort(self) -> None:
        self.aborted = True
        if self.waits is not None:
            self.waits.cancel()


class AsyncFront(ABC):
    """Requests and text of many asynchronous callers, within one event loop. Use it as a context manager, or await :meth:`aclose`."""

    config: EngineConfig
    _text: TextSide

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._dead: DeepInferError | None = None
        self._inputs: InputProcessor | None = None
        self._outputs = OutputProcessor(None)
        self._boxes: dict[str, _Mailbox] = {}
        self._preparing: dict[str, _Preparing] = {}
        self._grammars: GrammarService | None = None
        self.max_num_seqs = 0

    def __repr__(self) -> str:
        state = f"dead: {self._dead}" if self._dead else "ready" if self._inputs else "starting"
        return f"{type(self).__name__}({self.config.model!r}, {state}, {len(self._boxes)} unfinished)"

    # What computes

    @abstractmethod
    async def _connect(self) -> wire.Ready:
        """Waits until requests can be served. Raises what loading found."""

    @abstractmethod
    def _submit(self, request: EngineRequest) -> None:
        """Has a request computed; its deltas are to go to :meth:`_take`."""

    @abstractmethod
    def _cancel(self, request_id: str) -> None:
        """Nobody wants a request any more."""

    @abstractmethod
    def _stop_at(self, request_id: str, index: int, num_tokens: int) -> None:
        """A stop string ended one answer after so many tokens."""

    @abstractmethod
    async def _shelve(self, grammar: ReadyGrammar) -> None:
        """Has whatever will compute read a grammar and its vocabulary beside its steps, before a request comes that follows it."""

    @abstractmethod
    async def _drain(self) -> None:
        """Waits until what was sent has left."""

    @abstractmethod
    def _end_processes(self) -> None:
        """Ends every engine process; blocks until they have ended."""

    @abstractmethod
    async def _close_lines(self) -> None:
        """Gives connections back, the processes having ended."""

    # Start

    async def ready(self) -> None:
        """Waits until the model is loaded.

        Raises:
            ConfigError, CapacityError, CheckpointError, ...: what loading it found.
            EngineDeadError: the process has ended.
        """
        loop = asyncio.get_running_loop()
        if self._loop is not None and self._loop is not loop:
            raise InvalidRequestError(f"this {type(self).__name__} belongs to another event loop; create one in each loop")
        if self._dead is not None:
            raise fresh(self._dead)
        if self._connecting is None:
            self._loop = loop
            self._connecting = loop.create_task(self._start())
        await asyncio.shield(self._connecting)

    async def _start(self) -> None:
        try:
            ready = await self._connect()
        except DeepInferError as e:
            self._die(e)
            raise
        self.max_num_seqs = ready.max_num_seqs
        self._outputs = OutputProcessor(self._text.tokenizer)
        self._grammars = make_grammar_service(self.config, self._text, ready.vocab_size)
        if self._dead is not None:  # closed meanwhile
            self._grammars.close()
        rules = image_rules(self.config, ready.images)
        self._inputs = self._text.input_processor(ModelLimits(ready.max_model_len, ready.vocab_size, rules))

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
    def chat_template(self) -> ChatTemplate | None:
        """How conversations become prompts; ``None`` if the model came without a template."""
        return self._text.chat_template

    @property
    def architecture(self) -> str:
        """What the model's configuration calls its architecture."""
        return self._text.architecture

    @property
    def takes_images(self) -> bool:
        """Whether prompts may have images; known after :meth:`ready`."""
        return self._ready_inputs.limits.images is not None

    @property
    @abstractmethod
    def engines(self) -> tuple[str, ...]:
        """Names of the engines that count, each by itself."""

    @abstractmethod
    async def measure(self, engine: str) -> EngineMetrics:
        """Everything that one of :attr:`engines` counts. It answers between two steps, so when its step in work has been planned and
        handed out at the latest; one that is being started again, when it is up. Raises what it cannot be had for, which concerns
        nobody else."""

    async def metrics(self) -> dict[str, EngineMetrics]:
        """Everything that is counted, of each engine by its name; see :meth:`measure`, which waits for none of the others."""
        names = self.engines
        return dict(zip(names, await asyncio.gather(*map(self.measure, names)), strict=True))

    @property
    def restarts(self) -> dict[str, int]:
        """How often each engine process was started again."""
        return {}

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
        grammar: PreparedGrammar | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Answers one prompt, output by output.

        Args:
            prompt: text, token ids, or a mapping of either.
            sampling_params: ``None`` = the model's defaults.
            request_id: chosen if ``None``; must differ from those of unfinished requests.
            mode: ``"cumulative"``: each output holds all so far; ``"delta"``: only what is new; ``"final"``: one output at the
                end. A reader that falls behind gets several outputs as one, nothing is lost.
            grammar: what :meth:`compile_grammar` gave for ``sampling_params.structured_outputs``, which is then not compiled again.

        A request with structured outputs waits here until they are compiled; the event loop does not. Closing the iterator, or
        cancelling the task that waits for it, aborts the request.

        Raises (from the first step of the iterator):
            InvalidRequestError: the request is wrong; no other is affected. GrammarError: its structured outputs are.
            EngineDeadError: the engine has ended; within a second of it for every waiting request.
        """
        prepared = await self.prepare(prompt, sampling_params, request_id=request_id, mode=mode, grammar=grammar)
        async with contextlib.aclosing(self.run(prepared)) as outputs:
            async for output in outputs:
                yield output

    async def prepare(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        mode: OutputMode = "cumulative",
        grammar: PreparedGrammar | None = None,
    ) -> Prepared:
        """Everything about a request that can be wrong or slow before the engine hears of it, structured outputs compiled; arguments as of
        :meth:`generate`.

        Raises:
            InvalidRequestError: the request is wrong; GrammarError: its structured outputs are; GrammarBusyError: others are compiled.
            EngineDeadError: the engine has ended.
        """
        check_mode(mode)
        await self.ready()
        inputs = self._ready_inputs
        params = inputs.default_params() if sampling_params is None else sampling_params
        request_id = inputs.new_request_id() if request_id is None else request_id
        self._check_id(request_id)
        state = self._preparing[request_id] = _Preparing()
        try:
            slow = len(prompt) > _LONG_PROMPT if isinstance(prompt, str) else isinstance(prompt, Mapping) and "images" in prompt
            if slow:
                request, text = await asyncio.to_thread(inputs.prepare, prompt, params, request_id, stream=mode != "final")
            else:
                request, text = inputs.prepare(prompt, params, request_id, stream=mode != "final")
            if (params.form is not None or grammar is not None) and not state.aborted:
                state.waits = asyncio.create_task(self._ready_grammar(params.form, grammar))
                try:
                    request = replace(request, grammar=(await state.waits).grammar)
                except asyncio.CancelledError:
                    me = asyncio.current_task()
                    if not state.aborted or (me is not None and me.cancelling()):
                        raise
            return Prepared(request, text, mode, state.aborted)
        finally:
            del self._preparing[request_id]

    async def _ready_grammar(self, form: StructuredOutputs | None, grammar: PreparedGrammar | None) -> PreparedGrammar:
        """A grammar that the engine has read."""
        grammar = grammar or await self.compile_grammar(form)
        await self._shelve(grammar.grammar)
        return grammar

    def _check_id(self, request_id: object) -> None:
        if not isinstance(request_id, str) or request_id in self._boxes or request_id in self._preparing:
            raise InvalidRequestError(f"request id {request_id!r} is in use or no string; choose another")

    async def run(self, prepared: Prepared) -> AsyncGenerator[RequestOutput]:
        """Answers a prepared request, as :meth:`generate` does."""
        request_id = prepared.request.request_id
        if self._dead is not None:
            raise fresh(self._dead)
        self._check_id(request_id)
        box = self._boxes[request_id] = _Mailbox(prepared.mode)
        try:
            self._outputs.add(prepared.request, prepared.text, prepared.mode)
            if prepared.aborted:
                last = self._outputs.drop(request_id)
                assert last is not None
                yield last
                return
            self._submit(prepared.request)
            finished = False
            while not finished:
                output = await box.get()
                finished = output.finished
                yield output
        finally:
            if self._outputs.drop(request_id) is not None:
                self._cancel(request_id)
            del self._boxes[request_id]

    def chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        mode: OutputMode = "cumulative",
        grammar: PreparedGrammar | None = None,
        **template_values: Any,
    ) -> AsyncIterator[RequestOutput]:
        """Answers a conversation as :meth:`generate` does; without ``sampling_params`` as long as the model's length allows."""
        params = self.default_sampling_params(max_tokens=None) if sampling_params is None else sampling_params
        if self._inputs is None and has_images(messages):
            return self._chat_once_ready(messages, params, request_id, mode, grammar, template_values)
        return self.generate(self.chat_prompt(messages, **template_values), params, request_id=request_id, mode=mode, grammar=grammar)

    async def _chat_once_ready(
        self,
        messages: Sequence[Message],
        params: SamplingParams,
        request_id: str | None,
        mode: OutputMode,
        grammar: PreparedGrammar | None,
        template_values: dict[str, Any],
    ) -> AsyncIterator[RequestOutput]:
        """What images a model takes is known when its engine is up."""
        await self.ready()
        stream = self.generate(self.chat_prompt(messages, **template_values), params, request_id=request_id, mode=mode, grammar=grammar)
        async with contextlib.aclosing(cast("AsyncGenerator[RequestOutput]", stream)) as outputs:
            async for output in outputs:
                yield output

    def chat_prompt(self, messages: Sequence[Message], **template_values: Any) -> PromptDict:
        """A conversation as a prompt; one with images only after :meth:`ready`. Raises InvalidRequestError if there is no template or it
        refuses the messages."""
        if self._inputs is None and has_images(messages):
            raise InvalidRequestError("what images the model takes is not known yet; await ready() before chat_prompt()")
        limits = ModelLimits(0, 0)  # a conversation is rendered the same whatever the limits
        return (self._inputs or self._text.input_processor(limits)).chat_prompt(messages, **template_values)

    async def compile_grammar(self, structured_outputs: StructuredOutputs | Mapping[str, Any] | None) -> PreparedGrammar:
        """Compiles structured outputs ahead of :meth:`generate`, so that what is wrong with them shows before an answer begins.

        Cancelled, it ends a compilation that nobody else waits for.

        Raises:
            GrammarError: they are malformed, or strict with keywords that would not be held to; GrammarTimeoutError: too much;
                GrammarBusyError: they may be good, but there was no processor or no process for them in time.
            ConfigError: xgrammar is not installed.
        """
        wanted = StructuredOutputs.of(structured_outputs)
        if wanted is None:
            raise InvalidRequestError("there are no structured outputs to compile; leave grammar out")
        await self.ready()
        assert self._grammars is not None
        return await self._grammars.acompile(wanted)

    def structured_stats(self) -> dict[str, float]:
        """What compiling grammars has cost so far, see `deepinfer.structured.service.GrammarService.stats`; empty before :meth:`ready`."""
        return {} if self._grammars is None else self._grammars.stats()

    async def abort(self, request_id: str) -> None:
        """Ends a request; its iterator gives a last output with finish reason "abort". A grammar that is being compiled for it, and for
        nobody else, is given up. Unknown ids are ignored."""
        if (state := self._preparing.get(request_id)) is not None:
            state.abort()
            return
        last = self._outputs.drop(request_id)
        if last is not None:
            self._cancel(request_id)
            self._boxes[request_id].put(last)

    def end_answer(self, request_id: str, index: int) -> None:
        """Ends one answer of a request here, as a stop string would; the others go on. What has ended is ignored."""
        cut, output = self._outputs.end_answer(request_id, index)
        if cut is not None:
            self._stop_at(request_id, index, cut)
        if output is not None and request_id in self._boxes:
            self._boxes[request_id].put(output)

    # News

    def _take(self, deltas: Iterable[SequenceDelta]) -> None:
        """Turns deltas into outputs for whoever waits for them."""
        for output in self._outputs.process(deltas, self._stop_at):
            box = self._boxes.get(output.request_id)
            if box is not None:
                box.put(output)

    def _fail(self, request_id: str, error: DeepInferError) -> None:
        """Ends a request with an error."""
        self._outputs.drop(request_id)
        if request_id in self._boxes:
            self._boxes[request_id].fail(error)

    def _die(self, error: DeepInferError) -> None:
        """Everybody who waits, and everybody who comes, gets the error."""
        if self._dead is not None:
            return
        self._dead = error
        for request_id in list(self._boxes):
            self._fail(request_id, error)

    # The end

    def _closed(self) -> EngineDeadError:
        return EngineDeadError(f"this {type(self).__name__} is closed; create another one")

    def close(self) -> None:
        """Ends what computes and fails what is waiting; idempotent. Blocks until it has ended; see :meth:`aclose`."""
        self._die(self._closed())
        self._end_grammars()
        self._end_processes()

    def _end_grammars(self) -> None:
        if self._grammars is not None:
            self._grammars.close()

    async def aclose(self) -> None:
        """Like :meth:`close`, without blocking the event loop."""
        if self._dead is None:
            await self._drain()
        self._die(self._closed())
        await asyncio.to_thread(self._end_grammars)
        await asyncio.to_thread(self._end_processes)
        if self._connecting is not None:
            self._connecting.cancel()
            with contextlib.suppress(asyncio.CancelledError, DeepInferError):
                await self._connecting
        await self._close_lines()

    async def __aenter__(self) -> Self:
        try:
            await self.ready()
        except BaseException:
            await self.aclose()
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()
