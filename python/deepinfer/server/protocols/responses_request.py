"""The body of `/v1/responses`.

Owns: this protocol's fields and items. Never touches: answers (see `responses_answer`), what a model makes of a conversation.

Nothing is kept between requests: a body brings all of its conversation, and what would have to be remembered is refused.
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
    "previous_response_id": (),
    "conversation": (),
    "background": (False,),
    "prompt": (),
    "max_tool_calls": (),
    "n": (1,),
}
_ROLES = ("system", "developer", "user", "assistant")
_LOGPROBS = "message.output_text.logprobs"


@dataclass(frozen=True, slots=True)
class ResponsesRequest(Asked):
    """A body, read.

    Attributes:
        alternatives: most likely tokens shown at each position; ``None``: no log-probabilities.
        echo: settings that the answer repeats.
    """

    alternatives: int | None
    echo: dict[str, Any]


def read(call: Call, body: Mapping[str, Any]) -> ResponsesRequest:
    """Reads a body.

    Raises:
        ApiError: a field is wrong or not served.
    """
    model = fields.check_model(call, body)
    fields.refuse(body, _REFUSED)
    values = fields.sampling_values(body)
    values["max_tokens"] = body.get("max_output_tokens")
    alternatives = _alternatives(body)
    if alternatives is not None:
        values["logprobs"] = alternatives
    text = typed(body, "text", dict, {})
    values |= asked_form(form(text.get("format"), "text.format", None), "text.format", body)
    if body.get("truncation") not in (None, "auto", "disabled"):
        raise BadRequestError("truncation must be auto or disabled", param="truncation")
    params = fields.sampling_params(call, values, {"max_tokens": "max_output_tokens"})
    own_request_id(call, body)
    tools, choice = _tools(body)
    reasoning = typed(body, "reasoning", dict, {})
    wanted, thinking = effort(reasoning.get("effort"), "reasoning.effort")
    conversation = Conversation(
        messages=_messages(body),
        tools=tools,
        tool_choice=choice,
        thinking=thinking,
        effort=wanted,
        template_kwargs=typed(body, "chat_template_kwargs", dict, {}),
    )
    echo = {
        "instructions": body.get("instructions"),
        "max_output_tokens": body.get("max_output_tokens"),
        "metadata": typed(body, "metadata", dict, {}),
        "parallel_tool_calls": choice.parallel,
        "reasoning": {"effort": wanted, "summary": None},
        "temperature": params.temperature,
        "text": {"format": text.get("format") or {"type": "text"}},
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [],
        "top_logprobs": alternatives or 0,
        "top_p": params.top_p,
        "truncation": "disabled",
        "user": typed(body, "user", str, None),
    }
    streaming = fields.Streaming(typed(body, "stream", bool, False))
    return ResponsesRequest(model, conversation, params, streaming, alternatives, echo)


def _alternatives(body: Mapping[str, Any]) -> int | None:
    top = typed(body, "top_logprobs", int, None)
    if top is not None and not 0 <= top <= MOST_ALTERNATIVES:
        raise BadRequestError(
            f"top_logprobs must be between 0 and {MOST_ALTERNATIVES}, got {top}", param="top_logprobs", code="invalid_value"
        )
    wanted = _LOGPROBS in typed(body, "include", list, [])
    return top or 0 if wanted or top else None


def _messages(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Instructions and input as messages; what an assistant thought, said and called in one go is one message."""
    made: list[dict[str, Any]] = []
    if instructions := typed(body, "instructions", str, ""):
        made.append({"role": "system", "content": instructions})
    given = body.get("input")
    if isinstance(given, str):
        return [*made, {"role": "user", "content": given}]
    items = objects(given, "input", "items")
    if not items:
        raise BadRequestError("input must not be empty", param="input")
    joins = False  # whether the last message is an assistant's that the next item may go on with
    for place, item in enumerate(items):
        at = f"input[{place}]"
        new = _item(item, at)
        if new["role"] != "assistant":
            made.append(new)
        elif joins and not (made[-1].get("tool_calls") and new.get("content")) and not (made[-1].get("content") and new.get("content")):
            _join(made[-1], new)
        else:
            made.append(new)
        joins = new["role"] == "assistant"
    return made


def _join(message: dict[str, Any], more: dict[str, Any]) -> None:
    if more.get("reasoning_content"):
        message["reasoning_content"] = message.get("reasoning_content", "") + more["reasoning_content"]
    if more.get("content"):
        message["content"] = more["content"]
    if more.get("tool_calls"):
        message["tool_calls"] = [*message.get("tool_calls", ()), *more["tool_calls"]]


def _item(item: Mapping[str, Any], at: str) -> dict[str, Any]:
    kind = item.get("type", "message" if "role" in item else None)
    match kind:
        case "message":
            role = item.get("role")
            if role not in _ROLES:
                raise BadRequestError(f"{at}.role must be one of {', '.join(_ROLES)}", param=f"{at}.role")
            return {"role": role, "content": _content(item.get("content"), f"{at}.content")}
        case "function_call":
            name = item.get("name")
            if not isinstance(name, str) or not name:
                raise BadRequestError(f"{at}.name must be a string", param=f"{at}.name")
            function = {"name": name, "arguments": typed(item, "arguments", str, "{}", f"{at}.") or "{}"}
            call_id = typed(item, "call_id", str, "", f"{at}.")
            return {"role": "assistant", "content": None, "tool_calls": [{"id": call_id, "type": "function", "function": function}]}
        case "function_call_output":
            content = _content(item.get("output"), f"{at}.output")
            return {"role": "tool", "content": content, "tool_call_id": typed(item, "call_id", str, "", f"{at}.")}
        case "reasoning":
            parts = [*objects(item.get("content") or [], f"{at}.content", "parts")]
            parts = parts or [*objects(item.get("summary") or [], f"{at}.summary", "parts")]
            said = [p["text"] for p in parts if isinstance(p.get("text"), str)]
            return {"role": "assistant", "content": None, "reasoning_content": "\n".join(said)}
        case _:
            raise BadRequestError(f"{at}.type {kind!r} is not served", param=f"{at}.type", code="unsupported_item")


def _content(content: Any, at: str) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadRequestError(f"{at} must be a string or a list of parts", param=at)
    parts = [_part(part, f"{at}[{place}]") for place, part in enumerate(objects(content, at, "parts"))]
    return parts if any(p["type"] != "text" for p in parts) else "\n".join(p["text"] for p in parts)


def _part(part: Mapping[str, Any], at: str) -> dict[str, Any]:
    kind = part.get("type")
    if kind in ("input_text", "output_text", "text", "refusal"):
        text = part.get("refusal" if kind == "refusal" else "text")
        if not isinstance(text, str):
            raise BadRequestError(f"{at}.text must be a string", param=f"{at}.text")
        return {"type": "text", "text": text}
    if kind == "input_image":
        return image_part(part.get("image_url"), f"{at}.image_url")
    raise BadRequestError(
        f"{at}.type {kind!r} is not served; parts are input_text and input_image", param=f"{at}.type", code="unsupported_part"
    )


def _tools(body: Mapping[str, Any]) -> tuple[tuple[Tool, ...], ToolChoice]:
    tools = []
    for place, given in enumerate(objects(body.get("tools") or [], "tools", "tools")):
        at = f"tools[{place}]"
        if given.get("type") != "function":
            raise BadRequestError(
                f"{at}.type {given.get('type')!r} is not served; tools are functions", param=f"{at}.type", code="unsupported_tool"
            )
        tools.append(tool(given.get("name"), given, "parameters", at))
    found = tuple(tools)
    parallel = typed(body, "parallel_tool_calls", bool, True)
    match body.get("tool_choice"):
        case None | "auto":
            choice = ToolChoice("auto", parallel=parallel)
        case "none":
            choice = ToolChoice("none")
        case "required":
            choice = ToolChoice("required", parallel=parallel)
        case {"type": "function", "name": str(name)}:
            choice = ToolChoice("required", name, parallel=parallel)
        case {"type": "allowed_tools", "mode": ("auto" | "required") as mode, "tools": list(names)}:
            found = allowed(found, (n.get("name") if isinstance(n, dict) else None for n in names))
            choice = ToolChoice(mode, parallel=parallel)
        case _:
            raise BadRequestError("tool_choice must be none, auto, required or name one of the tools", param="tool_choice")
    check_choice(found, choice)
    return found, choice
