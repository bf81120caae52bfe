"""`/v1/responses`, without memory.

Owns: the way of one call through reader, dialogue and writer. Never touches: fields, shapes (see `deepinfer.server.protocols`).
"""

from __future__ import annotations

import contextlib

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
    async with contextlib.aclosing(dialogue.news()) as told:
        if not request.streaming.on:
            async for news in told:
                answer.take(news)
            await call.reply(200, answer.whole())
            return
        events = call.events()
        async for news in told:
            for event in answer.events(news):
                await events.send(event, event["type"])
