"""Structural tags for tool calls: free text in which every call has a known name and arguments of that tool's schema.

Owns: the tag of each style of calls. Never touches: requests, parsing of answers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from deepinfer.errors import GrammarError

ToolChoice = str | Mapping[str, Any]
Style = Literal["hermes"]
_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


def tool_tag(
    tools: Sequence[Mapping[str, Any]], tool_choice: ToolChoice | None = "auto", style: Style = "hermes", *, parallel: bool = True
) -> dict[str, Any] | None:
    """The structural tag of an answer that may call tools; ``None`` where nothing has to be held to (no tools, or choice ``"none"``).

    Args:
        tools: in OpenAI's form, ``{"type": "function", "function": {"name", "parameters"}}``, or the inner mapping alone.
        tool_choice: ``"auto"`` (text, calls, or both), ``"none"``, ``"required"`` (one call or more, and nothing else), or one tool, as
            ``{"type": "function", "function": {"name"}}``, ``{"name"}``, or its name.
        style: ``"hermes"``: ``<tool_call>`` line, ``{"name": ..., "arguments": ...}`` line, ``</tool_call>``, as ChatML models write calls.
        parallel: allow more than one call.

    Raises:
        GrammarError: a tool has no name, two have the same, or the choice names none of them.
    """
    if style != "hermes":
        raise GrammarError(f"tool calls of style {style!r} are not known; use 'hermes'")
    functions = [_function(tool) for tool in tools]
    names = [name for name, _ in functions]
    if len(set(names)) != len(names):
        raise GrammarError("two tools have the same name; rename one of them")
    if tool_choice == "none" or (not functions and tool_choice in (None, "auto")):
        return None
    wanted = _named(tool_choice)
    if wanted is not None and wanted not in names:
        raise GrammarError(f"tool_choice names {wanted!r}, which is none of the tools; choose one of {', '.join(names) or 'none'}")
    if not functions:
        raise GrammarError("tool_choice asks for a call, and there are no tools; give some")
    tags = [_tag(name, schema) for name, schema in functions if wanted in (None, name)]
    if tool_choice in (None, "auto"):
        form: dict[str, Any] = {"type": "triggered_tags", "triggers": [_OPEN], "tags": tags, "stop_after_first": not parallel}
    else:
        one = wanted is not None or not parallel
        form = {"type": "tags_with_separator", "tags": tags, "separator": "\n", "at_least_one": True, "stop_after_first": one}
    return {"type": "structural_tag", "format": form}


def _function(tool: Mapping[str, Any]) -> tuple[str, Any]:
    inner = tool.get("function", tool)
    name = inner.get("name") if isinstance(inner, Mapping) else None
    if not isinstance(name, str) or not name:
        raise GrammarError("a tool needs a function with a name")
    schema = inner.get("parameters")
    return name, {"type": "object", "properties": {}} if schema is None or schema == {} else schema


def _named(choice: ToolChoice | None) -> str | None:
    if choice in (None, "auto", "required", "any"):
        return None
    if isinstance(choice, str):
        return choice
    inner = choice.get("function", choice) if isinstance(choice, Mapping) else {}
    name = inner.get("name") if isinstance(inner, Mapping) else None
    if not isinstance(name, str) or not name:
        raise GrammarError("tool_choice must be 'auto', 'none', 'required', or name a function")
    return name


def _tag(name: str, schema: Any) -> dict[str, Any]:
    return {
        "type": "tag",
        "begin": f'{_OPEN}\n{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": ',
        "content": {"type": "json_schema", "json_schema": schema},
        "end": f"}}\n{_CLOSE}",
    }
