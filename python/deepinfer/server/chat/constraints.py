"""What the text of an answer must be where tools or a form are asked for, of models with marked answers.

Owns: structural tags around reasoning, tool calls and forms, with marks as tokens where they are tokens. Never touches: compiling them,
DeepSeek's own calls (see `dsml`).

A form is a form of the answer: reasoning before it is free. With tools beside it, the answer is either calls or of the form. Arguments are
held to a tool's schema if the tool is strict or a call is required; a call that a model makes of its own accord, of a tool that is not
strict, is held to nothing, so that no schema of a client can turn its request away needlessly.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from deepinfer.sampling import SamplingParams
from deepinfer.server.chat.bits import Mark
from deepinfer.server.conversation import Tool, ToolChoice
from deepinfer.structured import tool_tag
from deepinfer.structured.screen import screen
from deepinfer.structured_outputs import StructuredOutputs

Format = dict[str, Any]
BREAKS: Format = {"type": "regex", "pattern": "\\n{0,2}"}
"""Line breaks behind reasoning, which models write there and nobody reads."""
_ANYTHING: Format = {"type": "object", "additionalProperties": True}


def form_format(form: StructuredOutputs) -> Format:
    """A form as a part of a structural tag.

    Raises:
        GrammarError: it is malformed; within a tag it would be complained of as something that the client did not write.
    """
    source = screen(form).source
    match form.kind:
        case "json" | "json_object":
            made: Format = {"type": "json_schema", "json_schema": json.loads(source)}
            if form.any_order:
                made["any_order"] = True
            if form.max_whitespace is not None or not form.any_whitespace:
                made["max_whitespace_cnt"] = form.max_whitespace if form.any_whitespace else 1
            return made
        case "regex":
            return {"type": "regex", "pattern": form.regex}
        case "grammar":
            return {"type": "grammar", "grammar": form.grammar}
        case "choice":
            return {"type": "or", "elements": [{"type": "const_string", "value": c} for c in form.choices]}
        case _:
            return dict(json.loads(source)["format"])


def constrained(
    params: SamplingParams, tools: Sequence[Tool], choice: ToolChoice, calls: tuple[Mark, Mark], thoughts: Format | None
) -> SamplingParams:
    """The sampling values with what tools and form ask of the answer.

    Args:
        tools: none where none may be called.
        calls: the marks around a call.
        thoughts: reasoning that may come first, of :func:`reasoning_format`.
    """
    form = params.form
    called = _calls(tools, choice, calls, beside=form is not None)
    if form is None and called is None:
        return params
    if called is None and thoughts is None:
        return params
    answer = called
    if form is not None and choice.mode != "required":
        answer = form_format(form) if called is None else {"type": "or", "elements": [form_format(form), called]}
    assert answer is not None
    whole = answer if thoughts is None else {"type": "sequence", "elements": [thoughts, BREAKS, answer]}
    tag = {"type": "structural_tag", "format": whole}
    return params.clone(structured_outputs=StructuredOutputs(structural_tag=tag, strict=form is not None and form.strict))


def reasoning_format(opening: Mark, closing: Mark, *, inside: bool) -> Format:
    """Reasoning before an answer: its rest where the prompt ends within it, else all of it or nothing."""
    as_tokens = opening.id is not None and closing.id is not None
    content: Format = {"type": "any_text", "excludes": [opening.text, closing.text]}
    if as_tokens:
        content = {"type": "any_tokens", "exclude_tokens": [opening.id, closing.id]}
    tag: Format = {"type": "tag", "begin": "" if inside else _mark(opening), "content": content, "end": _mark(closing)}
    return tag if inside else {"type": "optional", "content": tag}


def _mark(mark: Mark) -> str | Format:
    return mark.text if mark.id is None else {"type": "token", "token": mark.id}


def _calls(tools: Sequence[Tool], choice: ToolChoice, marks: tuple[Mark, Mark], *, beside: bool) -> Format | None:
    """Tool calls, and free text around them where they are not required; ``beside`` a form at least one call and no free text."""
    forced = choice.mode == "required"
    if not tools or not (forced or beside or any(t.strict for t in tools)):
        return None
    given = [{"name": t.name, "parameters": dict(t.parameters) or None if forced or t.strict else _ANYTHING} for t in tools]
    wanted = choice.name or ("required" if forced or beside else "auto")
    tag = tool_tag(given, wanted, parallel=choice.parallel)
    return None if tag is None else _with_tokens(tag["format"], marks)


def _with_tokens(form: Format, marks: tuple[Mark, Mark]) -> Format:
    """The same with marks as tokens instead of text: their spelling would be text to whoever reads the answer."""
    opening, closing = marks
    if opening.id is None or closing.id is None:
        return form
    tags = [_tag_with_tokens(t, opening, closing) for t in form["tags"]]
    if form["type"] == "triggered_tags":
        rest = {k: v for k, v in form.items() if k not in ("type", "triggers", "tags", "excludes")}
        return {"type": "token_triggered_tags", "trigger_tokens": [opening.id], "tags": tags, "exclude_tokens": [closing.id], **rest}
    return {**form, "tags": tags}


def _tag_with_tokens(tag: Mapping[str, Any], opening: Mark, closing: Mark) -> Format:
    begin, end = tag["begin"].removeprefix(opening.text), tag["end"].removesuffix(closing.text)
    parts = [{"type": "const_string", "value": begin}, tag["content"], {"type": "const_string", "value": end}]
    return {"type": "tag", "begin": _mark(opening), "content": {"type": "sequence", "elements": parts}, "end": _mark(closing)}
