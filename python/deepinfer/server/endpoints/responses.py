"""`/v1/responses`, without memory.

Owns: the way of one call through reader, dialogue and writer. Never touches: fields, shapes (see `deepinfer.server.protocols`).
"""

from __future__ import annotations

from deepinfer.server import fresh
from deepinfer.server.dialogue import Dialogue, render
from deepinfer.server.http.call import Call
from deepinfer.server.protocols import responses_request
from deepinfer.server.protocols.responses_answer import ResponsesAnswer


async def create(call: Call) -> None:
    """Answers one request."""
    request = responses_request.read(call, await call.json())
    dialogue = Dialogue(call, await render(call, request.conversation, request.params), at="input")
    answer = ResponsesAnswer(request, call.state.llm.get_tokenizer(), f"resp_{call.request_id}", fresh.now(), dialogue.counts)
    await dialogue.reply(answer, stream=request.streaming.on)
