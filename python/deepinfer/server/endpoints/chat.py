"""`/v1/chat/completions`.

Owns: the way of one call through reader, dialogue and writer. Never touches: fields, shapes (see `deepinfer.server.protocols`).
"""

from __future__ import annotations

import contextlib

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
    async with contextlib.aclosing(dialogue.news()) as told:
        if not request.streaming.on:
            async for news in told:
                answer.take(news)
            await call.reply(200, answer.whole())
            return
        events = call.events()
        async for news in told:
            for chunk in answer.chunks(news):
                await events.send(chunk)
    for chunk in answer.last():
        await events.send(chunk)
    await events.done()
