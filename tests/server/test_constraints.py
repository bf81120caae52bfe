"""What tools and forms ask of an answer, token by token: what grammars let through, with marks as tokens and as text."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import pytest

import chat_kit as kit
from deepinfer.engine.chat_template import ChatTemplate
from deepinfer.engine.grammars import vocabulary_of
from deepinfer.engine.input_processor import InputProcessor, ModelLimits
from deepinfer.engine.text_side import TextSide
from deepinfer.errors import GrammarError
from deepinfer.sampling import SamplingParams
from deepinfer.server.chat.template import TemplateBackend
from deepinfer.server.conversation import Conversation, Tool, ToolChoice
from deepinfer.structured.compiler import Compiler
from deepinfer.structured_outputs import StructuredOutputs

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
STRICT, LOOSE = Tool("w", "", CITY, True), Tool("v", "", CITY)
NUMBER = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
W = '<tool_call>\n{"name": "w", "arguments": {"city": "x"}}\n</tool_call>'
V = W.replace('"w"', '"v"')
ODD = '<tool_call>\n{"name": "v", "arguments": {"town": "x"}}\n</tool_call>'


@cache
def backend(marks: bool) -> tuple[TemplateBackend, Compiler, Any]:
    tokenizer = kit.vocabulary(marks=marks)
    template = ChatTemplate(kit.TEMPLATE, tokenizer)
    inputs = InputProcessor(tokenizer, template, limits=ModelLimits(4096, tokenizer.vocab_size), eos_ids=(2,))
    vocabulary = vocabulary_of(TextSide(tokenizer, template, (2,), {}, 0), tokenizer.vocab_size)
    return TemplateBackend(tokenizer, template, inputs.chat_prompt, (2,)), Compiler(vocabulary), vocabulary


def verdict(text: str, marks: bool, *, params: SamplingParams | None = None, **values: Any) -> str:
    made, compiler, vocabulary = backend(marks)
    tokenizer = kit.vocabulary(marks=marks)
    rendered = made.render(Conversation([{"role": "user", "content": "hi"}], **values), params or SamplingParams())
    ids = tokenizer.encode(text) if marks else tokenizer.encode_plain(text)
    if rendered.params.form is None:
        return "free"
    return kit.follows(rendered.params.form, ids, compiler, vocabulary).split()[0]


FORM = SamplingParams(structured_outputs={"json": NUMBER})
BOTH = {"tools": (STRICT, LOOSE)}
REQUIRED = {**BOTH, "tool_choice": ToolChoice("required")}
NAMED = {**BOTH, "tool_choice": ToolChoice("required", "v")}
ONE = {**BOTH, "tool_choice": ToolChoice("required", parallel=False)}
CASES: list[tuple[dict[str, Any], str, str]] = [
    ({}, "hello", "free"),
    ({"tools": (LOOSE,)}, ODD, "free"),
    ({**BOTH, "tool_choice": ToolChoice("none")}, W, "free"),
    (BOTH, "hello", "whole"),
    (BOTH, f"well {W} and {V}", "whole"),
    (BOTH, ODD, "whole"),
    (BOTH, ODD.replace('"v"', '"w"'), "no"),
    (BOTH, W.replace('"w"', '"x"'), "no"),
    (BOTH, f"<think>so < that</think>\n\n{W}", "whole"),
    (REQUIRED, "hello", "no"),
    (REQUIRED, f"{W}\n{V}", "whole"),
    (REQUIRED, f"<think>hm</think>\n\n{W}", "whole"),
    (REQUIRED, ODD, "no"),
    (NAMED, W, "no"),
    (NAMED, V, "whole"),
    (ONE, W, "whole"),
    (ONE, f"{W}\n{V}", "no"),
    ({"params": FORM}, '{"a": 1}', "whole"),
    ({"params": FORM}, "hello", "no"),
    ({"params": FORM}, '<think>hello</think>\n\n{"a": 1}', "whole"),
    ({"params": FORM, "thinking": False}, "<think>hello", "no"),
    ({"params": FORM, "thinking": False}, '{"a": 1}', "whole"),
    ({"params": FORM, **BOTH}, '{"a": 1}', "whole"),
    ({"params": FORM, **BOTH}, W, "whole"),
    ({"params": FORM, **BOTH}, "hello", "no"),
    ({"params": FORM, **REQUIRED}, '{"a": 1}', "no"),
    ({"params": SamplingParams(structured_outputs={"choice": ["yes", "no"]})}, "<think>a</think>no", "whole"),
    ({"params": SamplingParams(structured_outputs={"regex": "[ab]+"})}, "<think>x</think>abba", "whole"),
    ({"params": SamplingParams(structured_outputs={"grammar": 'root ::= "x" | "y"'})}, "<think>x</think>z", "no"),
    ({"params": SamplingParams(structured_outputs={"json_object": True})}, '{"b": [1]}', "whole"),
]


@pytest.mark.parametrize("marks", [True, False])
@pytest.mark.parametrize(("values", "text", "expected"), CASES)
def test_what_is_let_through(values: dict[str, Any], text: str, expected: str, marks: bool) -> None:
    assert verdict(text, marks, **values) == expected


@pytest.mark.parametrize(("form", "message"), kit.MALFORMED)
def test_malformed_forms_are_refused_as_what_they_are(form: dict[str, Any], message: str) -> None:
    made, _, _ = backend(True)
    params = SamplingParams(structured_outputs=form)
    for beside in ({}, BOTH, {"thinking": True}):
        with pytest.raises(GrammarError, match=f"^{re.escape(message)}"):
            made.render(Conversation([{"role": "user", "content": "hi"}], **beside), params)


def test_spelled_marks_are_no_calls_and_marks_are_no_text() -> None:
    made, compiler, vocabulary = backend(True)
    tokenizer = kit.vocabulary()
    conversation = Conversation([{"role": "user", "content": "hi"}], tools=(STRICT,), tool_choice=ToolChoice("required"), thinking=False)
    form = made.render(conversation, SamplingParams()).params.form
    assert form is not None and kit.follows(form, tokenizer.encode_plain(W), compiler, vocabulary) == "no 0"
    for wanted in ({"regex": "(.|\n)*"}, {"regex": "[^a]*"}, {"grammar": "root ::= [^x]*"}, {"json": {"type": "string"}}):
        for name, token in tokenizer.control_tokens.items():
            if name == "<|im_end|>":
                continue  # ends the answer where it may end
            start = tokenizer.encode('"') if "json" in wanted else []
            assert kit.follows(StructuredOutputs.of(wanted), [*start, token], compiler, vocabulary) == f"no {len(start)}", name  # type: ignore[arg-type]
