"""`/v1/messages` and `/v1/messages/count_tokens`.

Owns: the way of one call through reader, dialogue and writer. Never touches: fields, shapes (see `deepinfer.server.protocols`).
"""

from __future__ import annotations

from deepinfer.sampling import SamplingParams
from deepinfer.server.dialogue import Dialogue, render
from deepinfer.server.fields import check_model
from deepinfer.server.http.call import Call
from deepinfer.server.protocols import messages_request
from deepinfer.server.protocols.messages_answer import MessagesAnswer


async def create(call: Call) -> None:
    """Answers one request."""
    request = messages_request.read(call, await call.json())
    dialogue = Dialogue(call, await render(call, request.conversation, request.params))
    answer = MessagesAnswer(request.model, f"msg_{call.request_id}", dialogue.counts)
    await dialogue.reply(answer, stream=request.streaming.on)


async def count_tokens(call: Call) -> None:
    """How many tokens a request's prompt has, places of images included."""
    body = await call.json()
    check_model(call, body)
    rendered = await render(call, messages_request.conversation(body), SamplingParams(max_tokens=None))
    prompt = rendered.prompt
    if isinstance(prompt, dict) and "images" not in prompt:
        count = len(prompt["prompt_token_ids"])
    else:
        count = len((await call.state.llm.prepare(prompt, rendered.params)).request.prompt_ids)
    await call.reply(200, {"input_tokens": count})
