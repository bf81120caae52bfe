"""What `/v1/messages` answers, whole or in events.

Owns: this protocol's answers. Never touches: bodies, how pieces came to be.
"""

from __future__ import annotations

from typing import Any

from deepinfer.server.conversation import Content, Piece
from deepinfer.server.dialogue import Block, Blocks, Counts, News
from deepinfer.server.embedded import read_object

_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", "abort": "refusal"}


class MessagesAnswer:
    """The answer to one request.

    Args:
        model: name that it bears.
        id: of the answer.
        counts: of its tokens, as they grow.
    """

    def __init__(self, model: str, id: str, counts: Counts) -> None:
        self._model, self._id, self._counts = model, id, counts
        self._blocks = Blocks()
        self._begun = False
        self._open = False
        self._reason: str | None = None
        self._sequence: str | None = None

    # In events

    def events(self, news: News) -> list[dict[str, Any]]:
        """What is new, as events; the name of each is its ``type``."""
        made: list[dict[str, Any]] = []
        if not self._begun:
            self._begun = True
            made.append({"type": "message_start", "message": self._message([])})
        for piece in news.pieces:
            if not isinstance(piece, Content) or piece.text:
                made += self._piece(piece)
        if news.finish_reason is not None:
            made += self._close()
            self._end(news)
            delta = {"stop_reason": self._reason, "stop_sequence": self._sequence}
            made.append({"type": "message_delta", "delta": delta, "usage": self._usage()})
            made.append({"type": "message_stop"})
        return made

    def _piece(self, piece: Piece) -> list[dict[str, Any]]:
        block, new = self._blocks.add(piece)
        index = len(self._blocks.all) - 1
        made = []
        if new:
            made += self._close(index - 1)
            self._open = True
            empty = _block(Block(block.kind, block.id, block.name))
            made.append({"type": "content_block_start", "index": index, "content_block": empty})
        if text := getattr(piece, "text", ""):
            delta = {
                "call": {"type": "input_json_delta", "partial_json": text},
                "reasoning": {"type": "thinking_delta", "thinking": text},
                "content": {"type": "text_delta", "text": text},
            }[block.kind]
            made.append({"type": "content_block_delta", "index": index, "delta": delta})
        return made

    def _close(self, index: int | None = None) -> list[dict[str, Any]]:
        if not self._open:
            return []
        self._open = False
        index = len(self._blocks.all) - 1 if index is None else index
        made: list[dict[str, Any]] = []
        if self._blocks.all[index].kind == "reasoning":
            made.append({"type": "content_block_delta", "index": index, "delta": {"type": "signature_delta", "signature": ""}})
        return [*made, {"type": "content_block_stop", "index": index}]

    # At once

    def take(self, news: News) -> None:
        """What is new, kept for :meth:`whole`."""
        for piece in news.pieces:
            if not isinstance(piece, Content) or piece.text:
                self._blocks.add(piece)
        if news.finish_reason is not None:
            self._end(news)

    def whole(self) -> dict[str, Any]:
        """The answer."""
        return self._message([_block(b) for b in self._blocks.all])

    def _end(self, news: News) -> None:
        reason = news.finish_reason or "stop"
        self._sequence = news.stop_reason if isinstance(news.stop_reason, str) else None
        self._reason = "stop_sequence" if reason == "stop" and self._sequence is not None else _REASONS.get(reason, reason)

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": self._reason,
            "stop_sequence": self._sequence,
            "usage": self._usage(),
        }

    def _usage(self) -> dict[str, Any]:
        c = self._counts
        return {
            "input_tokens": c.prompt - c.cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": c.cached,
            "output_tokens": c.completion,
        }


def _block(block: Block) -> dict[str, Any]:
    match block.kind:
        case "call":
            read = read_object(block.text)
            made: dict[str, Any] = {"type": "tool_use", "id": block.id, "name": block.name, "input": read or {}}
            if read is None:
                made["partial_input"] = block.text  # cut by max_tokens: what came of it
            return made
        case "reasoning":
            return {"type": "thinking", "thinking": block.text, "signature": ""}
        case _:
            return {"type": "text", "text": block.text}
