"""What a user imports for scripts and batches: `LLM`, which drives an engine in this process.

Owns: that front end. Never touches: tensors, scheduling, HTTP. Those for servers are `AsyncLLM` (`deepinfer.engine.async_engine`), with an
engine in a process of its own, and `PrefillDecodePair` (`deepinfer.engine.roles.pair`), with two.
"""

from __future__ import annotations

import os
import select
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from deepinfer.engine.chat_template import Message
from deepinfer.engine.config import EngineConfig
from deepinfer.engine.grammars import make_grammar_service
from deepinfer.engine.image_input import image_rules
from deepinfer.engine.input_processor import ModelLimits, Prompt, PromptDict, match_params, split_conversations, split_prompts
from deepinfer.engine.interrupt import hold_interrupts
from deepinfer.engine.output_processor import OutputMode, OutputProcessor, check_mode
from deepinfer.engine.request import EngineRequest
from deepinfer.engine.text_side import load_text_side
from deepinfer.engine.tokenizer import Tokenizer
from deepinfer.errors import EngineDeadError, GrammarError, InvalidRequestError
from deepinfer.outputs import RequestOutput
from deepinfer.sampling import SamplingParams
from deepinfer.structured.matcher import SHELF
from deepinfer.structured.service import PreparedGrammar
from deepinfer.structured_outputs import StructuredOutputs

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

    from deepinfer.engine.data_parallel.group_engine import GroupEngine
    from deepinfer.engine.engine import Engine
    from deepinfer.engine.step_log import EngineMetrics

__all__ = ["LLM"]

_REST = 0.01
"""Longest sleep of a turn that found nothing to run, seconds: other threads wait for theirs, and so does Ctrl-C."""


class LLM:
    """A model and the engine that runs it, in this process.

    Use it as a context manager, or call :meth:`close`. Several threads take turns, a step each; `AsyncLLM` is for many callers.

    Args: see :class:`~deepinfer.engine.config.EngineConfig`, which checks them.

    Raises:
        ConfigError, CapacityError, ModelNotFoundError, UnsupportedModelError, UnsupportedConfigError,
        UnsupportedFormatError, CheckpointError: the model cannot be run as asked; the message says what to change.
    """

    def __init__(
        self,
        model: str,
        *,
        tokenizer: str | None = None,
        revision: str | None = None,
        chat_template: str | None = None,
        dtype: str | torch.dtype = "auto",
        device: str | torch.device = "auto",
        quantization: str | None = None,
        max_model_len: int | None = None,
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int | None = None,
        block_size: int | None = None,
        num_kv_blocks: int | None = None,
        kv_memory_fraction: float | None = None,
        gpu_memory_utilization: float | None = None,
        enable_prefix_caching: bool = True,
        seed: int = 0,
        load_format: Literal["auto", "safetensors", "gguf", "dummy"] = "auto",
        trust_remote_code: bool = False,
        **settings: Any,
    ) -> None:
        self.config = EngineConfig.from_args(
            model,
            tokenizer=tokenizer,
            revision=revision,
            chat_template=chat_template,
            dtype=dtype,
            device=device,
            quantization=quantization,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            block_size=block_size,
            num_kv_blocks=num_kv_blocks,
            kv_memory_fraction=kv_memory_fraction,
            gpu_memory_utilization=gpu_memory_utilization,
            enable_prefix_caching=enable_prefix_caching,
            seed=seed,
            load_format=load_format,
            trust_remote_code=trust_remote_code,
            **settings,
        )
        with _load_bar() as progress:
            self._engine: Engine | GroupEngine | None = _start_engine(self.config, progress)
        try:
            text = load_text_side(self.config, self._engine.resolved)
        except BaseException:
            self._engine.close()
            raise
        rules = image_rules(self.config, self._engine.images)
        self._inputs = text.input_processor(ModelLimits(self._engine.max_model_len, self._engine.vocab_size, rules))
        self._grammars = make_grammar_service(self.config, text, self._engine.vocab_size)
        self._outputs = OutputProcessor(text.tokenizer)
        self._made: list[RequestOutput] = []  # outputs not yet given out: whoever drives the engine may make those of others
        self._streams: set[str] = set()  # requests whose outputs a stream() iterator takes
        self._turn = threading.RLock()  # one turn of one thread
        self._process = os.getpid()
        self.max_num_seqs: int = self._engine.max_num_seqs

    # What it is

    def __repr__(self) -> str:
        state = "closed" if self._engine is None else f"{len(self._outputs)} unfinished"
        return f"LLM({self.config.model!r}, max_model_len={self.max_model_len}, {state})"

    @property
    def _lock(self) -> threading.RLock:
        """What a thread holds for a turn. In a fork nobody may wait for it: whoever held it has not come along."""
        if os.getpid() != self._process:
            raise EngineDeadError(
                f"this LLM runs in process {self._process}, of which this one is a fork; "
                "create another one here, or start processes by 'spawn'"
            )
        return self._turn

    @property
    def engine(self) -> Engine | GroupEngine:
        """The engine underneath. Raises EngineDeadError after :meth:`close`."""
        if self._engine is None:
            raise EngineDeadError("this LLM is closed; create another one")
        return self._engine

    @property
    def max_model_len(self) -> int:
        """Longest prompt plus answer, in tokens."""
        return self._inputs.limits.max_model_len

    @property
    def vocab_size(self) -> int:
        """Number of token ids the model gives logits for."""
        return self._inputs.limits.vocab_size

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """All ids that end a sequence."""
        return self._inputs.eos_ids

    @property
    def has_chat_template(self) -> bool:
        """Whether :meth:`chat` can be used."""
        return self._inputs.chat_template is not None

    def get_tokenizer(self) -> Tokenizer:
        """The tokenizer. Raises ConfigError if the model has none."""
        return self._inputs.tokenizer

    def default_sampling_params(self, **values: Any) -> SamplingParams:
        """The sampling defaults of the model's `generation_config.json`, overridden by ``values``."""
        return self._inputs.default_params(**values)

    def get_default_sampling_params(self) -> SamplingParams:
        """The sampling defaults of the model's `generation_config.json`."""
        return self._inputs.default_params()

    # All at once

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answers prompts; results are in the order of the prompts.

        Args:
            prompts: text, token ids, ``{"prompt": ...}``, ``{"prompt_token_ids": ...}``, or a list of these. A mapping may have ``images``
                besides, see :class:`~deepinfer.engine.input_processor.PromptDict`.
            sampling_params: for all, or one for each; ``None`` = the model's defaults.
            use_tqdm: show a progress bar when stderr is a terminal.

        Raises:
            InvalidRequestError: one of the prompts or sampling values is wrong; nothing has been submitted then, and the
                message starts with the prompt's place when there are several.
            EngineDeadError: the engine has stopped.

        Structured outputs of a value are compiled before anything is submitted. A request that fails later has ``finish_reason="error"`` in
        its output (``"so_failed"`` if it could not be held to its form); the others are complete. Ctrl-C aborts
        the requests of this call; the LLM can be used on.
        """
        chosen = split_prompts(prompts)
        params = match_params(self.get_default_sampling_params() if sampling_params is None else sampling_params, len(chosen))
        return self._run(chosen, params, use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answers one conversation or a list of them, as :meth:`generate` does.

        Without ``sampling_params`` an answer may be as long as the model's length allows.

        Raises:
            InvalidRequestError: also when the model has no chat template or the template refuses the messages.
        """
        prompts = [
            self.chat_prompt(
                conversation,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                **(chat_template_kwargs or {}),
            )
            for conversation in split_conversations(messages)
        ]
        defaults = self.default_sampling_params(max_tokens=None) if sampling_params is None else sampling_params
        return self._run(prompts, match_params(defaults, len(prompts)), use_tqdm)

    def chat_prompt(self, messages: Sequence[Message], **template_values: Any) -> PromptDict:
        """A conversation as a prompt for :meth:`generate`, :meth:`stream` or :meth:`add_request`.

        Takes ``add_generation_prompt``, ``continue_final_message``, ``tools``, ``documents`` and the template's own variables.
        """
        return self._inputs.chat_prompt(messages, **template_values)

    def logits(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """Logits float32 ``[len(token_ids), vocab_size]`` of every position, in one forward."""
        return self.engine.logits(token_ids)

    def _run(self, prompts: Sequence[Prompt], params: Sequence[SamplingParams], use_tqdm: bool) -> list[RequestOutput]:
        if not prompts:
            return []
        ids = [self._inputs.new_request_id() for _ in prompts]
        requests = self._prepare_all(prompts, params, ids)
        done: dict[str, RequestOutput] = {}
        with _progress(len(prompts), use_tqdm) as bar, self._aborting(ids):
            for request, text in requests:
                self._submit(request, text, "final")
            wanted = set(ids)
            while len(done) < len(wanted):
                with self._lock:
                    ran = self._advance()
                    taken = self._take(lambda request_id: request_id in wanted)
                if not ran and not taken:
                    raise self._why_lost()
                done.update((output.request_id, output) for output in taken)
                bar.update(len(taken))
        return [done[i] for i in ids]

    def _prepare_all(
        self, prompts: Sequence[Prompt], params: Sequence[SamplingParams], ids: Sequence[str]
    ) -> list[tuple[EngineRequest, str | None]]:
        prepared = []
        for place, (prompt, values, request_id) in enumerate(zip(prompts, params, ids, strict=True)):
            try:
                prepared.append(self._inputs.prepare(prompt, values, request_id, stream=False))
            except InvalidRequestError as e:
                raise (type(e)(f"prompt {place}: {e}") if len(prompts) > 1 else e) from None
        forms = [(i, values.form) for i, values in enumerate(params) if values.form is not None]
        found = self._grammars.compile_all([form for _, form in forms]) if forms else ()
        for (place, _), made in zip(forms, found, strict=True):
            if isinstance(made, GrammarError):
                raise type(made)(f"prompt {place}: {made}") if len(prompts) > 1 else made
            prepared[place] = self._following(prepared[place][0], made), prepared[place][1]
        return prepared

    def _following(self, request: EngineRequest, made: PreparedGrammar) -> EngineRequest:
        """The request with its grammar, which this process knows how to read afterwards."""
        if (learn := getattr(self.engine, "learn", None)) is not None:  # of an engine whose matchers are in other processes
            learn(self._grammars.vocabulary)
        else:
            SHELF.learn(self._grammars.vocabulary)
            SHELF.warm(made.grammar)
        return replace(request, grammar=made.grammar)

    def _prepare(
        self, prompt: Prompt, params: SamplingParams, request_id: str, grammar: PreparedGrammar | None, *, stream: bool
    ) -> tuple[EngineRequest, str | None]:
        request, text = self._inputs.prepare(prompt, params, request_id, stream=stream)
        if grammar is None and params.form is not None:
            grammar = self._grammars.compile(params.form)
        return request if grammar is None else self._following(request, grammar), text

    def compile_grammar(self, structured_outputs: StructuredOutputs | Mapping[str, Any]) -> PreparedGrammar:
        """Compiles structured outputs ahead of a request; what they say and will not be held to is in ``reports``. From any thread.

        Raises:
            GrammarError: they are malformed, or strict with keywords that would not be held to; GrammarTimeoutError: too much.
            ConfigError: xgrammar is not installed.
        """
        wanted = StructuredOutputs.of(structured_outputs)
        if wanted is None:
            raise InvalidRequestError("there are no structured outputs to compile")
        return self._grammars.compile(wanted)

    def structured_stats(self) -> dict[str, float]:
        """What compiling grammars has cost so far, see :meth:`deepinfer.structured.service.GrammarService.stats`."""
        return self._grammars.stats()

    # As it comes

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, mode: OutputMode = "delta") -> RequestStream:
        """Answers one prompt piece by piece.

        ``mode="delta"``: each output holds only what is new; ``"cumulative"``: all so far. Closing the iterator (or
        leaving it) aborts the request. A wrong prompt raises here, before the first piece.
        """
        check_mode(mode)
        params = self.get_default_sampling_params() if sampling_params is None else sampling_params
        request_id = self._inputs.new_request_id()
        request, text = self._prepare(prompt, params, request_id, None, stream=True)
        with hold_interrupts():
            self._submit(request, text, mode)
            return RequestStream(self, request_id)

    def add_request(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        stream: bool = False,
        grammar: PreparedGrammar | None = None,
    ) -> str:
        """Queues a prompt for :meth:`step`; gives its id.

        Args:
            request_id: chosen if ``None``; must differ from those of unfinished requests.
            stream: report after every token (cumulative outputs) instead of once at the end.
            grammar: what :meth:`compile_grammar` gave for ``sampling_params.structured_outputs``, which are compiled here otherwise.

        Raises:
            InvalidRequestError: the request is wrong; nothing has been queued.
        """
        params = self.get_default_sampling_params() if sampling_params is None else sampling_params
        request_id = self._inputs.new_request_id() if request_id is None else request_id
        if not isinstance(request_id, str) or request_id in self._outputs:
            raise InvalidRequestError(f"request id {request_id!r} is in use or no string; choose another")
        request, text = self._prepare(prompt, params, request_id, grammar, stream=stream)
        self._submit(request, text, "cumulative" if stream else "final")
        return request_id

    def step(self) -> list[RequestOutput]:
        """Runs one step of the engine; gives the outputs with news of requests from :meth:`add_request`.

        Raises:
            EngineDeadError: the engine has ended, and the requests it had with it.
        """
        with self._lock:
            if len(self._outputs):
                self._advance()
            taken = self._take(lambda request_id: request_id not in self._streams)
            if not taken and self.engine.fault is not None:
                raise self._why_lost()  # another call may have met the fault first
            return taken

    def metrics(self) -> EngineMetrics:
        """Everything the engine counts, at this moment: steps, queues, blocks, drafts, times.

        Raises:
            EngineDeadError: it is closed.
        """
        return self.engine.metrics()

    def kv_identity(self) -> dict[str, str | int]:
        """What engines that share a KV store have in common, as ``deepinfer kvstore check --identity`` takes it: dump it as JSON."""
        return self.engine.kv_identity()

    def trace(self, steps: int, path: str | Path | None = None) -> Path:
        """Writes a torch profiler trace of the next ``steps`` steps, in Chrome's format, and says on stderr where.

        Args:
            path: the file; left out, ``deepinfer-trace-<process>.json`` in the working directory.

        Raises:
            ConfigError: ``steps`` is below 1.
            EngineDeadError: it is closed.
        """
        from deepinfer.engine.step_log import trace_file

        target = trace_file() if path is None else Path(path)
        self.engine.trace(steps, target)
        return target

    def has_unfinished_requests(self) -> bool:
        """Whether :meth:`step` has something to do or to give."""
        return bool(self._made) or len(self._outputs) > 0

    def abort(self, request_id: str) -> RequestOutput | None:
        """Ends a request; gives what it had so far, with finish reason "abort". ``None`` if it is unknown or finished."""
        with self._lock:
            if self._engine is not None:
                self._engine.abort(request_id)
            self._made = [o for o in self._made if o.request_id != request_id]
            return self._outputs.drop(request_id)

    def _submit(self, request: EngineRequest, text: str | None, mode: OutputMode) -> None:
        """Ctrl-C waits until both sides know the request, so that it can be aborted."""
        with hold_interrupts(), self._lock:
            engine = self.engine
            engine.add_request(request)
            try:
                self._outputs.add(request, text, mode)
            except BaseException:
                engine.abort(request.request_id)  # nobody would take its answer
                raise

    def _advance(self) -> bool:
        """One step, the lock held; False if nothing was left to run, because another thread's turns have finished it.

        Ctrl-C waits for its end, so that no step is left half done and no output is lost.
        """
        engine = self.engine
        try:
            with hold_interrupts():
                if not engine.has_unfinished():
                    if not len(self._outputs):
                        return False
                    raise self._why_lost()
                deltas = engine.step()
                if not deltas and (rest := engine.rest()) is not None:
                    select.select([rest[0]], [], [], min(rest[1], _REST))
                self._made += self._outputs.process(deltas, engine.stop_at)
                return True
        except BaseException:
            if not engine.has_unfinished():  # it came from inside the step: the engine has aborted everything, or is dead
                for request_id in self._outputs.ids():
                    self._outputs.drop(request_id)
            raise

    def _why_lost(self) -> EngineDeadError:
        fault = self.engine.fault
        if fault is not None:
            return EngineDeadError(f"{fault}; create another LLM")
        return EngineDeadError("the requests were aborted when another thread was interrupted in the middle of a step; send them again")

    def _take(self, mine: Callable[[str], bool]) -> list[RequestOutput]:
        """Outputs of the chosen requests; the rest stays for others."""
        with self._lock:
            taken = [o for o in self._made if mine(o.request_id)]
            self._made = [o for o in self._made if not mine(o.request_id)]
            return taken

    def _aborting(self, ids: Sequence[str]) -> _AbortOnError:
        return _AbortOnError(self, ids)

    # The end

    def close(self) -> None:
        """Aborts what runs and gives memory back; idempotent."""
        if os.getpid() != self._process:  # nothing here is a fork's to end
            self._engine = None
            return
        with self._lock:
            engine, self._engine = self._engine, None
            self._grammars.close()
            if engine is not None:
                engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class _AbortOnError:
    """Aborts requests when the block is left by an exception, an interrupt included."""

    def __init__(self, llm: LLM, ids: Sequence[str]) -> None:
        self._llm, self._ids = llm, ids

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            with hold_interrupts(), suppress(EngineDeadError):  # a dead engine has nothing left to abort
                for request_id in self._ids:
                    self._llm.abort(request_id)


class RequestStream(Iterator[RequestOutput]):
    """Outputs of one request; drives the engine as far as needed."""

    def __init__(self, llm: LLM, request_id: str) -> None:
        self._llm = llm
        self._id = request_id
        self._done = False
        self._ready: deque[RequestOutput] = deque()
        llm._streams.add(request_id)

    def __next__(self) -> RequestOutput:
        try:
            while not self._ready and not self._done:
                with self._llm._lock:
                    self._ready.extend(self._llm._take(lambda request_id: request_id == self._id))
                    if not self._ready and self._id not in self._llm._outputs:
                        self._end()
                        if self._llm._engine is not None and self._llm._engine.fault is not None:
                            raise self._llm._why_lost()
                        # else aborted by somebody else
                    elif not self._ready:
                        self._llm._advance()
        except BaseException:
            self.close()
            raise
        if not self._ready:
            raise StopIteration
        output = self._ready.popleft()
        if output.finished:
            self._end()
        return output

    def close(self) -> None:
        """Aborts the request if it has not ended; idempotent."""
        if not self._done:
            self._end()
            with suppress(EngineDeadError):
                self._llm.abort(self._id)

    def _end(self) -> None:
        self._done = True
        self._llm._streams.discard(self._id)

    def __del__(self) -> None:
        self.close()


def _start_engine(config: EngineConfig, progress: Callable[[int, int], None] | None) -> Engine | GroupEngine:
    """One engine here, or one in each of several processes."""
    if config.data_parallel_size > 1:
        from deepinfer.engine.data_parallel.group_engine import GroupEngine

        return GroupEngine(config)
    from deepinfer.engine.engine import Engine

    return Engine(config, progress)


def _progress(total: int, wanted: bool) -> Any:
    """A progress bar on stderr if it is wanted and stderr is a terminal."""
    from tqdm import tqdm

    return tqdm(total=total, desc="generate", unit="prompt", dynamic_ncols=True, disable=None if wanted else True)


@contextmanager
def _load_bar() -> Iterator[Callable[[int, int], None] | None]:
    """A progress bar over the bytes of the weights, if stderr is a terminal; it goes when they are loaded."""
    if not sys.stderr.isatty():
        yield None
        return
    from tqdm import tqdm

    with tqdm(desc="load", unit="B", unit_scale=True, unit_divisor=1024, dynamic_ncols=True, leave=False) as bar:

        def progress(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)
            if done >= total:
                bar.close()  # before the capacity report takes the line

        yield progress
