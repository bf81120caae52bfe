"""What the engine remembers of each answer that has not ended, and the deltas made of it.

Owns: answers by the core's handle, the handles of each request and of each state slot, log-probabilities until they are told. Never
touches: which step runs, text.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from deepinfer import _core
from deepinfer.engine.grammar_rows import GrammarRows
from deepinfer.engine.kv_store import StoreTraffic
from deepinfer.engine.request import EngineRequest, SequenceDelta, Timing, TokenLogprobs
from deepinfer.engine.roles import CompletionRole, PromptRole
from deepinfer.engine.step_loop import Launched
from deepinfer.errors import DeepInferError, ErrorData
from deepinfer.outputs import FinishReason
from deepinfer.worker.logprobs import HostLogprobs
from deepinfer.worker.sampling_state import RowSampling
from deepinfer.worker.step import StepResult

_OUTPUT_WORDS = _core.OUTPUT_WORDS
_FINISH: tuple[FinishReason | None, ...] = (None, "stop", "length", "abort", "error", None)
_HANDOVER = 5
# Words of an output row, see docs/architecture.md.
_O_INDEX, _O_GENERATION, _O_SLOT, _O_FIRST, _O_COUNT, _O_FINISH, _O_FLAGS, _O_ROW = range(8)


@dataclass(slots=True)
class Answer:
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


class Answers:
    """Answers from their request to the delta that ends them.

    Args:
        core, grammars, role, store: the engine's.
        num_slots: state slots, the null slot included.

    Attributes:
        by_handle: answers by sequence handle; ``requests``: handles of the unfinished answers of each request.
        handle_of_slot: uint64 ``[num_slots]``, who was given each state slot last.
    """

    def __init__(
        self, core: _core.Core, grammars: GrammarRows, role: PromptRole | CompletionRole | None, store: StoreTraffic | None, num_slots: int
    ) -> None:
        self._core, self._grammars, self._role, self._store = core, grammars, role, store
        self.by_handle: dict[int, Answer] = {}
        self.requests: dict[str, list[int]] = {}
        self.handle_of_slot: NDArray[np.uint64] = np.zeros(num_slots, np.uint64)

    def add(self, request: EngineRequest, handles: Sequence[int], rows: Sequence[RowSampling], produced: int) -> None:
        """Notes a request that the core has taken; ``produced``: leading output tokens that another engine made and told."""
        p = request.params
        for index, handle in enumerate(handles):
            answer = Answer(request, index, rows[index], Timing(arrival=request.arrival or time.monotonic()), produced=produced)
            answer.logprobs = None if p.logprobs is None else []
            if p.prompt_logprobs is not None and index == 0:
                answer.prompt_logprobs = [None] * len(request.prompt_ids)
            self.by_handle[handle] = answer
        self.requests[request.request_id] = list(handles)

    def clear(self) -> None:
        """Forgets everything: nothing is left that could end."""
        self.requests.clear()
        self.by_handle.clear()

    def abort(self, request_id: str) -> None:
        """Ends all answers of a request in the core; no delta of it follows."""
        for handle in self.requests.pop(request_id, ()):
            if self.by_handle.pop(handle, None) is not None:
                self._core.abort(handle)
                self._grammars.forget(handle)
                if self._role is not None:
                    self._role.forget(handle)
                if self._store is not None:
                    self._store.forget(handle)

    def stop_at(self, request_id: str, index: int, num_tokens: int) -> None:
        """Ends one answer after its first ``num_tokens`` tokens; no delta of it follows."""
        for handle in self.requests.get(request_id, ()):
            answer = self.by_handle.get(handle)
            if answer is not None and answer.index == index:
                self._core.stop_at(handle, num_tokens)
                self._forget(handle, answer)
                return

    def admitted(self, handle: int, state_slot: int) -> tuple[RowSampling, Sequence[int]]:
        """The core has given a sequence a state slot: its sampling values, and its tokens so far."""
        self.handle_of_slot[state_slot] = handle
        answer = self.by_handle[handle]
        if not answer.timing.scheduled and (info := self._core.info(handle)) is not None:
            answer.timing.scheduled = info["admitted_ns"] / 1e9
            if not answer.produced:
                answer.cached_tokens = info["cached_tokens"]
        return answer.sampling, self._output(handle)

    def completed(self, launched: Launched, result: StepResult) -> list[SequenceDelta]:
        """Keeps log-probabilities of what the core kept, moves grammars, and gives the deltas."""
        if result.logprobs is not None or launched.grammars:
            kept, first = self._kept_tokens(result.header.seqs)
            if result.logprobs is not None:
                self._keep_logprobs(launched, result, result.logprobs, kept)
            for i in launched.grammars:
                if kept[i]:
                    self._move_grammar(int(launched.handles[i]), int(kept[i]), int(first[i]))
        for piece in result.prompt_logprobs:
            self._keep_prompt_logprobs(int(launched.handles[piece.index]), piece.start, piece.values)
        return self.deltas()

    def fail(self, handle: int, error: DeepInferError) -> SequenceDelta | None:
        """The delta of an answer that ended for a reason the core does not know; ``None`` if it had ended before."""
        answer = self.by_handle.get(handle)
        if answer is None:
            return None
        self._forget(handle, answer)
        return SequenceDelta(answer.request.request_id, answer.index, [], timing=answer.timing).failed(error)

    def _move_grammar(self, handle: int, count: int, first: int) -> None:
        self._grammars.move(handle, count, lambda: [first] if count == 1 else self._output(handle)[-count:])

    def _kept_tokens(self, seqs: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Of each sequence of the completed step the number of tokens that the core kept (0 if it had ended or was preempted
        meanwhile), and the first of them."""
        rows = np.frombuffer(self._core.outputs(), np.int32).reshape(-1, _OUTPUT_WORDS)
        rows = rows[rows[:, _O_ROW] >= 0]
        kept, first = np.zeros(seqs, np.int32), np.zeros(seqs, np.int32)
        kept[rows[:, _O_ROW]] = rows[:, _O_COUNT]
        first[rows[:, _O_ROW]] = rows[:, _O_FIRST]
        return kept, first

    def deltas(self, error: str | None = None) -> list[SequenceDelta]:
        """Deltas of the rows that somebody must look at."""
        notify = self._core.notify()
        if not len(notify):
            return []
        rows = np.frombuffer(self._core.outputs(), np.int32).reshape(-1, _OUTPUT_WORDS)[notify.tolist()]
        deltas = []
        for row in rows.tolist():
            handle = (row[_O_GENERATION] & 0xFFFFFFFF) << 32 | (row[_O_INDEX] & 0xFFFFFFFF)
            answer = self.by_handle.get(handle)
            if answer is not None and (delta := self._delta(handle, answer, row, error)) is not None:
                deltas.append(delta)
        return deltas

    def _delta(self, handle: int, answer: Answer, row: list[int], error: str | None) -> SequenceDelta | None:
        finish = _FINISH[row[_O_FINISH]]
        request = answer.request
        if not streams(request):
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
        ended = self._grammars.finish_of(handle)
        if ended is not None and (kept is not None or finish == "error"):
            finish = ended
        delta = SequenceDelta(request.request_id, answer.index, tokens, finish, cached_tokens=answer.cached_tokens)
        delta.cut = ended == "stop" and finish == "stop" and not (tokens and tokens[-1] in request.eos_ids)
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
            if finish == "so_failed":
                delta.error = self._grammars.error_of(handle)
            elif finish == "error":
                late = self._role.late(handle) if isinstance(self._role, CompletionRole) else None
                if late is not None:
                    delta.error_kind = ErrorData.of(late).kind
                delta.error = error or (str(late) if late else "the engine ended this request")
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

    def _output(self, handle: int) -> list[int]:
        """Tokens generated so far."""
        made = self._core.output_tokens(handle)
        return [] if made is None else made.tolist()

    def _keep_logprobs(self, launched: Launched, result: StepResult, values: HostLogprobs, kept: NDArray[np.int32]) -> None:
        offsets = launched.sample_off
        owner = np.searchsorted(offsets[1:], result.logprob_rows, side="right")
        nth = result.logprob_rows - offsets[owner]
        for i in np.flatnonzero(nth < kept[owner]).tolist():
            answer = self.by_handle.get(int(launched.handles[owner[i]]))
            if answer is not None and answer.logprobs is not None:
                answer.logprobs.append(_token_logprobs(values, i, result.logprob_counts[i]))

    def _keep_prompt_logprobs(self, handle: int, start: int, values: HostLogprobs) -> None:
        answer = self.by_handle.get(handle)
        if answer is not None and answer.prompt_logprobs is not None:
            for i in range(len(values.rank)):
                answer.prompt_logprobs[start + i] = _token_logprobs(values, i, values.ids.shape[1] - 1)

    def _forget(self, handle: int, answer: Answer) -> None:
        self.by_handle.pop(handle, None)
        self._grammars.forget(handle)
        if self._role is not None:
            self._role.forget(handle)
        if self._store is not None:
            self._store.forget(handle)
        handles = self.requests.get(answer.request.request_id)
        if handles is not None:
            handles.remove(handle)
            if not handles:
                del self.requests[answer.request.request_id]


def streams(request: EngineRequest) -> bool:
    """Whether somebody reads each step's tokens: stop strings are looked for in the text as it grows."""
    return request.stream or bool(request.params.stop_strings)


def _token_logprobs(values: HostLogprobs, row: int, count: int) -> TokenLogprobs:
    return TokenLogprobs(values.ids[row, : 1 + count].copy(), values.values[row, : 1 + count].copy(), int(values.rank[row]))
