"""Text to token ids and back, in the shapes that vLLM gave these routes.

Owns: `/tokenize`, `/detokenize`, `/tokenizer_info`. Never touches: the engine.
"""

from __future__ import annotations

import asyncio
from typing import Any

from deepinfer.engine.tokenizer import Tokenizer, check_token_ids
from deepinfer.errors import ConfigError
from deepinfer.sampling import SamplingParams
from deepinfer.server.dialogue import render
from deepinfer.server.errors import ApiError, BadRequestError
from deepinfer.server.fields import check_model, is_ids, typed
from deepinfer.server.http.call import Call
from deepinfer.server.protocols import chat_request

_LONG = 20_000
"""Characters or tokens above which the work leaves the event loop's thread."""


def _tokenizer(call: Call) -> Tokenizer:
    try:
        return call.state.llm.get_tokenizer()
    except ConfigError as e:
        raise ApiError(501, str(e), code="no_tokenizer") from None


async def tokenize(call: Call) -> None:
    """Ids of a text (``prompt``) or of a conversation (``messages``), as a request with it would have them.

    ``add_special_tokens: false`` leaves out what the model puts around a prompt; ``parse_special: false`` takes spellings of control
    tokens as the plain text they are.
    """
    body = await call.json()
    check_model(call, body)
    tokenizer = _tokenizer(call)
    strings = typed(body, "return_token_strs", bool, False)
    if body.get("messages") is not None:
        ids = await _conversation(call, body)
    else:
        prompt = body.get("prompt")
        if not isinstance(prompt, str):
            raise BadRequestError("prompt must be a string (or give messages)", param="prompt")
        special, parsed = typed(body, "add_special_tokens", bool, True), typed(body, "parse_special", bool, True)

        def encode() -> list[int]:
            return tokenizer.encode(prompt, add_special_tokens=special) if parsed else tokenizer.encode_plain(prompt)

        ids = await asyncio.to_thread(encode) if len(prompt) > _LONG else encode()
    answer: dict[str, Any] = {"count": len(ids), "max_model_len": call.state.llm.max_model_len, "tokens": ids}
    answer["token_strs"] = [tokenizer.backend.id_to_token(i) for i in ids] if strings else None
    await call.reply(200, answer)


async def _conversation(call: Call, body: dict[str, Any]) -> list[int]:
    rendered = await render(call, chat_request.conversation(body), SamplingParams(max_tokens=None))
    assert isinstance(rendered.prompt, dict)
    return list(rendered.prompt["prompt_token_ids"])


async def detokenize(call: Call) -> None:
    """The text of ids, control tokens included."""
    body = await call.json()
    check_model(call, body)
    tokenizer = _tokenizer(call)
    ids: Any = body.get("tokens")
    if ids != [] and not is_ids(ids):
        raise BadRequestError("tokens must be a list of token ids", param="tokens")
    check_token_ids(ids, call.state.llm.vocab_size)

    def decode() -> str:
        return tokenizer.decode(ids, skip_special_tokens=False, spaces_between_special_tokens=False)

    await call.reply(200, {"prompt": await asyncio.to_thread(decode) if len(ids) > _LONG else decode()})


async def tokenizer_info(call: Call) -> None:
    """What a client needs to prepare prompts itself: named special tokens and the chat template."""
    tokenizer = _tokenizer(call)
    template = tokenizer.chat_template
    await call.reply(
        200,
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "vocab_size": tokenizer.vocab_size,
            "model_max_length": call.state.llm.max_model_len,
            "chat_template": template if template is None or isinstance(template, str) else dict(template),
            **tokenizer.special_tokens,
        },
    )
