"""From a conversation to the pieces of its answers, on behalf of one call.

Owns: rendering, one parser per answer, ending answers that are over by their parser's rules, token counts, and answers as blocks. Never
touches: a protocol's JSON, the engine itself (see `generation`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from deepinfer.outputs import CompletionOutput, PositionLogprobs
from deepinfer.sampling import SamplingParams
from deepinfer.server.chat.backend import chat_backend
from deepinfer.server.conversation import (
    AnswerParser,
    Conversation,
    Piece,
    Reasoning,
    Rendered,
    TokenLogprob,
    ToolCallArguments,
    ToolCallStart,
)
from deepinfer.server.generation import Job, generate
from deepinfer.server.http.call import Call
from deepinfer.server.http.sse import EventStream

_LONG = 20_000
"""Characters above which rendering leaves the event loop's thread."""


@dataclass(slots=True)
class Counts:
    """Tokens so far, over all answers."""

    prompt: int = 0
    cached: int = 0
    completion: int = 0
    reasoning: int = 0


@dataclass(frozen=True, slots=True)
class News:
    """What is new of one answer.

    Attributes:
        pieces: joined where they follow each other.
        token_ids: behind them.
        finish_reason: set once, with the last news of an answer: ``stop``, ``length``, ``tool_calls``, ``abort``.
        stop_reason: the stop string or stop id.
        prompt_token_ids: ids that the model saw.
        prompt_logprobs: of the prompt, with the first news that there are.
    """

    index: int
    pieces: list[Piece]
    token_ids: list[int]
    finish_reason: str | None
    stop_reason: str | int | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[PositionLogprobs | None] | None


class Writer(Protocol):
    """A protocol's way to write the answers to one conversation, at once or piece by piece."""

    def take(self, news: News) -> None:
        """What is new, kept for :meth:`whole`."""

    def whole(self) -> dict[str, Any]:
        """The answer."""

    def events(self, news: News) -> list[dict[str, Any]]:
        """What is new, as events; the name of each is its ``type``, if it has one."""


def _size(conversation: Conversation) -> int:
    return sum(len(str(part)) for part in (*conversation.messages, *conversation.tools, conversation.template_kwargs))


async def render(call: Call, conversation: Conversation, params: SamplingParams) -> Rendered:
    """A conversation as the model's back end renders it.

    Raises:
        ApiError, InvalidRequestError: the model cannot be asked this.
    """
    backend = await chat_backend(call.state)
    if _size(conversation) > _LONG:
        return await asyncio.to_thread(backend.render, conversation, params)
    return backend.render(conversation, params)


class Dialogue:
    """The answers to one conversation.

    Args:
        call: of the client.
        rendered: the conversation.
        at: path of the messages in the body, for errors.
    """

    def __init__(self, call: Call, rendered: Rendered, at: str = "messages") -> None:
        self._call, self._rendered, self._at = call, rendered, at
        self.counts = Counts()
        self._parsers: list[AnswerParser] = [rendered.parser() for _ in range(rendered.params.n)]

    async def news(self) -> AsyncGenerator[News]:
        """What is new, as it comes; ends when every answer has. Raises as :func:`~deepinfer.server.generation.generate` does."""
        job = Job(self._rendered.prompt, self._rendered.params, at=self._at)
        async with contextlib.aclosing(generate(self._call, [job], stream=True)) as outputs:
            async for _, output in outputs:
                self.counts.prompt, self.counts.cached = len(output.prompt_token_ids), output.num_cached_tokens
                told = [self._take(output.request_id, answer) for answer in output.outputs]
                self._count()
                prompt_logprobs = output.prompt_logprobs
                for index, pieces, ids in filter(None, told):
                    parser = self._parsers[index]
                    reason = parser.finish_reason
                    if reason == "stop" and parser.called_tools:
                        reason = "tool_calls"
                    yield News(index, pieces, ids, reason, parser.stop_reason, output.prompt_token_ids, prompt_logprobs)
                    prompt_logprobs = None

    async def reply(self, writer: Writer, *, stream: bool) -> EventStream | None:
        """Answers the call: whole, or as events, of which the stream is given back for what the protocol sends after all answers."""
        async with contextlib.aclosing(self.news()) as told:
            if not stream:
                async for news in told:
                    writer.take(news)
                await self._call.reply(200, writer.whole())
                return None
            events = self._call.events()
            async for news in told:
                for event in writer.events(news):
                    await events.send(event, event.get("type"))
        return events

    def _take(self, request_id: str, answer: CompletionOutput) -> tuple[int, list[Piece], list[int]] | None:
        parser = self._parsers[answer.index]
        if parser.ended:
            return None
        before = parser.tokens
        pieces = parser.push(answer)
        if parser.ended and answer.finish_reason is None:
            self._call.state.llm.end_answer(request_id, answer.index)
        return answer.index, pieces, answer.token_ids[: parser.tokens - before]

    def _count(self) -> None:
        self.counts.completion = sum(p.tokens for p in self._parsers)
        self.counts.reasoning = sum(p.reasoning_tokens for p in self._parsers)


@dataclass(slots=True)
class Block:
    """A stretch of an answer of one kind; ``text`` of a call are its arguments."""

    kind: Literal["reasoning", "content", "call"]
    id: str = ""
    name: str = ""
    parts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)

    @property
    def text(self) -> str:
        """All of its text."""
        return "".join(self.parts)


class Blocks:
    """One answer, as blocks in the order in which they came."""

    def __init__(self) -> None:
        self.all: list[Block] = []

    def add(self, piece: Piece) -> tuple[Block, bool]:
        """Takes in a piece; gives its block, and whether that is a new one."""
        last = self.all[-1] if self.all else None
        match piece:
            case ToolCallStart():
                block = Block("call", piece.id, piece.name)
            case ToolCallArguments():
                assert last is not None and last.kind == "call"
                last.parts.append(piece.text)
                return last, False
            case _:
                kind: Literal["reasoning", "content"] = "reasoning" if isinstance(piece, Reasoning) else "content"
                block = last if last is not None and last.kind == kind else Block(kind)
                block.parts.append(piece.text)
                block.logprobs += piece.logprobs
        if block is not last:
            self.all.append(block)
        return block, block is not last

    def text(self, kind: str) -> str:
        """Everything of one kind."""
        return "".join(b.text for b in self.all if b.kind == kind)

    def logprobs(self, kind: str) -> list[TokenLogprob]:
        """Of everything of one kind."""
        return [e for b in self.all if b.kind == kind for e in b.logprobs]

    @property
    def calls(self) -> list[Block]:
        """The tool calls."""
        return [b for b in self.all if b.kind == "call"]
