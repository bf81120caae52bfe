"""The step loop: requests in, deltas of token ids out.

The core decides which sequences run, the runner computes, this file passes one to the other. On the decode path it looks only at
rows the core says somebody must see (streaming or finished) and at rows that want log-probabilities.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from deepinfer import _core
from deepinfer.collector import settle
from deepinfer.engine.answers import Answers, streams
from deepinfer.engine.assembly import assemble
from deepinfer.engine.config import EngineConfig
from deepinfer.engine.decode_graphs import record_graphs
from deepinfer.engine.grammar_rows import GrammarRows, MakeGrammar
from deepinfer.engine.hooks import START_KINDS, Admission, EngineHooks
from deepinfer.engine.image_input import check_handed_images, check_images, image_processor
from deepinfer.engine.interrupt import hold_interrupts, to_the_end
from deepinfer.engine.memory import for_pools, memory_for
from deepinfer.engine.mover import Bell
from deepinfer.engine.request import EngineRequest, SequenceDelta
from deepinfer.engine.roles import CompletionRole, PromptRole, make_role
from deepinfer.engine.step_log import INTERVAL, EngineMetrics, StepLog, StepTrace
from deepinfer.engine.step_loop import RING_SLOTS, EngineCounters, Launched, StepLoop
from deepinfer.engine.swap import SwapRates
from deepinfer.engine.tokenizer import check_token_ids
from deepinfer.errors import (
    ConfigError,
    EmptyPromptError,
    EngineDeadError,
    GroupStepFailedError,
    HandoverError,
    InvalidRequestError,
    PromptTooLongError,
    RankGroupError,
    StepFailedError,
)
from deepinfer.kvcache.block_tier import BlockTier
from deepinfer.kvcache.handover import Handover
from deepinfer.kvcache.state_slices import SliceTier
from deepinfer.models.base import ExpertModel, Model, TableModel
from deepinfer.sampling import TrafficClass
from deepinfer.worker.device_queue import StepTimes
from deepinfer.worker.expert_loads import ExpertLoads
from deepinfer.worker.sampling_state import RowSampling
from deepinfer.worker.step import StepResult

_AWAKE_ROUNDS = 4
_NAP = 0.5
"""Seconds that a rank without work rests at a time, once its group has had none for so many rounds."""


class Engine(EngineHooks):
    """One model, one core, one runner, driven by calls of :meth:`step` from one thread.

    Args:
        config: settings; the model is loaded and KV allocated here, after saying on stderr what fits.
        progress: called with (bytes loaded, bytes in all) while weights load.
        slices: where slices of states are kept instead of ``state_slice_gib``; engines of one process may be given the same.
        store: where KV is kept beyond the engine instead of ``kv_store``; engines of one process may be given the same.

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

    def __init__(
        self,
        config: EngineConfig,
        progress: Callable[[int, int], None] | None = None,
        slices: SliceTier | None = None,
        store: BlockTier | None = None,
    ) -> None:
        settle()  # a start collects several times
        made = assemble(config, progress, slices, store)
        self.config, self.run, self.options = config, made.run, made.options
        self.resolved = made.resolved
        self.model: Model = made.model
        self.speculative = made.speculative
        self.plan, self.swap, self.snapshots = made.plan, made.swap, made.snapshots
        self.max_model_len, self.max_num_seqs = self.plan.max_model_len, self.run.max_num_seqs
        self.vocab_size = self.model.vocab_size
        self.images = image_processor(self.model)
        self.counters = EngineCounters()
        self.last_failure: StepFailedError | None = None
        self.fault: EngineDeadError | None = None
        self._core = _core.Core(made.core_config())
        loads = self.model.expert_loads() if isinstance(self.model, ExpertModel) else ()
        self._expert_loads = ExpertLoads(loads) if loads else None
        self._runner = made.make_runner(self._core, self._admitted, self._restored)
        self._core.register_ring(self._runner.ring.registration())
        record_graphs(self._runner, self.run)
        self._slices = made.make_slices(self._core, self._runner, self, slices, self._request_id)
        self._bell, self._salt, self._names = Bell(), made.salt, made.names_of_kv()
        self._store = made.make_store(self._core, self._runner, self, self._slices, self._bell, self._whose)
        self._grammars = GrammarRows(self._core, self._runner)
        with memory_for("copies", self.run, for_pools(self.run)):
            copied = self._runner.measure_swap()
        self._rates = SwapRates(self._core, copied, self._runner.can_swap)
        self._log = StepLog(self.metrics, 0.0 if self.run.quiet else INTERVAL)
        self._trace: StepTrace | None = None
        self._loop = StepLoop(self._core, self._runner, made.depth, self, self.counters, made.make_drafting(self._core))
        self._closed = False
        self._process = os.getpid()
        self._idle = False
        self._layout = made.layout()
        self._group, self._naps = made.group, 0
        self._role = make_role(config, self._core, self._runner, self, self._layout, self.run.max_num_seqs, self._bell)
        self._answers = Answers(self._core, self._grammars, self._role, self._store, made.num_slots)
        self.init_pd_split()
        if self._group is not None:
            self._group.enter(self._core)
        settle()  # weights live as long as the engine: later collections need not walk them

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
            check_handed_images(made.images, made.prompt_ids, self.images)
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
            images=made.images,
            grammar=grammar,
        )
        role.admit(made, lambda number: self._add(request, made, number))

    def _check_new(self, request_id: str) -> None:
        if request_id in self._answers.requests:
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
        check_images(request.images, len(request.prompt_ids), self.model, self.options)
        rows = [RowSampling(p, seed, request.prompt_ids, eos, request.bad_word_ids, request.images) for seed in request.seeds]
        asked = 0 if self._store is None or made is not None else self._store.ask(len(request.prompt_ids), p.prompt_logprobs is not None)
        handles: list[int] = self._core.add(
            request.prompt_ids + produced if produced else request.prompt_ids,
            produced=len(produced),
            wait_kv=made is not None,
            user=user,
            max_new_tokens=request.max_new,
            min_new_tokens=p.min_tokens,
            eos_ids=list(request.eos_ids),
            stop_ids=list(p.stop_ids),
            ignore_eos=p.ignore_eos,
            priority=request.priority,
            salt=self._salt + request.salt if request.salt else b"",
            extras=[("image", span.start, span.image.digest) for span in request.images],
            spans=[(span.start, span.end) for span in request.images],
            stream=streams(request),
            prompt_logprobs=p.prompt_logprobs is not None,
            grammar=request.grammar is not None,
            n=p.n,
            arrival=request.order,
            fetch=asked > 0 and self._store is not None and self._store.waits,
        )
        self._answers.add(request, handles, rows, len(produced))
        self.counters.requests += 1
        if self._store is not None and asked:
            self._store.added(handles[0], len(request.prompt_ids), asked)
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
        self._answers.abort(request_id)
        if self._role is not None:
            self._role.abort(request_id)

    def stop_at(self, request_id: str, index: int, num_tokens: int) -> None:
        """Ends one answer after its first ``num_tokens`` tokens, because a stop string was found; no delta of it follows."""
        self._answers.stop_at(request_id, index, num_tokens)

    def has_unfinished(self) -> bool:
        """Whether a step could make progress: a request has not ended, a step is in flight, the core has not heard of an end yet, or
        memory of a sequence that was handed over has not come back."""
        if self._closed or self.fault is not None:
            return False
        if self._group is not None:
            return True  # every rank makes every step
        if self._answers.by_handle or self._loop.in_flight > 0 or (self._role is not None and self._role.busy):
            return True
        # A stop or an abort takes effect with a plan: until then its sequence holds blocks, and its last grains go to no store.
        return self._core.has_work()

    def rest(self) -> tuple[int, float] | None:
        """After a step with nothing to run: a descriptor that becomes readable when a hand-over, or KV from the store, has moved on, and
        the seconds after which to step anyway. ``None``: step on."""
        if self._closed or self._forked or not self._idle:
            return None
        if self._group is not None:
            return self._nap()
        waits = [self._role.rest()] if self._role is not None else []
        if self._store is not None and self._store.waiting:
            waits.append(self._store.rest())
        if not waits:
            return None
        seconds = min(waits)
        lease = self._core.next_lease_ns()
        if lease is not None:
            seconds = min(seconds, max(lease - time.monotonic_ns(), 0) / 1e9)
        return self._bell.fd, seconds

    def _nap(self) -> tuple[int, float] | None:
        """A rank rests when nobody in the group has had anything to run for some rounds: a rank with work needs the others for more
        than one."""
        if self._answers.by_handle or not self._core.is_group_asleep():
            self._naps = 0
            return None
        self._naps += 1
        return None if self._naps < _AWAKE_ROUNDS else (self._bell.fd, _NAP)

    def wake(self) -> None:
        """Another rank of the group has got work."""
        self._naps = 0

    def tend(self) -> tuple[int, float] | None:
        """While there is nothing to step for: moves on what is still to be stored. Gives a descriptor that becomes readable when there is
        more to do, and the seconds after which to look anyway; ``None`` when nothing is left."""
        if self._closed or self._forked or self.fault is not None or self._store is None or not self._store.tend():
            return None
        return self._bell.fd, 1.0

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
        except GroupStepFailedError:
            if self._group is None:
                raise
            return []  # the rank that failed has told its requests; all ranks go on
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
        if self._group is not None:  # a step would need the other ranks
            self._answers.clear()
            return
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
        told = [self._answers.fail(handle, error) for handle, error in self._role.poll()]
        return [delta for delta in told if delta is not None]

    # What the step loop tells and asks (see `step_loop.StepOwner`)

    def before_schedule(self) -> None:
        """What is to be cut and stored of completed steps, and what has come from the store, before the core plans."""
        if self._slices is not None:
            self._slices.cut()
        if self._store is not None:
            self._store.poll()  # a slice goes behind its block, and one that has come is known to the plan
        if self._slices is not None:
            self._slices.settle()

    def after_schedule(self) -> None:
        """Slots of sequences that ended with the plan may be written by it."""
        if self._slices is not None:
            self._slices.cut()
        if self._store is not None:
            self._store.take()

    def handles_of(self, state_slots: NDArray[np.int32]) -> NDArray[np.uint64]:
        """Handles of the sequences that have these state slots now."""
        return self._answers.handle_of_slot[state_slots]

    def step_completed(self, launched: Launched, result: StepResult, times: StepTimes | None) -> list[SequenceDelta]:
        """Keeps log-probabilities of what the core kept, moves grammars, and gives the deltas."""
        if times is not None:
            self._rates.note(result.header, times, result.swapped_bytes)
        if self._store is not None:
            self._store.take()  # while it is known whose they are
        if self._slices is not None and not self._loop.in_flight and not self._core.has_work():
            self._slices.cut()  # nobody may ask for another step
            self._slices.settle(wait=True)
        return self._answers.completed(launched, result)

    def fill_masks(self, launched: Launched) -> None:
        """Writes the masks of a launched step's grammar rows."""
        self._grammars.fill(launched)

    def step_failed(self, error: StepFailedError) -> list[SequenceDelta]:
        """The step's sequences have ended; the core released their KV, nothing of it was published."""
        self.last_failure = error
        if self._group is not None and self._group.experts is not None:
            # The others are in the middle of the exchanges of that step, this rank no longer is.
            raise EngineDeadError(f"{error}; the ranks exchange rows within a step, so it ends the group") from error
        return self._answers.deltas(str(error))

    def flushed(self) -> list[SequenceDelta]:
        """Deltas of what ended outside of a step; there is nothing to run."""
        self._idle = True
        if self._store is not None and self._store.nothing_runs():
            self._idle = False
        return self._answers.deltas()

    def _admitted(self, handle: int, state_slot: int) -> tuple[RowSampling, Sequence[int]]:
        """The runner's question when the core has given a sequence a state slot."""
        return self._answers.admitted(handle, state_slot)

    def _restored(self, handle: int, state_slot: int, tokens: int, hit: int, kind: int) -> Callable[[], None] | None:
        """The runner's word that a sequence's step begins with ``tokens`` positions in place; gives what the device is to do for it."""
        name = START_KINDS[kind]
        key = self._core.chain_hash(handle, tokens) or b"" if name == "slice" else b""
        admission = Admission(self._request_id(handle), handle, state_slot, tokens, hit, name, key)
        given = self.load_state_from_store_to_prefill_cache(admission)
        return None if self._slices is None or name != "slice" else self._slices.put_back(admission, given)

    def _request_id(self, handle: int) -> str:
        """Whose a sequence is; empty once nobody waits for it."""
        answer = self._answers.by_handle.get(handle)
        return "" if answer is None else answer.request.request_id

    def _whose(self, handle: int) -> tuple[str, TrafficClass]:
        """Request id and class of traffic of a sequence that somebody waits for."""
        answer = self._answers.by_handle.get(handle)
        return ("", "chat") if answer is None else (answer.request.request_id, answer.request.params.traffic_class)

    # Faults and the end

    @property
    def _forked(self) -> bool:
        return os.getpid() != self._process

    def abort_all(self) -> None:
        """Aborts every request and returns all blocks to the pool. An interrupt that comes meanwhile takes effect at its end."""
        try:
            to_the_end(self._abort_all)
        finally:
            self._answers.clear()

    def _abort_all(self) -> None:
        for request_id in list(self._answers.requests):
            self.abort(request_id)
        self._loop.drop_all()
        while (slot := self._core.schedule(time.monotonic_ns())) >= 0:  # carries out the aborts; nothing is left to plan
            self._core.fail_step(slot)
        self._core.flush()  # nobody is told of these ends

    def _run_out(self) -> None:
        """Completes what is in flight. A stopped answer ends by itself with the next plan, unless its row has failed before: then what it
        completed would go to no store."""
        for request_id in list(self._answers.requests):
            self.abort(request_id)
        for _ in range(RING_SLOTS):
            if self._loop.in_flight:
                self.step()

    def logits(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """Logits float32 ``[len(token_ids), vocab_size]`` of every position in one forward, outside the running batch.

        Raises:
            EmptyPromptError, PromptTooLongError, TokenOutOfRangeError: bad ids; the batch is not disturbed.
        """
        self._check_open()
        if self._group is not None and self._group.experts is not None:
            raise InvalidRequestError("logits() runs on one rank, and the experts are spread over several; leave expert_parallel out")
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
        tables = self.model.table_counters() if isinstance(self.model, TableModel) else None
        slices = None if self._slices is None else self._slices.counts()
        store = None if self._store is None else self._store.counters.as_dict()
        group = None if self._group is None else self._group.counters()
        moe = None if self._expert_loads is None else self._expert_loads.counts()
        graphs = None if self._runner.graphs is None else self._runner.graphs.counts()
        prompts = None if self._runner.prompt_graphs is None else self._runner.prompt_graphs.counts()
        return EngineMetrics.of(self._core, tables, slices, store, self._grammars.counts(), group, moe, graphs, prompts)

    def kv_identity(self) -> dict[str, str | int]:
        """What names of this engine's KV are made of besides tokens and a request's own salt, as ``deepinfer kvstore check --identity``
        takes it."""
        told = {name: value.hex() if isinstance(value, bytes) else str(value) for name, value in self._names.items()}
        return {**told, "block_tokens": self._layout.block_tokens}

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
        if self.fault is None and self._group is None:
            with suppress(EngineDeadError):  # a core that stopped after a fault has nothing to abort
                if self._store is not None:
                    to_the_end(self._run_out)
                self.abort_all()
        self._closed = True
        if self._trace is not None:
            self._trace.stop()
        if self._role is not None:
            self._role.close()
        if self._slices is not None:
            self._slices.close()
        if self._store is not None:
            self._store.close(self.fault is not None)
        self._runner.close()
        self._core.close()
        self._bell.close()
        if self._group is not None:
            self._group.leave()
        del self._loop, self._answers, self._grammars, self._role, self._store, self._runner, self._rates, self._expert_loads, self.model
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
