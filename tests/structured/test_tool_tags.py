"""Structural tags for tool calls."""

from __future__ import annotations

from typing import Any

import pytest

import grammar_kit
from deepinfer import StructuredOutputs
from deepinfer.errors import GrammarError
from deepinfer.structured import tool_tag

WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}},
}
TIME = {"name": "now"}


def call(text: str) -> str:
    return f"<tool_call>\n{text}\n</tool_call>"


PARIS = call('{"name": "weather", "arguments": {"city": "Paris"}}')
NOW = call('{"name": "now", "arguments": {}}')
OTHER = call('{"name": "other", "arguments": {}}')
WRONG = call('{"name": "weather", "arguments": {"town": "Paris"}}')
NAMED = {"type": "function", "function": {"name": "now"}}


def test_answers_call_what_they_may() -> None:
    cases: list[tuple[Any, bool, dict[str, bool]]] = [
        ("auto", True, {"Hello.": True, f"Let me see. {PARIS}": True, PARIS + NOW: True, OTHER: False, WRONG: False, "a <tool_call": True}),
        ("auto", False, {"Hello.": True, PARIS: True, PARIS + NOW: False}),
        ("required", True, {"Hello.": False, PARIS: True, f"{PARIS}\n{NOW}": True, f"{PARIS} and": False, OTHER: False, "": False}),
        ("required", False, {NOW: True, f"{PARIS}\n{NOW}": False}),
        (NAMED, True, {NOW: True, PARIS: False, "Hello.": False}),
        ("now", True, {NOW: True, PARIS: False}),
    ]
    with grammar_kit.service() as service:
        for choice, parallel, answers in cases:
            tag = tool_tag([WEATHER, TIME], choice, parallel=parallel)
            prepared = service.compile(StructuredOutputs(structural_tag=tag))
            assert {text: grammar_kit.accepts(prepared, text) for text in answers} == answers, (choice, parallel)


def test_nothing_to_hold_to() -> None:
    assert tool_tag([WEATHER], "none") is None
    assert tool_tag([], "auto") is None and tool_tag([], None) is None


@pytest.mark.parametrize(
    ("tools", "choice", "said"),
    [
        ([WEATHER], "nothing", "none of the tools"),
        ([], "required", "there are no tools"),
        ([WEATHER, WEATHER], "auto", "same name"),
        ([{"type": "function"}], "auto", "with a name"),
        ([WEATHER], {"type": "function"}, "tool_choice must be"),
    ],
)
def test_choices_that_cannot_be(tools: list[Any], choice: Any, said: str) -> None:
    with pytest.raises(GrammarError, match=said):
        tool_tag(tools, choice)
