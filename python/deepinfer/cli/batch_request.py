"""The body of one batch line: OpenAI's fields turned into prompts and sampling values, outputs turned into a response body.

A field that would change the answer and is not served is an error that names it; nothing is ignored silently except the
fields that only label a request.
"""

from __future__ import annotations

import difflib
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from deepinfer.cli.batch_file import LineError
from deepinfer.errors import InvalidRequestError
from deepinfer.outputs import CompletionOutput, RequestOutput
from deepinfer.server import fields, shapes
from deepinfer.server.errors import BadRequestError
from deepinfer.server.fields import SAMPLING

CHAT_URL = "/v1/chat/completions"

_FORMS = ("response_format", "structured_outputs")
_LABELS = ("model", "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")
_CHAT_ONLY = ("messages", "max_completion_tokens", "logprobs", "top_logprobs", "chat_template_kwargs")
_COMPLETION_ONLY = ("prompt", "logprobs", "echo", "best_of", "suffix")
# Known to the protocol, not served: refused unless they hold the value that changes nothing.
_REFUSED: dict[str, tuple[Any, ...]] = {
    "stream": (None, False),
    "stream_options": (None,),
    "tools": (None, []),
    "tool_choice": (None, "none"),
    "functions": (None, []),
    "function_call": (None, "none"),
    "parallel_tool_calls": (None, False),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "prediction": (None,),
    "reasoning_effort": (None,),
    "web_search_options": (None,),
    "echo": (None, False),
    "suffix": (None, ""),
}


@dataclass(frozen=True)
class Work:
    """What one line asks for: a conversation (``messages``) or one or several ``prompts``, all under one set of values."""

    chat: bool
    messages: list[dict[str, Any]] | None
    template_values: dict[str, Any]
    prompts: list[fields.Prompt]
    sampling: dict[str, Any]
    top_logprobs: int | None


def read_body(url: str, body: dict[str, Any]) -> Work:
    """Reads a request body.

    Raises:
        LineError: a field is unknown, not served, or of the wrong type.
    """
    chat = url == CHAT_URL
    _check_fields(body, chat)
    values = {name: body[name] for name in SAMPLING if body.get(name) is not None}
    try:
        form = fields.form(body)
    except InvalidRequestError as e:
        raise LineError("invalid_value", str(e)) from None
    except BadRequestError as e:
        raise LineError("invalid_value", e.message) from None
    if form is not None:
        values["structured_outputs"] = form
    top = _logprobs(body, chat)
    if top is not None:
        values["logprobs"] = top
    if not chat:
        try:
            fields.check_best_of(body, values)
        except BadRequestError as e:
            raise LineError("unsupported_field", e.message) from None
        return Work(False, None, {}, _prompts(body.get("prompt")), values, top)
    limit = body.get("max_completion_tokens")
    if limit is not None and values.setdefault("max_tokens", limit) != limit:
        raise LineError("invalid_value", "max_tokens and max_completion_tokens differ; give one of them")
    # A chat answer runs to its end unless the caller says otherwise; a completion stops at 16 tokens, as in the protocol.
    values.setdefault("max_tokens", None)
    template_values = body.get("chat_template_kwargs") or {}
    if not isinstance(template_values, dict):
        raise LineError("invalid_value", "chat_template_kwargs must be a JSON object")
    return Work(True, _messages(body.get("messages")), template_values, [], values, top)


def _check_fields(body: dict[str, Any], chat: bool) -> None:
    known = {*SAMPLING, *_FORMS, *_LABELS, *(_CHAT_ONLY if chat else _COMPLETION_ONLY)}
    for name, value in body.items():
        if name in _REFUSED and not (name == "suffix" and chat):
            if not any(type(value) is type(calm) and value == calm for calm in _REFUSED[name]):
                raise LineError("unsupported_field", f"{name} is not served in batches; leave it out")
        elif name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise LineError("unknown_field", f"unknown field {name!r}{hint}")


def _logprobs(body: dict[str, Any], chat: bool) -> int | None:
    value = body.get("logprobs")
    if not chat:
        return value  # an integer or null; SamplingParams checks it
    if value not in (None, True, False) or (isinstance(value, int) and not isinstance(value, bool)):
        raise LineError("invalid_value", f"logprobs must be true or false, got {value!r}")
    top = body.get("top_logprobs")
    if top is not None and not value:
        raise LineError("invalid_value", "top_logprobs needs logprobs: true")
    return (top or 0) if value else None


def _messages(value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        raise LineError("invalid_value", "messages must be a non-empty list")
    for message in value:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise LineError("invalid_value", "each message must be an object with a role")
        content = message.get("content")
        if not isinstance(content, str) and not (isinstance(content, list) and all(_is_text_part(p) for p in content)):
            raise LineError("invalid_value", "message content must be a string or a list of text parts")
    return [{**m, "content": _flat(m["content"])} for m in value]


def _is_text_part(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _flat(content: str | list[dict[str, str]]) -> str:
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def _prompts(value: Any) -> list[fields.Prompt]:
    try:
        return fields.prompts(value)
    except BadRequestError as e:
        raise LineError("invalid_value", e.message) from None


def response_body(work: Work, model: str, created: int, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    """The response of one line from the finished output of each of its prompts, in order.

    Token counts are sums over prompts and answers; ``choices`` are numbered prompt by prompt.
    """
    choices: list[dict[str, Any]] = []
    for output in outputs:
        for answer in output.outputs:
            choice: dict[str, Any] = {"index": len(choices)}
            if work.chat:
                choice["message"] = {"role": "assistant", "content": answer.text}
            else:
                choice["text"] = answer.text
            choice["logprobs"] = None
            if work.top_logprobs is not None:
                choice["logprobs"] = (_chat_logprobs if work.chat else _completion_logprobs)(answer, work.top_logprobs)
            choice["finish_reason"] = answer.finish_reason
            choices.append(choice)
    prompt_tokens = sum(len(o.prompt_token_ids) for o in outputs)
    completion_tokens = sum(len(a.token_ids) for o in outputs for a in o.outputs)
    return {
        "id": ("chatcmpl-" if work.chat else "cmpl-") + uuid.uuid4().hex,
        "object": "chat.completion" if work.chat else "text_completion",
        "created": created,
        "model": model,
        "choices": choices,
        "usage": shapes.usage(prompt_tokens, completion_tokens, sum(o.num_cached_tokens for o in outputs)),
    }


def _chat_logprobs(answer: CompletionOutput, count: int) -> dict[str, Any]:
    chosen = [(position[token], position) for token, position in zip(answer.token_ids, answer.logprobs or [], strict=False)]
    return {
        "content": [
            {**shapes.chat_entry(entry), "top_logprobs": [shapes.chat_entry(other) for other in shapes.most_likely(position, count)]}
            for entry, position in chosen
        ]
    }


def _completion_logprobs(answer: CompletionOutput, count: int) -> dict[str, Any]:
    return shapes.LegacyLogprobs(count).take(answer.token_ids, answer.logprobs or [])
