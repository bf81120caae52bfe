"""From deltas of ids to what a user reads.

Owns: the text of every unfinished request, stop strings, the cut of ids and logprobs, `RequestOutput`. Never touches:
tensors, scheduling, processes. All ways to the text (streamed or not, final flush included) are the one in `_Answer.take`.

A stop string is searched for after every token, so the cut does not depend on how many tokens a delta brings: text ends
before the match (after it with `include_stop_str_in_output`), ids and logprobs end with the token that completed it, and
the engine is told to end the sequence there. What it has made beyond is dropped and never counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal, get_args

from deepinfer.engine.detokenizer import Detokenizer
from deepinfer.engine.request import EngineRequest, SequenceDelta, TokenLogprobs
from deepinfer.engine.stop_strings import StopMatcher, StopStrings
from deepinfer.engine.tokenizer import Tokenizer
from deepinfer.errors import InvalidRequestError
from deepinfer.outputs import CompletionOutput, FinishReason, Logprob, PositionLogprobs, RequestMetrics, RequestOutput

OutputMode = Literal["cumulative", "delta", "final"]


def check_mode(mode: str) -> None:
    """Raises InvalidRequestError for a mode that is none of ``OutputMode``."""
    if mode not in get_args(OutputMode):
        raise InvalidRequestError(f"mode must be one of {', '.join(get_args(OutputMode))}, got {mode!r}")


"""What an output holds: all so far, only what is new, or one output at the end."""

StopAt = Callable[[str, int, int], None]
"""``stop_at(request_id, index, num_tokens)`` of the engine."""


class _Answer:
    """One answer of a request."""

    def __init__(self, request: EngineRequest, index: int, tokenizer: Tokenizer | None, stops: StopStrings | None) -> None:
        p = request.params
        self.index = index
        self.request = request
        self.tokenizer = tokenizer
        self.token_ids: list[int] = []
        self.logprobs: list[PositionLogprobs] | None = None if p.logprobs is None else []
        self.cumulative_logprob: float | None = None if p.logprobs is None else 0.0
        self.text = ""  # all text so far, held back part included
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None
        self.error: str | None = None
        self.sent_text = self.sent_ids = 0  # given out in delta mode
        self.matcher = StopMatcher(stops) if stops is not None else None
        self.detokenizer: Detokenizer | None = None
        if p.detokenize and tokenizer is not None:
            self.detokenizer = Detokenizer(
                tokenizer.table,
                skip_special_tokens=p.skip_special_tokens,
                spaces_between_special_tokens=p.spaces_between_special_tokens,
                prompt_ids=request.prompt_ids,
            )

    def take(self, delta: SequenceDelta) -> int | None:
        """Takes in a delta. Gives the number of tokens to stop at if a stop string ended the answer before the engine did."""
        params, new = self.request.params, delta.new_token_ids
        ended_by_token = delta.finish_reason == "stop" and bool(new) and not delta.cut
        shown = new[:-1] if ended_by_token and not params.include_stop_str_in_output else new
        # Token by token where a stop string may cut, else at once: the detokenizer gives the same text either way.
        stride = 1 if self.matcher is not None else max(len(new), 1)
        for at in range(0, len(new), stride):
            self.token_ids += new[at : at + stride]
            for position in delta.logprobs[at : at + stride] if self.logprobs is not None and delta.logprobs is not None else ():
                self._add_logprobs(position)
            if self.detokenizer is not None and self._add_text(self.detokenizer.feed(shown[at : at + stride])):
                return len(self.token_ids) if delta.finish_reason is None else None
        if delta.finish_reason is not None:
            if self.detokenizer is not None and self._add_text(self.detokenizer.flush()):
                return None  # the engine has ended it already
            self.finish_reason, self.error = delta.finish_reason, delta.error
            if ended_by_token and new[-1] not in self.request.eos_ids:
                self.stop_reason = new[-1]
        return None

    def _add_text(self, piece: str) -> bool:
        """Adds text; True if a stop string ended the answer."""
        self.text += piece
        if self.matcher is None:
            return False
        found = self.matcher.feed(piece, ignore=len(self.token_ids) < self.request.params.min_tokens)
        if found is None:
            return False
        self.text = self.text[: found.end if self.request.params.include_stop_str_in_output else found.start]
        self.finish_reason, self.stop_reason = "stop", found.stop
        return True

    def _add_logprobs(self, at: TokenLogprobs) -> None:
        position = position_logprobs(at, self.tokenizer if self.detokenizer is not None else None)
        if self.logprobs is not None and self.cumulative_logprob is not None:
            self.logprobs.append(position)
            self.cumulative_logprob += float(at.values[0])

    def output(self, mode: OutputMode) -> CompletionOutput:
        """What there is to read now; in delta mode what was not given out before."""
        held = self.matcher.held if self.matcher is not None and self.finish_reason is None else 0
        start_text, start_ids = (self.sent_text, self.sent_ids) if mode == "delta" else (0, 0)
        self.sent_text, self.sent_ids = len(self.text) - held, len(self.token_ids)
        return CompletionOutput(
            index=self.index,
            text=self.text[start_text : self.sent_text],
            token_ids=self.token_ids[start_ids:],
            cumulative_logprob=self.cumulative_logprob,
            logprobs=None if self.logprobs is None else self.logprobs[start_ids:],
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            error=self.error,
        )


class _Request:
    """All answers of one request."""

    def __init__(self, request: EngineRequest, prompt: str | None, mode: OutputMode, tokenizer: Tokenizer | None) -> None:
        stops = StopStrings(request.params.stop_strings) if request.params.stop_strings else None
        self.request = request
        self.prompt = prompt
        self.mode: OutputMode = mode
        self.answers = [_Answer(request, i, tokenizer, stops) for i in range(request.params.n)]
        self.prompt_logprobs: list[PositionLogprobs | None] | None = None
        self.cached_tokens: int | None = None
        self.reruns = 0
        self.metrics = RequestMetrics(arrival_time=request.arrival)

    @property
    def finished(self) -> bool:
        return all(a.finish_reason is not None for a in self.answers)

    def output(self, changed: Iterable[int]) -> RequestOutput:
        chosen = sorted(set(changed)) if self.mode == "delta" else range(len(self.answers))
        prompt_logprobs = self.prompt_logprobs
        if self.mode == "delta":
            self.prompt_logprobs = None  # given out once
        return RequestOutput(
            request_id=self.request.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.request.prompt_ids,
            outputs=[self.answers[i].output(self.mode) for i in chosen],
            finished=self.finished,
            prompt_logprobs=prompt_logprobs,
            num_cached_tokens=self.cached_tokens or 0,
            num_reruns=self.reruns,
            metrics=self.metrics,
        )


class OutputProcessor:
    """Turns the deltas of one engine into outputs.

    Args:
        tokenizer: ``None`` where no text is ever wanted.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._requests: dict[str, _Request] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def ids(self) -> list[str]:
        """Ids of all unfinished requests."""
        return list(self._requests)

    def add(self, request: EngineRequest, prompt: str | None = None, mode: OutputMode = "cumulative") -> None:
        """Starts to expect deltas of a request."""
        self._requests[request.request_id] = _Request(request, prompt, mode, self._tokenizer)

    def drop(self, request_id: str) -> RequestOutput | None:
        """Forgets an aborted request; gives its last output, with finish reason ``"abort"``. ``None`` if it is not known."""
        known = self._requests.pop(request_id, None)
        return None if known is None else _end(known, "abort", None)

    def note_rerun(self, request_id: str) -> None:
        """An answer of this request is being made again."""
        if request_id in self._requests:
            self._requests[request_id].reruns += 1

    def fail(self, request_id: str, message: str) -> RequestOutput | None:
        """Forgets a request that failed; gives its last output, with finish reason ``"error"``."""
        known = self._requests.pop(request_id, None)
        return None if known is None else _end(known, "error", message)

    def process(self, deltas: Iterable[SequenceDelta], stop_at: StopAt) -> list[RequestOutput]:
        """Takes in the deltas of a step; gives one output per request with news (in "final" mode, per finished request).

        ``stop_at`` is called for each answer that a stop string ended before the engine did.
        """
        changed: dict[str, list[int]] = {}
        for delta in deltas:
            known = self._requests.get(delta.request_id)
            if known is None or known.answers[delta.index].finish_reason is not None:
                continue  # made beyond a stop or an abort
            cut = known.answers[delta.index].take(delta)
            if cut is not None:
                stop_at(delta.request_id, delta.index, cut)
            self._note(known, delta)
            changed.setdefault(delta.request_id, []).append(delta.index)
        return [out for request_id, indices in changed.items() if (out := self._output(request_id, indices)) is not None]

    def end_answer(self, request_id: str, index: int) -> tuple[int | None, RequestOutput | None]:
        """Ends one answer after what it has so far, with finish reason ``"stop"``; gives its number of tokens and what there is to tell.

        Nothing (``None``) of an answer that has ended.
        """
        known = self._requests.get(request_id)
        if known is None or known.answers[index].finish_reason is not None:
            return None, None
        known.answers[index].finish_reason = "stop"
        return len(known.answers[index].token_ids), self._output(request_id, [index])

    def _output(self, request_id: str, indices: list[int]) -> RequestOutput | None:
        known = self._requests[request_id]
        if known.finished:
            del self._requests[request_id]
        elif known.mode == "final":
            return None
        return known.output(indices)

    def _note(self, known: _Request, delta: SequenceDelta) -> None:
        if delta.index == 0 and known.cached_tokens is None:
            known.cached_tokens = delta.cached_tokens  # the other answers, and further runs, find what this one computed
        if delta.prompt_logprobs is not None:
            tokenizer = self._tokenizer if known.request.params.detokenize else None
            known.prompt_logprobs = [None if at is None else position_logprobs(at, tokenizer) for at in delta.prompt_logprobs]
        metrics, timing = known.metrics, delta.timing
        metrics.first_scheduled_time = metrics.first_scheduled_time or timing.scheduled
        metrics.first_token_time = min(filter(None, (metrics.first_token_time, timing.first_token)), default=0.0)
        if known.finished:
            metrics.finished_time = max(metrics.finished_time, timing.last_token)


def _end(known: _Request, reason: FinishReason, message: str | None) -> RequestOutput:
    open_ones = [a for a in known.answers if a.finish_reason is None]
    for answer in open_ones:
        answer.finish_reason, answer.error = reason, message
    return known.output(a.index for a in open_ones)


def merge_deltas(first: RequestOutput, second: RequestOutput) -> RequestOutput:
    """Two successive delta outputs of one request as one, for a reader that was slower than the engine."""
    merged = {c.index: c for c in first.outputs}
    for new in second.outputs:
        old = merged.get(new.index)
        if old is not None:
            new.text = old.text + new.text
            new.token_ids = old.token_ids + new.token_ids
            if old.logprobs is not None and new.logprobs is not None:
                new.logprobs = old.logprobs + new.logprobs
        merged[new.index] = new
    second.outputs = [merged[i] for i in sorted(merged)]
    second.prompt_logprobs = second.prompt_logprobs or first.prompt_logprobs
    return second


def position_logprobs(at: TokenLogprobs, tokenizer: Tokenizer | None) -> PositionLogprobs:
    """The entries of one position by token id, the chosen token first."""
    made: PositionLogprobs = {}
    values = at.values.tolist()
    for place, token in enumerate(at.ids.tolist()):
        if token not in made:
            text = tokenizer.token_text(token) if tokenizer is not None else None
            made[token] = Logprob(values[place], at.rank if place == 0 else place, text)
    return made
