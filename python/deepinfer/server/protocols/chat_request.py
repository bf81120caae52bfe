"""The body of `/v1/chat/completions`.

Owns: this protocol's fields and messages. Never touches: answers (see `chat_answer`), what a model makes of a conversation.

What is not named here or among the shared fields is ignored: clients send fields of many servers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from deepinfer.server import fields
from deepinfer.server.conversation import Conversation, Tool, ToolChoice
from deepinfer.server.errors import BadRequestError
from deepinfer.server.fields import typed
from deepinfer.server.http.call import Call
from deepinfer.server.protocols.common import (
    MOST_ALTERNATIVES,
    Asked,
    allowed,
    asked_form,
    check_choice,
    effort,
    form,
    image_part,
    objects,
    own_request_id,
    tool,
)

_REFUSED: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "functions": ([],),
    "function_call": ("none",),
    "use_beam_search": (False,),
}
_ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True)
class ChatRequest(Asked):
    """A body, read.

    Attributes:
        logprobs: log-probabilities are shown, each with so many ``alternatives``.
        ids: token ids are shown as well.
        prompt_logprobs: log-probabilities of the prompt are shown.
    """

    logprobs: bool
    alternatives: int
    ids: bool
    prompt_logprobs: bool


def read(call: Call, body: Mapping[str, Any]) -> ChatRequest:
    """Reads a body.

    Raises:
        ApiError: a field is wrong or not served.
    """
    model = fields.check_model(call, body)
    fields.refuse(body, _REFUSED)
    values = fields.sampling_values(body)
    renamed = {}
    if body.get("max_completion_tokens") is not None:
        values["max_tokens"], renamed["max_tokens"] = body["max_completion_tokens"], "max_completion_tokens"
    values.setdefault("max_tokens", None)
    fields.check_best_of(body, values)
    if any(m != "text" for m in typed(body, "modalities", list, [])):
        raise BadRequestError("only text is answered; leave modalities out", param="modalities", code="unsupported_field")
    streaming = fields.streaming(body)
    logprobs, alternatives = _logprobs(body)
    if logprobs:
        values["logprobs"] = alternatives
    prompt_logprobs = typed(body, "prompt_logprobs", int, None)
    if prompt_logprobs is not None:
        if streaming.on:
            raise BadRequestError("prompt_logprobs come with whole answers only; leave out stream", param="prompt_logprobs")
        values["prompt_logprobs"] = prompt_logprobs
    values |= asked_form(form(body.get("response_format"), "response_format", "json_schema"), "response_format", body)
    params = fields.sampling_params(call, values, renamed)
    own_request_id(call, body)
    return ChatRequest(
        model=model,
        conversation=conversation(body),
        params=params,
        streaming=streaming,
        logprobs=logprobs,
        alternatives=alternatives,
        ids=typed(body, "return_token_ids", bool, False),
        prompt_logprobs=prompt_logprobs is not None,
    )


def _logprobs(body: Mapping[str, Any]) -> tuple[bool, int]:
    wanted = typed(body, "logprobs", bool, False)
    top = typed(body, "top_logprobs", int, None)
    if top is None:
        return wanted, 0
    if not 0 <= top <= MOST_ALTERNATIVES:
        raise BadRequestError(
            f"top_logprobs must be between 0 and {MOST_ALTERNATIVES}, got {top}", param="top_logprobs", code="invalid_value"
        )
    if not wanted and top:
        raise BadRequestError("top_logprobs needs logprobs: true", param="top_logprobs", code="invalid_value")
    return wanted, top


def conversation(body: Mapping[str, Any]) -> Conversation:
    """Everything of a body that the model is told.

    Raises:
        BadRequestError: a message or tool is wrong; ``param`` says which.
    """
    tools, choice = _tools(body)
    wanted, thinking = effort(body.get("reasoning_effort"), "reasoning_effort")
    said = typed(body, "thinking", dict, {})
    if said:
        if said.get("type") not in ("enabled", "disabled"):
            raise BadRequestError("thinking.type must be enabled or disabled", param="thinking.type")
        thinking = said["type"] == "enabled"
    continued = typed(body, "continue_final_message", bool, False)
    if continued and body.get("add_generation_prompt") is True:
        raise BadRequestError("continue_final_message needs add_generation_prompt: false", param="continue_final_message")
    return Conversation(
        messages=messages(body.get("messages")),
        tools=tools,
        tool_choice=choice,
        thinking=thinking,
        effort=wanted,
        add_generation_prompt=typed(body, "add_generation_prompt", bool, True) and not continued,
        continue_final_message=continued,
        template_kwargs=typed(body, "chat_template_kwargs", dict, {}),
    )


def messages(value: Any) -> list[dict[str, Any]]:
    """The messages of a body, with nothing in them but what is known.

    Raises:
        BadRequestError: one of them is wrong; ``param`` says which.
    """
    made = [_message(m, f"messages[{place}]") for place, m in enumerate(objects(value, "messages", "messages"))]
    if not made:
        raise BadRequestError("messages must not be empty", param="messages")
    return made


def _message(message: Mapping[str, Any], at: str) -> dict[str, Any]:
    role = message.get("role")
    if role not in _ROLES:
        raise BadRequestError(f"{at}.role must be one of {', '.join(_ROLES)}", param=f"{at}.role")
    at += "."
    made: dict[str, Any] = {"role": role, "content": _content(message.get("content"), f"{at}content")}
    if (name := typed(message, "name", str, "", at)) != "":
        made["name"] = name
    if role == "tool":
        made["tool_call_id"] = typed(message, "tool_call_id", str, "", at)
    if role == "assistant":
        if message.get("function_call") is not None or message.get("audio") is not None:
            raise BadRequestError(f"{at}function_call and audio are not served; use tool_calls and content", param=f"{at}function_call")
        thought = typed(message, "reasoning_content", str, "", at) or typed(message, "reasoning", str, "", at)
        if thought:
            made["reasoning_content"] = thought
        if message.get("tool_calls"):
            made["tool_calls"] = [
                _call(c, f"{at}tool_calls[{i}]") for i, c in enumerate(objects(message["tool_calls"], f"{at}tool_calls", "calls"))
            ]
        if made["content"] is None and (refusal := typed(message, "refusal", str, "", at)):
            made["content"] = refusal
        if made["content"] is None and not thought and "tool_calls" not in made:
            raise BadRequestError(f"{at}content is missing, and there are no tool_calls", param=f"{at}content")
    elif made["content"] is None:
        raise BadRequestError(f"{at}content is missing", param=f"{at}content")
    return made


def _content(content: Any, at: str) -> str | list[dict[str, Any]] | None:
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadRequestError(f"{at} must be a string or a list of parts", param=at)
    return [_part(part, f"{at}[{place}]") for place, part in enumerate(objects(content, at, "parts"))]


def _part(part: Mapping[str, Any], at: str) -> dict[str, Any]:
    kind = part.get("type")
    if kind in ("text", "refusal"):
        text = part.get(kind)
        if not isinstance(text, str):
            raise BadRequestError(f"{at}.{kind} must be a string", param=f"{at}.{kind}")
        return {"type": "text", "text": text}
    if kind == "image_url":
        url = part.get("image_url")
        return image_part(url.get("url") if isinstance(url, dict) else url, f"{at}.image_url.url")
    raise BadRequestError(f"{at}.type {kind!r} is not served; parts are text and image_url", param=f"{at}.type", code="unsupported_part")


def _call(call: Mapping[str, Any], at: str) -> dict[str, Any]:
    if call.get("type", "function") != "function":
        raise BadRequestError(f"{at}.type must be function", param=f"{at}.type")
    function = typed(call, "function", dict, {}, f"{at}.")
    name = function.get("name")
    arguments = function.get("arguments")
    if not isinstance(name, str) or not name:
        raise BadRequestError(f"{at}.function.name must be a string", param=f"{at}.function.name")
    if arguments is not None and not isinstance(arguments, str):
        raise BadRequestError(f"{at}.function.arguments must be JSON as a string", param=f"{at}.function.arguments")
    return {"id": typed(call, "id", str, "", f"{at}."), "type": "function", "function": {"name": name, "arguments": arguments or "{}"}}


def _tools(body: Mapping[str, Any]) -> tuple[tuple[Tool, ...], ToolChoice]:
    tools = []
    for place, given in enumerate(objects(body.get("tools") or [], "tools", "tools")):
        at = f"tools[{place}]"
        if given.get("type", "function") != "function":
            raise BadRequestError(
                f"{at}.type {given.get('type')!r} is not served; tools are functions", param=f"{at}.type", code="unsupported_tool"
            )
        function = typed(given, "function", dict, {}, f"{at}.")
        tools.append(tool(function.get("name"), function, "parameters", f"{at}.function"))
    parallel = typed(body, "parallel_tool_calls", bool, True)
    chosen = body.get("tool_choice")
    found = tuple(tools)
    match chosen:
        case None | "auto":
            choice = ToolChoice("auto", parallel=parallel)
        case "none":
            choice = ToolChoice("none")
        case "required":
            choice = ToolChoice("required", parallel=parallel)
        case {"type": "function", "function": {"name": str(name)}}:
            choice = ToolChoice("required", name, parallel=parallel)
        case {"type": "allowed_tools", "allowed_tools": {"mode": ("auto" | "required") as mode, "tools": list(names)}}:
            found = allowed(found, ((n.get("function") or {}).get("name") if isinstance(n, dict) else None for n in names))
            choice = ToolChoice(mode, parallel=parallel)
        case _:
            raise BadRequestError("tool_choice must be none, auto, required or name one of the tools", param="tool_choice")
    check_choice(found, choice)
    return found, choice
