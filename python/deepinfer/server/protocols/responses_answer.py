"""What `/v1/responses` answers, whole or in events.

Owns: this protocol's answers. Never touches: bodies, how pieces came to be.

An answer is a list of items: reasoning, messages and function calls, each as it came. Every event has its number.
"""

from __future__ import annotations

from typing import Any

from deepinfer.engine.tokenizer import Tokenizer
from deepinfer.server import fresh
from deepinfer.server.conversation import Content, Piece
from deepinfer.server.dialogue import Block, Blocks, Counts, News
from deepinfer.server.protocols.common import logprob_entries
from deepinfer.server.protocols.responses_request import ResponsesRequest

_PREFIX = {"reasoning": "rs_", "content": "msg_", "call": "fc_"}


class ResponsesAnswer:
    """The answer to one request.

    Args:
        request: what was asked.
        tokenizer: of the model.
        id, created: of the answer.
        counts: of its tokens, as they grow.
    """

    def __init__(self, request: ResponsesRequest, tokenizer: Tokenizer, id: str, created: int, counts: Counts) -> None:
        self._request, self._tokenizer, self._counts = request, tokenizer, counts
        self._id, self._created = id, created
        self._blocks = Blocks()
        self._ids: list[str] = []  # of the items
        self._open = False
        self._number = 0
        self._reason: str | None = None
        self._begun = False

    # In events

    def events(self, news: News) -> list[dict[str, Any]]:
        """What is new, as events; the name of each is its ``type``."""
        made: list[dict[str, Any]] = []
        if not self._begun:
            self._begun = True
            for kind in ("response.created", "response.in_progress"):
                made.append(self._event(kind, response=self._response("in_progress", [])))
        for piece in news.pieces:
            if isinstance(piece, Content) and not piece.text:
                continue
            made += self._piece(piece)
        if news.finish_reason is not None:
            self._reason = news.finish_reason
            made += self._close()
            made.append(self._event(f"response.{self._status()}", response=self.whole()))
        return made

    def _event(self, kind: str, **values: Any) -> dict[str, Any]:
        made = {"type": kind, "sequence_number": self._number, **values}
        self._number += 1
        return made

    def _piece(self, piece: Piece) -> list[dict[str, Any]]:
        block, new = self._blocks.add(piece)
        made = []
        if new:
            made += self._close(len(self._blocks.all) - 2)
            made += self._start(block)
        text = getattr(piece, "text", "")
        if not text:
            return made
        place: dict[str, Any] = {"item_id": self._ids[-1], "output_index": len(self._ids) - 1}
        match block.kind:
            case "call":
                made.append(self._event("response.function_call_arguments.delta", **place, delta=text))
            case "reasoning":
                made.append(self._event("response.reasoning_text.delta", **place, content_index=0, delta=text))
            case _:
                logprobs = self._logprobs(getattr(piece, "logprobs", ()))
                made.append(self._event("response.output_text.delta", **place, content_index=0, delta=text, logprobs=logprobs))
        return made

    def _start(self, block: Block) -> list[dict[str, Any]]:
        self._open = True
        self._ids.append(fresh.new_id(_PREFIX[block.kind]))
        index = len(self._ids) - 1
        empty = Block(block.kind, block.id, block.name)
        made = [self._event("response.output_item.added", output_index=index, item=self._item(index, empty, "in_progress"))]
        if block.kind != "call":
            place: dict[str, Any] = {"item_id": self._ids[index], "output_index": index, "content_index": 0}
            made.append(self._event("response.content_part.added", **place, part=self._part(empty)))
        return made

    def _close(self, index: int | None = None) -> list[dict[str, Any]]:
        if not self._open:
            return []
        self._open = False
        index = len(self._blocks.all) - 1 if index is None else index
        block = self._blocks.all[index]
        place: dict[str, Any] = {"item_id": self._ids[index], "output_index": index}
        made = []
        match block.kind:
            case "call":
                made.append(self._event("response.function_call_arguments.done", **place, name=block.name, arguments=block.text))
            case "reasoning":
                made.append(self._event("response.reasoning_text.done", **place, content_index=0, text=block.text))
            case _:
                logprobs = self._logprobs(block.logprobs)
                made.append(self._event("response.output_text.done", **place, content_index=0, text=block.text, logprobs=logprobs))
        if block.kind != "call":
            made.append(self._event("response.content_part.done", **place, content_index=0, part=self._part(block)))
        item = self._item(index, block, self._item_status(index))
        made.append(self._event("response.output_item.done", output_index=index, item=item))
        return made

    # At once

    def take(self, news: News) -> None:
        """What is new, kept for :meth:`whole`."""
        for piece in news.pieces:
            if isinstance(piece, Content) and not piece.text:
                continue
            block, new = self._blocks.add(piece)
            if new:
                self._ids.append(fresh.new_id(_PREFIX[block.kind]))
        if news.finish_reason is not None:
            self._reason = news.finish_reason

    def whole(self) -> dict[str, Any]:
        """The answer."""
        items = [self._item(i, block, self._item_status(i)) for i, block in enumerate(self._blocks.all)]
        return self._response(self._status(), items)

    def _status(self) -> str:
        return {"length": "incomplete", "abort": "incomplete", "so_failed": "failed"}.get(self._reason or "", "completed")

    def _item_status(self, index: int) -> str:
        return "completed" if index < len(self._blocks.all) - 1 or self._status() == "completed" else "incomplete"

    def _response(self, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        ended = status != "in_progress"
        details = {"reason": "max_output_tokens" if self._reason == "length" else "content_filter"} if status == "incomplete" else None
        error = None
        if status == "failed":
            error = {"code": "so_failed", "message": "the answer could not be held to the form that was asked for"}
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "background": False,
            "error": error,
            "incomplete_details": details,
            "model": self._request.model,
            "output": output,
            "previous_response_id": None,
            "store": False,
            **self._request.echo,
            "usage": self._usage() if ended else None,
        }

    def _usage(self) -> dict[str, Any]:
        c = self._counts
        return {
            "input_tokens": c.prompt,
            "input_tokens_details": {"cached_tokens": c.cached},
            "output_tokens": c.completion,
            "output_tokens_details": {"reasoning_tokens": c.reasoning},
            "total_tokens": c.prompt + c.completion,
        }

    def _item(self, index: int, block: Block, status: str) -> dict[str, Any]:
        made: dict[str, Any] = {"id": self._ids[index], "status": status}
        begun = bool(block.parts)
        match block.kind:
            case "call":
                return {**made, "type": "function_call", "call_id": block.id, "name": block.name, "arguments": block.text}
            case "reasoning":
                return {**made, "type": "reasoning", "summary": [], "content": [self._part(block)] if begun else []}
            case _:
                return {**made, "type": "message", "role": "assistant", "content": [self._part(block)] if begun else []}

    def _part(self, block: Block) -> dict[str, Any]:
        if block.kind == "reasoning":
            return {"type": "reasoning_text", "text": block.text}
        return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": self._logprobs(block.logprobs)}

    def _logprobs(self, found: Any) -> list[dict[str, Any]]:
        top = self._request.alternatives
        return [] if top is None else logprob_entries(found, self._tokenizer, top)
