"""The body of `/v1/messages` and of `/v1/messages/count_tokens`.

Owns: this protocol's fields and content blocks. Never touches: answers (see `messages_answer`), what a model makes of a conversation.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from deepinfer.server import fields
from deepinfer.server.conversation import Conversation, Tool, ToolChoice
from deepinfer.server.errors import BadRequestError
from deepinfer.server.fields import typed
from deepinfer.server.http.call import Call
from deepinfer.server.protocols.common import Asked, asked_form, check_choice, effort, form, image_part, objects, tool

_SAMPLING = tuple(name for name in fields.SAMPLING if name not in ("n", "stop", "max_tokens"))
_IGNORED_BLOCKS = ("redacted_thinking",)


def read(call: Call, body: Mapping[str, Any]) -> Asked:
    """Reads a body.

    Raises:
        ApiError: a field is wrong or not served.
    """
    model = fields.check_model(call, body)
    fields.refuse(body, {"container": (), "mcp_servers": ([],)})
    values = fields.sampling_values(body, _SAMPLING)
    if type(body.get("max_tokens")) is not int:
        raise BadRequestError("max_tokens is required: an integer of at least 1", param="max_tokens")
    values["max_tokens"] = body["max_tokens"]
    stops = typed(body, "stop_sequences", list, [])
    if any(not isinstance(s, str) for s in stops):
        raise BadRequestError("stop_sequences must be a list of strings", param="stop_sequences")
    values["stop"] = stops
    output = typed(body, "output_config", dict, {})
    values |= asked_form(form(output.get("format"), "output_config.format", None), "output_config.format", body)
    params = fields.sampling_params(call, values, {"stop": "stop_sequences"})
    return Asked(model, conversation(body), params, fields.Streaming(typed(body, "stream", bool, False)))


def conversation(body: Mapping[str, Any]) -> Conversation:
    """Everything of a body that the model is told.

    Raises:
        BadRequestError: a message or tool is wrong; ``param`` says which.
    """
    messages: list[dict[str, Any]] = []
    if body.get("system"):
        messages.append({"role": "system", "content": _text(body["system"], "system")})
    given = objects(body.get("messages"), "messages", "messages")
    if not given:
        raise BadRequestError("messages must not be empty", param="messages")
    for place, message in enumerate(given):
        messages += _message(message, f"messages[{place}]")
    tools, choice = _tools(body)
    last = messages[-1]
    continued = last["role"] == "assistant" and isinstance(last.get("content"), str) and not last.get("tool_calls")
    thinking = _thinking(body)
    wanted, _ = effort(typed(body, "output_config", dict, {}).get("effort"), "output_config.effort")
    return Conversation(
        messages=messages,
        tools=tools,
        tool_choice=choice,
        thinking=thinking,
        effort=wanted,
        add_generation_prompt=not continued,
        continue_final_message=continued,
        template_kwargs=typed(body, "chat_template_kwargs", dict, {}),
    )


def _thinking(body: Mapping[str, Any]) -> bool:
    """Left out means no, in this protocol."""
    kind = typed(body, "thinking", dict, {}).get("type", "disabled")
    if kind not in ("enabled", "disabled", "adaptive"):
        raise BadRequestError("thinking.type must be enabled, adaptive or disabled", param="thinking.type")
    return bool(kind != "disabled")


def _text(value: Any, at: str) -> str:
    """A string, or text blocks."""
    if isinstance(value, str):
        return value
    texts = []
    for place, block in enumerate(objects(value, at, "text blocks")):
        if block.get("type") != "text" or not isinstance(block.get("text"), str):
            raise BadRequestError(f"{at}[{place}] must be a text block", param=f"{at}[{place}]")
        texts.append(block["text"])
    return "\n".join(texts)


def _message(message: Mapping[str, Any], at: str) -> list[dict[str, Any]]:
    role = message.get("role")
    if role not in ("user", "assistant", "system"):
        raise BadRequestError(f"{at}.role must be user or assistant", param=f"{at}.role")
    content = message.get("content")
    at += ".content"
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    blocks = objects(content, at, "content blocks")
    if role == "assistant":
        return [_assistant(blocks, at)]
    results: list[dict[str, Any]] = []
    parts: list[dict[str, Any]] = []
    for place, block in enumerate(blocks):
        where = f"{at}[{place}]"
        if block.get("type") == "tool_result":
            results.append(_result(block, where))
        else:
            parts.append(_part(block, where))
    if parts or not results:
        results.append({"role": role, "content": _plain(parts)})
    return results


def _plain(parts: list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """Parts as one text, unless there are images among them."""
    return parts if any(p["type"] != "text" for p in parts) else "\n".join(p["text"] for p in parts)


def _assistant(blocks: list[Mapping[str, Any]], at: str) -> dict[str, Any]:
    texts, thoughts, calls = [], [], []
    for place, block in enumerate(blocks):
        where = f"{at}[{place}]"
        match block.get("type"):
            case "text":
                texts.append(typed(block, "text", str, "", f"{where}."))
            case "thinking":
                thoughts.append(typed(block, "thinking", str, "", f"{where}."))
            case "tool_use":
                name, arguments = block.get("name"), typed(block, "input", dict, {}, f"{where}.")
                if not isinstance(name, str) or not name:
                    raise BadRequestError(f"{where}.name must be a string", param=f"{where}.name")
                function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
                calls.append({"id": typed(block, "id", str, "", f"{where}."), "type": "function", "function": function})
            case kind if kind in _IGNORED_BLOCKS:
                continue
            case kind:
                raise BadRequestError(f"{where}.type {kind!r} is not served", param=f"{where}.type", code="unsupported_part")
    made: dict[str, Any] = {"role": "assistant", "content": "".join(texts) if texts or not calls else None}
    if thoughts:
        made["reasoning_content"] = "\n".join(thoughts)
    if calls:
        made["tool_calls"] = calls
    return made


def _result(block: Mapping[str, Any], at: str) -> dict[str, Any]:
    content = block.get("content")
    if content is None or isinstance(content, str):
        said: str | list[dict[str, Any]] = content or ""
    else:
        said = _plain([_part(b, f"{at}.content[{i}]") for i, b in enumerate(objects(content, f"{at}.content", "content blocks"))])
    return {"role": "tool", "tool_call_id": typed(block, "tool_use_id", str, "", f"{at}."), "content": said}


def _part(block: Mapping[str, Any], at: str) -> dict[str, Any]:
    match block.get("type"):
        case "text" if isinstance(block.get("text"), str):
            return {"type": "text", "text": block["text"]}
        case "text":
            raise BadRequestError(f"{at}.text must be a string", param=f"{at}.text")
        case "image":
            source = typed(block, "source", dict, {}, f"{at}.")
            if source.get("type") != "base64":
                raise BadRequestError(
                    f"{at}.source.type must be base64: nothing is fetched; send the image itself",
                    param=f"{at}.source",
                    code="unsupported_image",
                )
            kind, data = source.get("media_type"), source.get("data")
            if not isinstance(kind, str) or not kind.startswith("image/") or not isinstance(data, str):
                raise BadRequestError(f"{at}.source needs a media_type of an image, and data in base64", param=f"{at}.source")
            return image_part(f"data:{kind};base64,{data}", f"{at}.source")
        case kind:
            raise BadRequestError(
                f"{at}.type {kind!r} is not served; blocks are text, image and tool_result", param=f"{at}.type", code="unsupported_part"
            )


def _tools(body: Mapping[str, Any]) -> tuple[tuple[Tool, ...], ToolChoice]:
    tools = []
    for place, given in enumerate(objects(body.get("tools") or [], "tools", "tools")):
        at = f"tools[{place}]"
        if given.get("type") not in (None, "custom"):
            raise BadRequestError(
                f"{at}.type {given.get('type')!r} is not served; tools are the client's own", param=f"{at}.type", code="unsupported_tool"
            )
        tools.append(tool(given.get("name"), given, "input_schema", at))
    said = typed(body, "tool_choice", dict, {})
    parallel = not typed(said, "disable_parallel_tool_use", bool, False, "tool_choice.")
    match said:
        case {"type": "auto"}:
            choice = ToolChoice("auto", parallel=parallel)
        case {"type": "any"}:
            choice = ToolChoice("required", parallel=parallel)
        case {"type": "tool", "name": str(name)}:
            choice = ToolChoice("required", name, parallel=parallel)
        case {"type": "none"}:
            choice = ToolChoice("none")
        case {"type": _} | {"name": _}:
            raise BadRequestError("tool_choice.type must be auto, any, tool (with a name) or none", param="tool_choice")
        case _:
            choice = ToolChoice("auto", parallel=parallel)
    found = tuple(tools)
    check_choice(found, choice)
    return found, choice
