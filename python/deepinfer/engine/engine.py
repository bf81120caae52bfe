"""The step loop: requests in, deltas of token ids out.

The core decides which sequences run, the runner computes, this file passes one to the other. On the decode path it looks only at
rows the core says somebody must see (streaming or finished) and at rows that want log-probabilities.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from deepinfer import _core
from deepinfer.engine import environ
from deepinfer.engine.config import EngineConfig, RunConfig
from deepinfer.engine.grammar_rows import GrammarRows, MakeGrammar
from deepinfer.engine.hooks import START_KINDS, Admission, EngineHooks
from deepinfer.engine.image_input import check_images, image_processor
from deepinfer.engine.interrupt import hold_interrupts, to_the_end
from deepinfer.engine.model_options import block_tokens, configure_model, drafting_of
from deepinfer.engine.planner import KvPlan, check_weights, plan_kv, report, weight_bytes
from deepinfer.engine.request import EngineRequest, SequenceDelta, Timing, TokenLogprobs
from deepinfer.engine.roles import CompletionRole, PromptRole, make_role
from deepinfer.engine.state_hits import SnapshotPlan, hit_rule, plan_snapshots, window_hits
from deepinfer.engine.step_log import INTERVAL, EngineMetrics, StepLog, StepTrace
from deepinfer.engine.step_loop import RING_SLOTS, EngineCounters, Launched, StepLoop
from deepinfer.engine.swap import SwapPlan, SwapRates, plan_swap
from deepinfer.engine.tokenizer import check_token_ids
from deepinfer.errors import (
    ConfigError,
    DeepInferError,
    EmptyPromptError,
    EngineDeadError,
    HandoverError,
    InvalidRequestError,
    PromptTooLongError,
    RankGroupError,
    StepFailedError,
)
from deepinfer.kernels import KERNEL_SET
from deepinfer.kvcache.handover import Handover
from deepinfer.kvcache.layout import KvLayout
from deepinfer.models import ResolvedModel, load_model, resolve_model
from deepinfer.models.base import Model, ModelOptions, PagedGroup, StateGroup, TableModel
from deepinfer.models.contract import checked_groups
from deepinfer.outputs import FinishReason
from deepinfer.speculative import Drafting, ModelDrafting, NgramDrafting, SpeculativeSettings
from deepinfer.worker import sync_guard
from deepinfer.worker.device_queue import StepTimes, make_queue
from deepinfer.worker.logprobs import HostLogprobs
from deepinfer.worker.runner import ModelRunner, RunnerLimits, StepResult
from deepinfer.worker.sampling_state import RowSampling

_OUTPUT_WORDS = _core.OUTPUT_WORDS
_FINISH: tuple[FinishReason | None, ...] = (None, "stop", "length", "abort", "error", None)
_HANDOVER = 5
# Words of an output row, see docs/architecture.md.
_O_INDEX, _O_GENERATION, _O_SLOT, _O_FIRST, _O_COUNT, _O_FINISH, _O_FLAGS, _O_ROW = range(8)


@dataclass(slots=True)
class _Answer:
    """What the engine remembers of one sequence between the steps in which somebody must see it."""

    request: EngineRequest
    index: int
    sampling: RowSampling
    timing: Timing
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    cached_tokens: int = 0
    told: bool = False
    produced: int = 0  # leading output tokens that another engine made and told


class Engine(EngineHooks):
    """One model, one core, one runner, driven by calls of :meth:`step` from one thread.

    Args:
        config: settings; the model is loaded and KV allocated here, after saying on stderr what fits.
        progress: called with (bytes loaded, bytes in all) while weights load.

    Attributes:
        speculative: drafting as it holds for the model, ``None`` = none.
        config, run: settings as given, and as they hold on this machine; ``options``: those of the model.
        plan: KV pools; ``images``: how the model wants its images, ``None`` if it takes none.
        swap: host memory for preempted sequences.
        resolved: where the checkpoint, its configuration and tokenizer are, as `deepinfer.models.resolve_model` found them.
        counters: totals since the start.
        last_failure: the error of the latest failed step, its cause attached.
        fault: why the engine has ended by itself, with its cause; ``None`` while it works.

    Raises:
        ConfigError, CapacityError, ModelNotFoundError, UnsupportedModelError, CheckpointError: nothing has been allocated then.
    """

    def __init__(self, config: EngineConfig, progress: Callable[[int, int], None] | None = None) -> None:
        self.config = config
        self.run: RunConfig = config.resolve()
        self.run.platform.prepare(self.run.num_threads)
        sync_guard.configure(enabled=not environ.get("DEEPINFER_DISABLE_SYNC_GUARD"))
        self.resolved = resolve_model(config.model, config.revision, config.load_format)
        _check_quantization(config.quantization, self.resolved)
        weights = weight_bytes(self.resolved, self.run.dtype)
        check_weights(self.run, weights)
        self.model: Model = load_model(self.resolved, self.run.dtype, self.run.device, config.load_format, config.seed, progress)
        self.speculative: SpeculativeSettings | None = drafting_of(config, self.model)
        self.options: ModelOptions = configure_model(config, self.model, self._max_draft, self._device_drafts > 0)
        paged, state = checked_groups(self.model, block_tokens(config, self.model))
        self._state = state
        self.plan: KvPlan = plan_kv(config, self.run, paged, state, self.model.max_position, self.model.vocab_size)
        self.swap: SwapPlan = plan_swap(config, self.run, self.plan, paged, state)
        self.snapshots: SnapshotPlan = plan_snapshots(config, self.run, self.plan, state)
        if not self.run.quiet:
            print(report(self.run, self.plan, config.model, weights, self.snapshots.amount), file=sys.stderr)
        self.max_model_len = self.plan.max_model_len
        self.vocab_size = self.model.vocab_size
        self.images = image_processor(self.model)
        self.counters = EngineCounters()
        self.last_failure: StepFailedError | None = None
        self.fault: EngineDeadError | None = None
        self._core = _core.Core(self._core_config(paged, state))
        self._runner = self._make_runner(paged, state)
        self._core.register_ring(self._runner.ring.registration())
        self._grammars = GrammarRows(self._core, self._runner)
        self._rates = SwapRates(self._core, self._runner.measure_swap())
        self._log = StepLog(self.metrics, 0.0 if self.run.quiet else INTERVAL)
        self._trace: StepTrace | None = None
        drafting: Drafting | None = None
        if self.speculative is not None:
            make = NgramDrafting if self.speculative.method == "ngram" else ModelDrafting
            drafting = make(self._core, self.speculative, self.run.max_num_batched_tokens)
        self._loop = StepLoop(self._core, self._runner, self._depth, self, self.counters, drafting)
        self._answers: dict[int, _Answer] = {}
        self._requests: dict[str, list[int]] = {}
        self._handle_of_slot: NDArray[np.uint64] = np.zeros(self._num_slots, np.uint64)
        self._closed = False
        self._process = os.getpid()
        self._idle = False
        self._layout = KvLayout({**self._kv_identity(), "prefill truncation": self._truncation}, paged, state)
        self._role = make_role(config, self._core, self._runner, self, self._layout, self.run.max_num_seqs)
        self.init_pd_split()
        gc.collect()
        gc.freeze()  # weights and modules live for the process: later collections need not walk them

    @property
    def _depth(self) -> int:
        """Most steps in flight. A prompt engine plans one at a time: what it makes goes elsewhere after the first token."""
        return 2 if self.run.zero_overhead and self.config.engine_type != "prompt" else 1

    @property
    def _max_draft(self) -> int:
        return 0 if self.speculative is None else self.speculative.num_draft_tokens or 0

    @property
    def _device_drafts(self) -> int:
        return 0 if self.speculative is None or self.speculative.method == "ngram" else self._max_draft

    @property
    def _num_slots(self) -> int:
        return self.run.max_num_seqs + 1

    def _core_config(self, paged: Sequence[PagedGroup], state: Sequence[StateGroup]) -> _core.CoreConfig:
        groups: list[_core.PagedGroup | _core.StateGroup] = [
            _core.PagedGroup(page_tokens=g.page_tokens, num_pages=pages, sources=[(s.entries_per_page, s.entry_bytes) for s in g.sources])
            for g, pages in zip(paged, self.plan.num_pages, strict=True)
        ]
        groups += [_core.StateGroup(stored=s.stored, dropped=s.dropped, replicas=s.replicas, ring=s.ring, cut=s.cut) for s in state]
        lease_ns = int(self.config.handover_lease * 1e9)
        identity = self._kv_identity()
        return _core.CoreConfig(
            groups=groups,
            max_num_seqs=self.run.max_num_seqs,
            max_num_batched_tokens=self.run.max_num_batched_tokens,
            max_model_len=self.max_model_len,
            vocab_size=self.vocab_size,
            max_draft=self._max_draft,
            device_drafts=self._device_drafts,
            ring_slots=RING_SLOTS,
            max_in_flight=self._depth,
            host_blocks=self.swap.blocks,
            host_slots=self.swap.slots,
            snapshot_slots=self.snapshots.places,
            hit_rule=hit_rule(self.config, self.options, state),
            device_ordered=True,
            prefix_caching=self.config.enable_prefix_caching,
            engine_type=self.config.engine_type,
            kv_lease_ns=lease_ns,
            handover_lease_ns=lease_ns,
            model=identity["model"],
            revision=identity["revision"],
            weight_format=identity["weights"],
            kv_format=identity["dtype"],
            numerics=identity["numerics"],
            hit_policy=identity["hit policy"],
        )

    @property
    def _truncation(self) -> str:
        """What a sequence's state depends on besides; its pages do not."""
        o = self.options
        return "off" if o.truncation == "off" else f"{o.truncation} {o.keep_tokens}"

    def _kv_identity(self) -> dict[str, str]:
        """What KV values depend on besides tokens and the shapes of the groups."""
        dtype = str(self.run.dtype).removeprefix("torch.")
        return {
            "model": self.resolved.model_id,
            "revision": self.resolved.revision,
            "weights": f"dummy {self.config.seed}" if self.config.load_format == "dummy" else self.resolved.weight_format,
            "dtype": dtype,
            "numerics": f"{self.run.platform.name}/{KERNEL_SET}/{dtype}",
            # A model that has nothing to make up is exact under either.
            "hit policy": self.config.hit_policy if window_hits(self._state) else "exact",
        }

    def _make_runner(self, paged: Sequence[PagedGroup], state: Sequence[StateGroup]) -> ModelRunner:
        block = paged[0].page_tokens
        row_blocks = -(-self.max_model_len // block)
        limits = RunnerLimits(
            max_num_seqs=self.run.max_num_seqs,
            max_num_batched_tokens=self.run.max_num_batched_tokens,
            max_draft=self._max_draft,
            num_slots=self._num_slots,
            columns=[row_blocks * (block // g.page_tokens) for g in paged],
            slot_maps=[(m[0], m[1]) for m in self._core.slot_maps()],
            keep_tokens=None if self.options.truncation == "off" else self.options.keep_tokens,
            compact=self.options.truncation == "compact",
            device_drafts=self._device_drafts,
            draft_temperatures=() if self.speculative is None else self.speculative.temperatures,
        )
        return ModelRunner(
            self.model,
            paged,
            self.plan.num_pages,
            state,
            limits,
            self._core.layout(),
            self.run.device,
            self.run.platform.pinned,
            self._admitted,
            self._restored,
            make_queue(self.run.device, self._depth > 1),
            RING_SLOTS,
            self.swap.pages,
            self.swap.slots,
            self.snapshots.places,
        )

    # Requests

    def add_request(self, request: EngineRequest) -> None:
        """Queues a request.

        Raises:
            InvalidRequestError: it could never run, or its id is in use; requests in flight are not disturbed.
            EngineDeadError: the engine is closed.
        """
        self._add(request)

    def take_over(self, record: bytes, grammar: MakeGrammar | None = None) -> None:
        """Goes on with a request that a prompt engine handed over under ``record`` (see `deepinfer.kvcache.handover`).

        ``grammar``: of the request, if it has one; the record has its name only. The owner of the KV is told to let go on every way
        out, this call's refusals included.

        Raises:
            HandoverError: this engine does not take over, the record cannot be read, or its grammar is missing.
            KvLayoutError: its KV means something else here.
            InvalidRequestError: as for :meth:`add_request`.
        """
        self._check_open()
        role = self._role
        if not isinstance(role, CompletionRole):
            raise HandoverError(f"an engine of type {self.config.engine_type!r} does not take over; send this to a completion engine")
        made = Handover.from_bytes(record)
        try:
            role.check(made, grammar is not None)
            self._check_new(made.request_id)
        except Exception:
            role.refuse(made.ticket)
            raise
        request = EngineRequest(
            request_id=made.request_id,
            prompt_ids=list(made.prompt_ids),
            params=made.params,
            max_new=made.max_new,
            eos_ids=made.eos_ids,
            seeds=(made.seed,),
            bad_word_ids=made.bad_word_ids,
            stream=made.stream,
            salt=made.salt,
            priority=made.priority,
            order=made.order,
            arrival=time.monotonic(),
            grammar=grammar,
        )
        role.admit(made, lambda number: self._add(request, made, number))

    def _check_new(self, request_id: str) -> None:
        if request_id in self._requests:
            raise InvalidRequestError(f"request id {request_id!r} is in use by an unfinished request; choose another")

    def _add(self, request: EngineRequest, made: Handover | None = None, user: int = 0) -> int:
        self._check_open()
        self._check_new(request.request_id)
        p = request.params
        if len(request.seeds) != p.n:
            raise InvalidRequestError(f"{len(request.seeds)} seeds were given for n={p.n} answers; give one for each")
        if p.prompt_logprobs is not None and self.options.truncation != "off":
            raise InvalidRequestError(
                f"prompt_logprobs need every row of a prompt, and yoco_prefill_truncation={self.options.truncation!r} leaves some out; "
                "leave prompt_logprobs out, or start the engine with yoco_prefill_truncation='off'"
            )
        produced = [] if made is None else list(made.produced)
        eos = () if p.ignore_eos else request.eos_ids
        check_images(request.images, len(request.prompt_ids), self.model, self.options, self.config.engine_type)
        rows = [RowSampling(p, seed, request.prompt_ids, eos, request.bad_word_ids, request.images) for seed in request.seeds]
        handles: list[int] = self._core.add(
            request.prompt_ids + produced,
            produced=len(produced),
            wait_kv=made is not None,
            user=user,
            max_new_tokens=request.max_new,
            min_new_tokens=p.min_tokens,
            eos_ids=list(request.eos_ids),
            stop_ids=list(p.stop_ids),
            ignore_eos=p.ignore_eos,
            priority=request.priority,
            salt=request.salt,
            extras=[("image", span.start, span.image.digest) for span in request.images],
            spans=[(span.start, span.end) for span in request.images],
            stream=_streams(request),
            prompt_logprobs=p.prompt_logprobs is not None,
            grammar=request.grammar is not None,
            n=p.n,
            arrival=request.order,
        )
        for index, handle in enumerate(handles):
            answer = _Answer(request, index, rows[index], Timing(arrival=request.arrival or time.monotonic()), produced=len(produced))
            answer.logprobs = None if p.logprobs is None else []
            if p.prompt_logprobs is not None and index == 0:
                answer.prompt_logprobs = [None] * len(request.prompt_ids)
            self._answers[handle] = answer
        self._requests[request.request_id] = list(handles)
        self.counters.requests += 1
        if request.grammar is not None:
            try:
                for handle in handles:
                    self._grammars.add(handle, request.grammar, produced)
            except BaseException:
                self.abort(request.request_id)  # its caller has been told that it is not here
                raise
        return handles[0]

    def abort(self, request_id: str) -> None:
        """Ends all answers of a request at once; no delta of it follows. Unknown and finished ids are ignored."""
        if self._closed or self._forked:
            return
        for handle in self._requests.pop(request_id, ()):
            if self._answers.pop(handle, None) is not None:
                self._core.abort(handle)
                self._grammars.forget(handle)
                if self._role is not None:
                    self._role.forget(handle)
        if self._role is not None:
            self._role.abort(request_id)

    def stop_at(self, request_id: str, index: int, num_tokens: int) -> None:
        """Ends one answer after its first ``num_tokens`` tokens, because a stop string was found; no delta of it follows."""
        for handle in self._requests.get(request_id, ()):
            answer = self._answers.get(handle)
            if answer is not None and answer.index == index:
                self._core.stop_at(handle, num_tokens)
                self._forget(handle, answer)
                return

    def has_unfinished(self) -> bool:
        """Whether a step could make progress: a request has not ended, a step is in flight, or memory of a sequence that was handed
        over has not come back."""
        if self._closed or self.fault is not None:
            return False
        return bool(self._answers) or self._loop.in_flight > 0 or (self._role is not None and self._role.busy)

    def rest(self) -> tuple[int, float] | None:
        """After a step with nothing to run: a descriptor that becomes readable when a hand-over has moved on, and the seconds after
        which to step anyway. ``None``: step on."""
        if self._closed or self._forked or self._role is None or not self._idle:
            return None
        wake, seconds = self._role.rest()
        lease = self._core.next_lease_ns()
        if lease is not None:
            seconds = min(seconds, max(lease - time.monotonic_ns(), 0) / 1e9)
        return wake, seconds

    # Steps

    def step(self) -> list[SequenceDelta]:
        """One turn of the step loop: schedule, launch, complete; see :class:`~deepinfer.engine.step_loop.StepLoop` for their order.
        Gives what there is to tell, often nothing.

        A forward that raises ends the requests of that step with ``"error"``; others go on. An interrupt (Ctrl-C, SystemExit, whatever
        is no ``Exception``) aborts everything, leaves an empty engine, and is raised again.

        Raises:
            RankGroupError: the ranks of a group do not agree; nothing has changed here.
            EngineDeadError: the engine is closed, or a fault outside of a step's own work ended it and its requests (see ``fault``).
        """
        self._check_open()
        try:
            self._idle = False
            if self._trace is not None:
                return self._traced_step(self._trace)
            news = self._move_handovers() + self._loop.advance()
            self._log.tick()
            return news
        except RankGroupError:
            raise
        except Exception as e:
            self._die(e)
            raise EngineDeadError(str(self.fault)) from e
        except BaseException:
            with hold_interrupts():  # half of it would leave sequences that nobody knows
                self._give_up()
            raise

    def _die(self, error: Exception) -> None:
        """Ends everything after an error that belongs to no step: what the engine knows and what the core knows may differ now."""
        said = str(error) if isinstance(error, EngineDeadError) else f"the engine stopped after a fault: {type(error).__name__}: {error}"
        self.fault = EngineDeadError(said)
        self.fault.__cause__ = error
        self._give_up()

    def _give_up(self) -> None:
        """Aborts everything; a core that cannot even do that is at its end. What interrupts it changes nothing: everything ends anyway."""
        try:
            self.abort_all()
        except Exception as e:
            if self.fault is None:
                self._die(e)
        except BaseException:
            return

    def trace(self, steps: int, path: Path) -> None:
        """Writes a torch profiler trace of the next ``steps`` steps to ``path``, in Chrome's format; says so on stderr."""
        if steps < 1:
            raise ConfigError(f"a trace needs at least one step, not {steps}")
        self._trace = StepTrace(steps, path, self.run.device)

    def _traced_step(self, trace: StepTrace) -> list[SequenceDelta]:
        trace.begin()
        before = self.counters.steps
        news = self._move_handovers() + self._loop.advance()
        if trace.end(self.counters.steps - before):
            self._trace = None
        return news

    def _move_handovers(self) -> list[SequenceDelta]:
        """What became of sequences on their way to or from another engine."""
        if self._role is None:
            return []
        if isinstance(self._role, PromptRole):
            return self._role.poll()
        news = []
        for handle, error in self._role.poll():
            answer = self._answers.get(handle)
            if answer is not None:
                news.append(SequenceDelta(answer.request.request_id, answer.index, [], timing=answer.timing).failed(error))
                self._forget(handle, answer)
        return news

    # What the step loop tells and asks (see `step_loop.StepOwner`)

    def handles_of(self, state_slots: NDArray[np.int32]) -> NDArray[np.uint64]:
        """Handles of the sequences that have these state slots now."""
        return self._handle_of_slot[state_slots]

    def step_completed(self, launched: Launched, result: StepResult, times: StepTimes | None) -> list[SequenceDelta]:
        """Keeps log-probabilities of what the core kept, moves grammars, and gives the deltas."""
        if times is not None:
            self._rates.note(result.header, times, result.swapped_bytes)
        if result.logprobs is not None or launched.grammars:
            kept, first = self._kept_tokens(result.header.seqs)
            if result.logprobs is not None:
                self._keep_logprobs(launched, result, result.logprobs, kept)
            for i in launched.grammars:
                if kept[i]:
                    self._move_grammar(int(launched.handles[i]), int(kept[i]), int(first[i]))
        for piece in result.prompt_logprobs:
            self._keep_prompt_logprobs(int(launched.handles[piece.index]), piece.start, piece.values)
        return self._deltas()

    def _move_grammar(self, handle: int, count: int, first: int) -> None:
        self._grammars.move(handle, count, lambda: [first] if count == 1 else self._output(handle)[-count:])

    def fill_masks(self, launched: Launched) -> None:
        """Writes the masks of a launched step's grammar rows."""
        self._grammars.fill(launched)

    def step_failed(self, error: StepFailedError) -> list[SequenceDelta]:
        """The step's sequences have ended; the core released their KV, nothing of it was published."""
        self.last_failure = error
        return self._deltas(str(error))

    def flushed(self) -> list[SequenceDelta]:
        """Deltas of what ended outside of a step; there is nothing to run."""
        self._idle = True
        return self._deltas()

    def _kept_tokens(self, seqs: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Of each sequence of the completed step the number of tokens that the core kept (0 if it had ended or was preempted
        meanwhile), and the first of them."""
        rows = np.frombuffer(self._core.outputs(), np.int32).reshape(-1, _OUTPUT_WORDS)
        rows = rows[rows[:, _O_ROW] >= 0]
        kept, first = np.zeros(seqs, np.int32), np.zeros(seqs, np.int32)
        kept[rows[:, _O_ROW]] = rows[:, _O_COUNT]
        first[rows[:, _O_ROW]] = rows[:, _O_FIRST]
        return kept, first

    def _deltas(self, error: str | None = None) -> list[SequenceDelta]:
        """Deltas of the rows that somebody must look at."""
        notify = self._core.notify()
        if not len(notify):
            return []
        rows = np.frombuffer(self._core.outputs(), np.int32).reshape(-1, _OUTPUT_WORDS)[notify.tolist()]
        deltas = []
        for row in rows.tolist():
            handle = (row[_O_GENERATION] & 0xFFFFFFFF) << 32 | (row[_O_INDEX] & 0xFFFFFFFF)
            answer = self._answers.get(handle)
            if answer is not None and (delta := self._delta(handle, answer, row, error)) is not None:
                deltas.append(delta)
        return deltas

    def _delta(self, handle: int, answer: _Answer, row: list[int], error: str | None) -> SequenceDelta | None:
        finish = _FINISH[row[_O_FINISH]]
        request = answer.request
        if not _streams(request):
            tokens = self._output(handle)[answer.produced :]
        elif row[_O_COUNT] == 1:
            tokens = [row[_O_FIRST]]
        else:
            tokens = self._output(handle)[-row[_O_COUNT] :] if row[_O_COUNT] else []
        if (kept := self._grammars.kept(handle)) is not None:
            # The core hears of it with its next plan, which may come after another token, or after the last one.
            tokens = tokens[: max(0, len(tokens) - (len(self._output(handle)) - kept))]
            if isinstance(self._role, PromptRole) and row[_O_FINISH] == _HANDOVER:
                self._role.drop(handle)
            finish = "error"
        delta = SequenceDelta(request.request_id, answer.index, tokens, finish, cached_tokens=answer.cached_tokens)
        if answer.logprobs is not None:
            delta.logprobs, answer.logprobs = answer.logprobs[: len(tokens)], answer.logprobs[len(tokens) :]
        if not answer.told:
            answer.told = True
            delta.prompt_logprobs = answer.prompt_logprobs
        if not answer.timing.first_token and (info := self._core.info(handle)) is not None:
            answer.timing.first_token = info["first_token_ns"] / 1e9
        answer.timing.last_token = time.monotonic()
        delta.timing = replace(answer.timing)
        if row[_O_FINISH] == _HANDOVER and finish is None:
            self._forget(handle, answer)
            return self._hand_over(handle, request, delta)
        if finish is not None:
            if finish == "error":
                late = self._role.late(handle) if isinstance(self._role, CompletionRole) else None
                if late is not None:
                    delta.error_kind = type(late).__name__
                delta.error = self._grammars.error_of(handle) or error or (str(late) if late else "the engine ended this request")
            self._forget(handle, answer)
        return delta

    def _hand_over(self, handle: int, request: EngineRequest, delta: SequenceDelta) -> SequenceDelta | None:
        """Gives a sequence to the prompt role, which tells of it when it can be taken over; an error is told at once."""
        assert isinstance(self._role, PromptRole)
        try:
            self._role.hand_over(handle, request, delta)
        except DeepInferError as e:
            return delta.failed(e)
        return None

    def _admitted(self, handle: int, state_slot: int) -> tuple[RowSampling, Sequence[int]]:
        """The runner's question when the core has given a sequence a state slot."""
        self._handle_of_slot[state_slot] = handle
        answer = self._answers[handle]
        if not answer.timing.scheduled and (info := self._core.info(handle)) is not None:
            answer.timing.scheduled = info["admitted_ns"] / 1e9
            if not answer.produced:
                answer.cached_tokens = info["cached_tokens"]
        return answer.sampling, self._output(handle)

    def _restored(self, handle: int, state_slot: int, tokens: int, hit: int, kind: int) -> None:
        """The runner's word that a sequence's step begins with ``tokens`` positions in place."""
        request_id = self._answers[handle].request.request_id
        self.load_state_from_store_to_prefill_cache(Admission(request_id, handle, state_slot, tokens, hit, START_KINDS[kind]))

    def _output(self, handle: int) -> list[int]:
        """Tokens generated so far."""
        made = self._core.output_tokens(handle)
        return [] if made is None else made.tolist()

    def _keep_logprobs(self, launched: Launched, result: StepResult, values: HostLogprobs, kept: NDArray[np.int32]) -> None:
        offsets = launched.sample_off
        owner = np.searchsorted(offsets[1:], result.logprob_rows, side="right")
        nth = result.logprob_rows - offsets[owner]
        for i in np.flatnonzero(nth < kept[owner]).tolist():
            answer = self._answers.get(int(launched.handles[owner[i]]))
            if answer is not None and answer.logprobs is not None:
                answer.logprobs.append(_token_logprobs(values, i, result.logprob_counts[i]))

    def _keep_prompt_logprobs(self, handle: int, start: int, values: HostLogprobs) -> None:
        answer = self._answers.get(handle)
        if answer is not None and answer.prompt_logprobs is not None:
            for i in range(len(values.rank)):
                answer.prompt_logprobs[start + i] = _token_logprobs(values, i, values.ids.shape[1] - 1)

    # Faults and the end

    @property
    def _forked(self) -> bool:
        return os.getpid() != self._process

    def abort_all(self) -> None:
        """Aborts every request and returns all blocks to the pool. An interrupt that comes meanwhile takes effect at its end."""
        try:
            to_the_end(self._abort_all)
        finally:
            self._requests.clear()
            self._answers.clear()

    def _abort_all(self) -> None:
        for request_id in list(self._requests):
            self.abort(request_id)
        self._loop.drop_all()
        while (slot := self._core.schedule(time.monotonic_ns())) >= 0:  # carries out the aborts; nothing is left to plan
            self._core.fail_step(slot)

    def _forget(self, handle: int, answer: _Answer) -> None:
        self._answers.pop(handle, None)
        self._grammars.forget(handle)
        if self._role is not None:
            self._role.forget(handle)
        handles = self._requests.get(answer.request.request_id)
        if handles is not None:
            handles.remove(handle)
            if not handles:
                del self._requests[answer.request.request_id]

    def logits(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """Logits float32 ``[len(token_ids), vocab_size]`` of every position in one forward, outside the running batch.

        Raises:
            EmptyPromptError, PromptTooLongError, TokenOutOfRangeError: bad ids; the batch is not disturbed.
        """
        self._check_open()
        ids = [int(i) for i in token_ids]
        if not ids:
            raise EmptyPromptError("logits needs at least one token id")
        if len(ids) > self.max_model_len:
            raise PromptTooLongError(f"{len(ids)} tokens are above max_model_len {self.max_model_len}; give fewer")
        check_token_ids(ids, self.vocab_size)
        return self._runner.logits(ids)

    def metrics(self) -> EngineMetrics:
        """Everything that is counted, at this moment."""
        self._check_process()
        return EngineMetrics.of(self._core, self.model.table_counters() if isinstance(self.model, TableModel) else None)

    def core_counts(self) -> _core.Counts:
        """The core's blocks of each group and state slots by state, for metrics and tests."""
        self._check_process()
        return self._core.counts()

    def core_stats(self) -> dict[str, int]:
        """The core's totals since the start (steps, preemptions, hit tokens, …) and its queues now, for metrics and tests."""
        self._check_process()
        return self._core.stats()

    def close(self) -> None:
        """Aborts what runs and releases everything; idempotent."""
        if self._closed or self._forked:  # a fork has nothing that could end: neither threads nor a device
            self._closed = True
            return
        if self.fault is None:
            with suppress(EngineDeadError):  # a core that stopped after a fault has nothing to abort
                self.abort_all()
        self._closed = True
        if self._trace is not None:
            self._trace.stop()
        if self._role is not None:
            self._role.close()
        self._runner.close()
        self._core.close()
        del self._loop, self._grammars, self._role, self._runner, self.model
        gc.unfreeze()
        gc.collect()
        if self.run.platform.name == "cuda":
            import torch

            torch.cuda.empty_cache()

    def _check_open(self) -> None:
        if self._closed:
            raise EngineDeadError("the engine is closed; create another one")
        if self.fault is not None:
            raise EngineDeadError(f"{self.fault}; create another one")
        self._check_process()

    def _check_process(self) -> None:
        if self._forked:  # also what only asks: another thread may have had the core when the process forked
            raise EngineDeadError(
                f"the engine runs in process {self._process}, of which this one is a fork without its threads; "
                "create another one here, or start processes by 'spawn'"
            )

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _check_quantization(asked: str | None, found: ResolvedModel) -> None:
    if asked is not None and asked != found.weight_format:
        raise ConfigError(
            f"quantization={asked!r}, but {found.name} holds {found.weight_format} weights; leave quantization out: "
            "what a checkpoint declares is read"
        )


def _streams(request: EngineRequest) -> bool:
    """Whether somebody reads each step's tokens: stop strings are looked for in the text as it grows."""
    return request.stream or bool(request.params.stop_strings)


def _token_logprobs(values: HostLogprobs, row: int, count: int) -> TokenLogprobs:
    return TokenLogprobs(values.ids[row, : 1 + count].copy(), values.values[row, : 1 + count].copy(), int(values.rank[row]))
