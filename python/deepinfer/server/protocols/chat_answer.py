"""What `/v1/chat/completions` answers, whole or in chunks.

Owns: this protocol's answers. Never touches: bodies, how pieces came to be.

Chunks: the first of each answer has the role and nothing else, as soon as there is a token; each piece is one; exactly one has the finish
reason; token counts come last, in a chunk without choices, if they were asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from deepinfer.engine.tokenizer import Tokenizer
from deepinfer.outputs import Logprob, PositionLogprobs
from deepinfer.server import shapes
from deepinfer.server.conversation import Content, Piece, Reasoning, TokenLogprob, ToolCallArguments, ToolCallStart
from deepinfer.server.dialogue import Blocks, Counts, News
from deepinfer.server.protocols.chat_request import ChatRequest
from deepinfer.server.protocols.common import logprob_entries


class ChatAnswer:
    """The answers to one request.

    Args:
        request: what was asked.
        tokenizer: of the model.
        id, created: of the answer.
        counts: of its tokens, as they grow.
    """

    def __init__(self, request: ChatRequest, tokenizer: Tokenizer, id: str, created: int, counts: Counts) -> None:
        self._request, self._tokenizer, self._counts = request, tokenizer, counts
        self._id, self._created = id, created
        n = request.params.n
        self._blocks = [Blocks() for _ in range(n)]
        self._ends: list[tuple[str | None, str | int | None]] = [(None, None)] * n
        self._ids: list[list[int]] = [[] for _ in range(n)]
        self._begun = [False] * n
        self._any_chunk = False
        self._prompt_ids: list[int] = []
        self._prompt_logprobs: Sequence[PositionLogprobs | None] | None = None

    # In chunks

    def events(self, news: News) -> list[dict[str, Any]]:
        """What is new, as chunks: events without a name."""
        made = []
        index = news.index
        if not self._begun[index] and (news.token_ids or news.finish_reason):
            self._begun[index] = True
            made.append(self._choice(index, {"role": "assistant", "content": ""}))
        for piece in news.pieces:
            made.append(self._choice(index, _delta(piece), self._logprobs_of(piece)))
        if news.finish_reason is not None:
            end = self._choice(index, {})
            end |= {"finish_reason": news.finish_reason, "stop_reason": news.stop_reason}
            made.append(end)
        if self._request.ids and news.token_ids:
            made = made or [self._choice(index, {})]
            made[-1]["token_ids"] = news.token_ids
        chunks = [self._chunk([choice]) for choice in made]
        if chunks and self._request.ids and not self._any_chunk:
            chunks[0]["prompt_token_ids"] = news.prompt_token_ids
        self._any_chunk = self._any_chunk or bool(chunks)
        return chunks

    def last(self) -> list[dict[str, Any]]:
        """What comes after all answers."""
        return [self._chunk([]) | {"usage": self.usage()}] if self._request.streaming.usage else []

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk: dict[str, Any] = {
            "id": self._id,
            "object": "chat.completion.chunk",
            "created": self._created,
            "model": self._request.model,
            "choices": choices,
        }
        if self._request.streaming.continuous:
            chunk["usage"] = self.usage()
        elif self._request.streaming.usage:
            chunk["usage"] = None
        return chunk

    def _choice(self, index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None = None) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}

    def _logprobs_of(self, piece: Piece) -> dict[str, Any] | None:
        match piece:
            case Reasoning():
                return self._logprobs((), piece.logprobs)
            case Content():
                return self._logprobs(piece.logprobs, ())
            case _:
                return None

    def _logprobs(self, content: Sequence[TokenLogprob], reasoning: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        if not self._request.logprobs:
            return None
        top = self._request.alternatives
        made: dict[str, Any] = {"content": logprob_entries(content, self._tokenizer, top), "refusal": None}
        if reasoning:
            made["reasoning_content"] = logprob_entries(reasoning, self._tokenizer, top)
        return made

    # At once

    def take(self, news: News) -> None:
        """What is new, kept for :meth:`whole`."""
        for piece in news.pieces:
            self._blocks[news.index].add(piece)
        self._ids[news.index] += news.token_ids
        self._prompt_ids = news.prompt_token_ids
        self._prompt_logprobs = news.prompt_logprobs or self._prompt_logprobs
        if news.finish_reason is not None:
            self._ends[news.index] = news.finish_reason, news.stop_reason

    def whole(self) -> dict[str, Any]:
        """The answer."""
        made: dict[str, Any] = {
            "id": self._id,
            "object": "chat.completion",
            "created": self._created,
            "model": self._request.model,
            "choices": [self._whole_choice(i, blocks) for i, blocks in enumerate(self._blocks)],
            "usage": self.usage(),
        }
        if self._request.ids:
            made["prompt_token_ids"] = self._prompt_ids
        if self._request.prompt_logprobs and self._prompt_logprobs is not None:
            made["prompt_logprobs"] = shapes.prompt_logprobs([self._named(p) for p in self._prompt_logprobs])
        return made

    def _whole_choice(self, index: int, blocks: Blocks) -> dict[str, Any]:
        calls = [{"id": b.id, "type": "function", "function": {"name": b.name, "arguments": b.text}} for b in blocks.calls]
        text = blocks.text("content")
        message: dict[str, Any] = {"role": "assistant", "content": text if text or not calls else None, "refusal": None}
        if thought := blocks.text("reasoning"):
            message["reasoning_content"] = thought
        if calls:
            message["tool_calls"] = calls
        reason, stop = self._ends[index]
        choice: dict[str, Any] = {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(blocks.logprobs("content"), blocks.logprobs("reasoning")),
            "finish_reason": reason,
            "stop_reason": stop,
        }
        if self._request.ids:
            choice["token_ids"] = self._ids[index]
        return choice

    def _named(self, position: PositionLogprobs | None) -> PositionLogprobs | None:
        """With the text of each token, which an engine that makes no text leaves out."""
        if position is None:
            return None
        return {i: Logprob(e.logprob, e.rank, self._tokenizer.token_text(i)) for i, e in position.items()}

    def usage(self) -> dict[str, Any]:
        """Token counts so far."""
        c = self._counts
        return shapes.usage(c.prompt, c.completion, c.cached, c.reasoning)


def _delta(piece: Piece) -> dict[str, Any]:
    match piece:
        case Reasoning():
            return {"reasoning_content": piece.text}
        case Content():
            return {"content": piece.text}
        case ToolCallStart():
            function = {"name": piece.name, "arguments": ""}
            return {"tool_calls": [{"index": piece.index, "id": piece.id, "type": "function", "function": function}]}
        case ToolCallArguments():
            return {"tool_calls": [{"index": piece.index, "function": {"arguments": piece.text}}]}
