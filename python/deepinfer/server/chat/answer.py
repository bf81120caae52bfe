"""One answer, from token ids to pieces: what every back end's parser has in common.

Owns: the walk over ids, stop strings in the answer's text, counts, why it ended, the text of models that mark nothing but reasoning and
tool calls. Never touches: templates, HTTP.

All text of a conversation's answer is made here from ids, one token after the other, so that a mark can be told from its spelling and
the result does not depend on how many tokens an output brings. Stop strings are searched for in what the client reads as the answer,
not in reasoning or a tool call's arguments, and never match across those.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from deepinfer.engine.detokenizer import Detokenizer
from deepinfer.engine.stop_strings import StopMatcher, StopStrings
from deepinfer.engine.tokenizer import Tokenizer
from deepinfer.outputs import CompletionOutput
from deepinfer.sampling import SamplingParams
from deepinfer.server.chat.bits import Bit, Held, Mark
from deepinfer.server.chat.reasoning import ReasoningParser
from deepinfer.server.chat.tool_calls import ToolCallParser
from deepinfer.server.conversation import Content, Piece, Reasoning, TokenLogprob, ToolCallArguments, ToolCallStart


class TokenParser(Protocol):
    """Takes tokens apart by the rules of one family of models."""

    @property
    def reasoning(self) -> bool:
        """Whether the next token would be reasoning."""

    @property
    def ended(self) -> bool:
        """The answer is over, whatever else comes."""

    def feed(self, token_id: int, logprob: TokenLogprob | None) -> list[Piece]:
        """Pieces that became certain with one more token."""

    def flush(self) -> list[Piece]:
        """The rest, at the end of the answer."""


class MarkedParser:
    """For models whose answers have marks around reasoning and tool calls, or none at all.

    Args:
        detokenizer: of this answer.
        marks: those that are tokens, by id.
        thoughts: ``None`` where nothing is reasoning.
        calls: ``None`` where nothing is a tool call.
    """

    def __init__(
        self, detokenizer: Detokenizer, marks: Mapping[int, Mark], thoughts: ReasoningParser | None, calls: ToolCallParser | None
    ) -> None:
        self._detokenizer, self._marks, self._thoughts, self._calls = detokenizer, marks, thoughts, calls
        self._waiting: list[TokenLogprob] = []  # of tokens that made no text yet

    @property
    def reasoning(self) -> bool:
        """Whether the next token would be reasoning."""
        return self._thoughts is not None and self._thoughts.inside

    @property
    def ended(self) -> bool:
        """No further tool call may come."""
        return self._calls is not None and self._calls.ended

    def feed(self, token_id: int, logprob: TokenLogprob | None) -> list[Piece]:
        """Pieces that became certain with one more token."""
        mark = self._marks.get(token_id)
        if mark is not None:
            rest = self._detokenizer.flush()  # a mark ends a character that was not finished
            return self._bits(rest) + self._next([mark])
        if logprob is not None:
            self._waiting.append(logprob)
        return self._bits(self._detokenizer.feed((token_id,)))

    def flush(self) -> list[Piece]:
        """The rest, at the end of the answer; it goes the way of everything before."""
        pieces = self._bits(self._detokenizer.flush())
        if self._waiting:
            pieces += self._next([Bit("", self._taken())])
        if self._thoughts is not None:
            pieces += self._to_calls(self._thoughts.flush())
        if self._calls is not None:
            pieces += self._calls.flush()
        return pieces

    def _bits(self, text: str) -> list[Piece]:
        return self._next([Bit(text, self._taken())]) if text else []

    def _taken(self) -> tuple[TokenLogprob, ...]:
        taken, self._waiting = tuple(self._waiting), []
        return taken

    def _next(self, items: Iterable[Bit | Mark]) -> list[Piece]:
        if self._thoughts is None:
            return self._to_calls(items)
        return [piece for item in items for piece in self._to_calls(self._thoughts.feed(item))]

    def _to_calls(self, items: Iterable[Reasoning | Bit | Mark]) -> list[Piece]:
        pieces: list[Piece] = []
        for item in items:
            if isinstance(item, Reasoning):
                pieces.append(item)
            elif self._calls is not None:
                pieces += self._calls.feed(item)
            elif isinstance(item, Bit):
                pieces.append(Content(item.text, item.logprobs))
        return pieces


class _ContentStops:
    """Stop strings in the pieces of an answer."""

    def __init__(self, stops: StopStrings, *, include: bool) -> None:
        self._stops, self._include = stops, include
        self._held = Held()
        self._start()
        self.found: str | None = None

    def _start(self) -> None:
        self._matcher = StopMatcher(self._stops)
        self._released = 0

    def feed(self, pieces: Iterable[Piece], *, ignore: bool) -> list[Piece]:
        out: list[Piece] = []
        for piece in pieces:
            if self.found is not None:
                break
            if not isinstance(piece, Content):
                out += self.flush()
                out.append(piece)
                continue
            self._held.add(Bit(piece.text, piece.logprobs))
            match = self._matcher.feed(piece.text, ignore=ignore)
            if match is not None:
                self.found = match.stop
                self._release((match.end if self._include else match.start) - self._released, out)
            else:
                self._release(len(self._held.text) - self._matcher.held, out)
                if not self._held.text and not piece.text:
                    out += [Content(b.text, b.logprobs) for b in self._held.take_all()]
        return out

    def flush(self) -> list[Piece]:
        """What was held back and begins no stop string after all."""
        rest: list[Piece] = [Content(b.text, b.logprobs) for b in self._held.take_all()]
        self._start()
        return rest

    def _release(self, count: int, out: list[Piece]) -> None:
        out += [Content(b.text, b.logprobs) for b in self._held.take(count)]
        self._released += count


@dataclass(frozen=True)
class AnswerRules:
    """What the answers of one request have in common.

    Args:
        tokenizer: for the bytes of tokens.
        params: as the client asked; stop strings and what hangs on them are read from it.
        hidden_ids: tokens that end an answer and are never text.
    """

    tokenizer: Tokenizer
    params: SamplingParams
    hidden_ids: Collection[int] = ()
    stops: StopStrings | None = None

    def engine_params(self) -> SamplingParams:
        """The sampling values for the engine: text and stop strings are not its business."""
        return self.params.clone(stop=(), detokenize=False, include_stop_str_in_output=False)


class Answer:
    """An :class:`~deepinfer.server.conversation.AnswerParser`.

    Args:
        rules: of its request.
        parser: of this answer.
    """

    def __init__(self, rules: AnswerRules, parser: TokenParser) -> None:
        p = rules.params
        self._rules, self._parser = rules, parser
        self._stops = None
        if p.stop_strings:
            self._stops = _ContentStops(rules.stops or StopStrings(p.stop_strings), include=p.include_stop_str_in_output)
        self.tokens = 0
        self.reasoning_tokens = 0
        self.stop_reason: str | int | None = None
        self.called_tools = False
        self.finish_reason: str | None = None

    @property
    def ended(self) -> bool:
        """The answer is over by its own rules."""
        return self.finish_reason is not None

    def push(self, output: CompletionOutput) -> list[Piece]:
        """Pieces in what is new; joined where they follow each other."""
        pieces: list[Piece] = []
        if self.ended:
            return pieces
        ids, last = output.token_ids, output.finish_reason
        hidden = None
        if last == "stop" and ids and not isinstance(output.stop_reason, str):
            stop_id = output.stop_reason is not None
            hidden = len(ids) - 1 if not (stop_id and self._rules.params.include_stop_str_in_output) else None
        for place, token in enumerate(ids):
            self.tokens += 1
            if place == hidden or token in self._rules.hidden_ids:
                continue
            pieces += self._token(token, output, place)
            if self.ended:
                return _joined(pieces)
        if last is not None:
            pieces += self._filtered(self._parser.flush())
            if self._stops is not None and not self.ended:
                pieces += self._stops.flush()
            if not self.ended:
                self.finish_reason, self.stop_reason = last, output.stop_reason
        return _joined(pieces)

    def _token(self, token: int, output: CompletionOutput, place: int) -> list[Piece]:
        logprob = None
        if output.logprobs is not None and place < len(output.logprobs):
            logprob = TokenLogprob(token, self._rules.tokenizer.token_bytes(token), output.logprobs[place])
        before = self._parser.reasoning
        made = self._parser.feed(token, logprob)
        self.reasoning_tokens += before or self._parser.reasoning
        pieces = self._filtered(made)
        if self._parser.ended and not self.ended:
            pieces += self._filtered(self._parser.flush())
            self.finish_reason = "stop"
        return pieces

    def _filtered(self, pieces: list[Piece]) -> list[Piece]:
        if self._stops is not None:
            pieces = self._stops.feed(pieces, ignore=self.tokens < self._rules.params.min_tokens)
            if self._stops.found is not None and not self.ended:
                self.finish_reason, self.stop_reason = "stop", self._stops.found
        self.called_tools = self.called_tools or any(isinstance(p, ToolCallStart) for p in pieces)
        return pieces


def _joined(pieces: Sequence[Piece]) -> list[Piece]:
    """Pieces that go on with the one before, as one with it."""
    out: list[Piece] = []
    for piece in pieces:
        last = out[-1] if out else None
        if isinstance(piece, Content) and isinstance(last, Content):
            out[-1] = Content(last.text + piece.text, last.logprobs + piece.logprobs)
        elif isinstance(piece, Reasoning) and isinstance(last, Reasoning):
            out[-1] = Reasoning(last.text + piece.text, last.logprobs + piece.logprobs)
        elif isinstance(piece, ToolCallArguments) and isinstance(last, ToolCallArguments) and last.index == piece.index:
            out[-1] = ToolCallArguments(last.index, last.text + piece.text)
        else:
            out.append(piece)
    return out
