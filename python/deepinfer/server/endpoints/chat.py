"""`/v1/chat/completions`.

Owns: the way of one call through reader, dialogue and writer. Never touches: fields, shapes (see `deepinfer.server.protocols`).
"""

from __future__ import annotations

from deepinfer.server import fresh
from deepinfer.server.dialogue import Dialogue, render
from deepinfer.server.http.call import Call
from deepinfer.server.protocols import chat_request
from deepinfer.server.protocols.chat_answer import ChatAnswer


async def create(call: Call) -> None:
    """Answers one request."""
    request = chat_request.read(call, await call.json())
    dialogue = Dialogue(call, await render(call, request.conversation, request.params))
    tokenizer = call.state.llm.get_tokenizer()
    answer = ChatAnswer(request, tokenizer, f"chatcmpl-{call.request_id}", fresh.now(), dialogue.counts)
    events = await dialogue.reply(answer, stream=request.streaming.on)
    if events is not None:
        for chunk in answer.last():
            await events.send(chunk)
        await events.done()
