"""Answers taken apart: the same pieces however they come, marks that are tokens against marks that are spelled, stop strings, cut calls."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest

import chat_kit as kit
from deepinfer.engine.chat_template import ChatTemplate
from deepinfer.engine.input_processor import InputProcessor, ModelLimits
from deepinfer.sampling import SamplingParams
from deepinfer.server.chat.template import TemplateBackend
from deepinfer.server.conversation import AnswerParser, Content, Conversation, Reasoning, Tool, ToolChoice
from deepinfer.server.conversation import ToolCallArguments as Arguments

EOS = 2
TOOLS = (Tool("weather", "of a city", {"type": "object", "properties": {"city": {"type": "string"}}}), Tool("time"))
ASKED: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]


@cache
def backend(*, marks: bool = True, template: str = kit.TEMPLATE) -> TemplateBackend:
    """A back end without an engine."""
    tokenizer = kit.vocabulary(marks=marks, template=template)
    made = ChatTemplate(template, tokenizer)
    inputs = InputProcessor(tokenizer, made, limits=ModelLimits(4096, tokenizer.vocab_size), eos_ids=(EOS,))
    return TemplateBackend(tokenizer, made, inputs.chat_prompt, (EOS,))


def parser(
    *, marks: bool = True, tools: Sequence[Tool] = (), choice: ToolChoice | None = None, template: str = kit.TEMPLATE, **values: Any
) -> AnswerParser:
    """A parser as a request would get it."""
    conversation = Conversation(ASKED, tools=tuple(tools), tool_choice=choice or ToolChoice())
    return backend(marks=marks, template=template).render(conversation, SamplingParams(**values)).parser()


def ids_of(text: str, *, marks: bool = True) -> list[int]:
    """An answer as the model would draw it: marks as tokens where it has them, and its end."""
    tokenizer = kit.vocabulary(marks=marks)
    return [*(tokenizer.encode(text) if marks else kit.spelled(tokenizer, text)), EOS]


WHOLE = (
    "<think>\nHm, 날씨 😀\n</think>\n\nLet me look.\n"
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Pa\\"ris <b>", "days": [1, {"a": "}"}]}}\n</tool_call>\n'
    '<tool_call>\n{"arguments": "{\\"x\\": 1}", "name": "time"}\n</tool_call>\n'
)
PARTS = [
    ("reasoning", "Hm, 날씨 😀\n"),
    ("content", "Let me look.\n"),
    ("call", 0, "weather", '{"city": "Pa\\"ris <b>", "days": [1, {"a": "}"}]}'),
    ("call", 1, "time", '{"x": 1}'),
]


@pytest.mark.parametrize("marks", [True, False])
def test_the_pieces_do_not_depend_on_how_an_answer_is_cut(marks: bool) -> None:
    ids = ids_of(WHOLE, marks=marks)
    for cuts in kit.all_cuts(len(ids)):
        p = parser(marks=marks, tools=TOOLS)
        assert kit.told(kit.taken(p, kit.outputs(ids, cuts))) == PARTS, cuts
        assert (p.finish_reason, p.called_tools, p.tokens, p.ended) == ("stop", True, len(ids), True)
    json.loads(PARTS[2][3])


def test_no_piece_is_late_early_or_half() -> None:
    """Token by token: what is out is always a beginning of the whole, and lags by no more than a mark's beginning or a character."""
    for marks in (True, False):
        ids = ids_of("<think>abc</think>one 안녕 < two <tool", marks=marks)
        p = parser(marks=marks, tools=TOOLS)
        out = ""
        for at, delta in enumerate(kit.outputs(ids, range(1, len(ids)))):
            pieces = p.push(delta)
            assert all("\ufffd" not in x.text for x in pieces if isinstance(x, Content | Reasoning))
            out += "".join(x.text for x in pieces if isinstance(x, Content))
            sure = kit.vocabulary(marks=marks).decode(ids[: at + 1], skip_special_tokens=True).rpartition("</think>")[2]
            if delta.finish_reason is None and "</think>" in kit.vocabulary(marks=marks).decode(ids[: at + 1]):
                held = sure.removeprefix(out)
                assert sure.startswith(out) and ("<tool_call>".startswith(held) or "\ufffd" in held or marks), (out, sure)
        assert out == "one 안녕 < two <tool"


def test_only_the_token_is_a_mark_where_there_is_one() -> None:
    tokenizer = kit.vocabulary()
    control = tokenizer.control_tokens
    ids = [control["<think>"], *kit.spelled(tokenizer, "it is </think> not over, nor <tool_call>{} here"), control["</think>"]]
    ids += [*kit.spelled(tokenizer, "ok <tool_call>\n{}\n</tool_call> <think>"), EOS]
    for cuts in ((), range(1, len(ids))):
        p = parser(tools=TOOLS)
        assert kit.told(kit.taken(p, kit.outputs(ids, cuts))) == [
            ("reasoning", "it is </think> not over, nor <tool_call>{} here"),
            ("content", "ok <tool_call>\n{}\n</tool_call> <think>"),
        ]
        assert not p.called_tools


def test_a_spelled_opening_mark_counts_at_the_start_alone() -> None:
    for text, said in (
        (" \n<think>a</think>b", [("reasoning", "a"), ("content", "b")]),
        ("say <think>a</think>b", [("content", "say <think>a</think>b")]),
        ("<thin", [("content", "<thin")]),
        ("<think>cut", [("reasoning", "cut")]),
        ("<think>cut</thi", [("reasoning", "cut</thi")]),
    ):
        ids = ids_of(text, marks=False)
        for cuts in ((), range(1, len(ids))):
            assert kit.told(kit.taken(parser(marks=False), kit.outputs(ids, cuts))) == said


def test_without_tools_a_call_is_text_and_without_marks_everything_is() -> None:
    text = 'a <tool_call>\n{"name": "time"}\n</tool_call>'
    for choice in (ToolChoice("none"), ToolChoice()):
        p = parser(marks=False, tools=TOOLS if choice.mode == "none" else (), choice=choice)
        assert kit.told(kit.taken(p, kit.outputs(ids_of(text, marks=False)))) == [("content", text)]
    plain = "{% for m in messages %}{{ m.content }}{% endfor %}"
    p = parser(marks=False, template=plain)
    assert kit.told(kit.taken(p, kit.outputs(ids_of("<think>a</think>", marks=False)))) == [("content", "<think>a</think>")]


def test_a_tool_call_ends_reasoning_that_was_not_closed() -> None:
    ids = ids_of('<think>so<tool_call>{"name": "time", "arguments": {}}</tool_call>')
    p = parser(tools=TOOLS)
    assert kit.told(kit.taken(p, kit.outputs(ids))) == [("reasoning", "so"), ("call", 0, "time", "{}")]


CALLS = [
    ('{"name": "weather", "arguments": {"city": "Par', [("call", 0, "weather", '{"city": "Par')]),
    ('{"name": "weather"', [("call", 0, "weather", "")]),
    ('{"name": "weat', [("content", '\n{"name": "weat')]),
    ('{"name": "time"}</tool_call>', [("call", 0, "time", "{}")]),
    ('{"name": "time", "arguments": null}</tool_call>', [("call", 0, "time", "{}")]),
    ('{"name": "time", "parameters": {"a": [1, 2]}, "extra": {"b": "}"}}</tool_call>', [("call", 0, "time", '{"a": [1, 2]}')]),
    ('{"arguments": {"a": 1}, "name": "time"}', [("call", 0, "time", '{"a": 1}')]),
    ('{"name": "time", "arguments": "{\\"a\\": \\"\\u00e9\\"}"}', [("call", 0, "time", '{"a": "é"}')]),
    ('{"name": "time", "arguments": {"a": 1}}</tool_call>done', [("call", 0, "time", '{"a": 1}'), ("content", "done")]),
    ('{"name": "time", "arguments": {"a": 1}</tool_call>x', [("call", 0, "time", '{"a": 1}'), ("content", "x")]),
    ("not JSON</tool_call>x", [("content", "\nnot JSONx")]),
    ('{"name": "time", "arguments": {"a": "</tool_call>"}}', None),
]


@pytest.mark.parametrize("marks", [True, False])
@pytest.mark.parametrize(("body", "said"), CALLS)
def test_calls_that_are_cut_or_broken_give_what_came(body: str, said: list[tuple[Any, ...]] | None, marks: bool) -> None:
    tokenizer = kit.vocabulary(marks=marks)
    if said is None:  # a mark within a string: spelled, it is part of the string
        said = [("call", 0, "time", '{"a": "</tool_call>"}')]
        opening = [tokenizer.control_tokens["<tool_call>"]] if marks else kit.spelled(tokenizer, "<tool_call>")
        ids = [*opening, *kit.spelled(tokenizer, body)]
    else:
        ids = ids_of("<tool_call>\n" + body, marks=marks)[:-1]
    for cuts in ((), range(1, len(ids))):
        p = parser(marks=marks, tools=TOOLS)
        assert kit.told(kit.taken(p, kit.outputs(ids, cuts, finish="length"))) == said
        assert p.finish_reason == "length"


def test_arguments_come_in_fragments_as_they_are_written() -> None:
    ids = ids_of('<tool_call>\n{"name": "weather", "arguments": {"city": "Paris in spring"}}\n</tool_call>')
    p = parser(tools=TOOLS)
    fragments = [x.text for x in kit.taken(p, kit.outputs(ids, range(1, len(ids)))) if isinstance(x, Arguments)]
    assert len(fragments) > 10 and json.loads("".join(fragments)) == {"city": "Paris in spring"}


def test_one_call_only_where_calls_are_not_to_be_parallel() -> None:
    p = parser(tools=TOOLS, choice=ToolChoice(parallel=False))
    ids = ids_of(WHOLE)
    deltas = kit.outputs(ids, range(1, len(ids)))
    pieces = []
    for delta in deltas:
        pieces += p.push(delta)
        if p.ended:
            break
    assert kit.told(pieces) == PARTS[:3] and delta.finish_reason is None
    assert (p.finish_reason, p.stop_reason) == ("stop", None) and p.push(deltas[-1]) == []


STOPS = ["stop here", "op", "\n\n", "안녕"]


@pytest.mark.parametrize("stop", STOPS)
@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_never_leaks_however_text_is_cut(stop: str, include: bool) -> None:
    """Every way of cutting text and stop into tokens and outputs; reasoning that has the stop string goes on."""
    text = f"well, s st sto {stop} and after"
    known = text[: text.index(stop) + (len(stop) if include else 0)]
    for ids in (ids_of(f"<think>a {stop} b</think>{text}"), [*ids_of(f"<think>a {stop} b</think>")[:-1], *_bytewise(text), EOS]):
        for cuts in kit.all_cuts(len(ids), 30):
            p = parser(stop=[stop], include_stop_str_in_output=include)
            got = kit.told(kit.taken(p, kit.outputs(ids, cuts, logprobs=True)))
            assert got == [("reasoning", f"a {stop} b"), ("content", known)], cuts
            assert (p.finish_reason, p.stop_reason) == ("stop", stop) and p.tokens < len(ids)


def _bytewise(text: str) -> list[int]:
    """A text of one token a byte."""
    tokenizer = kit.vocabulary()
    single = {tokenizer.token_bytes(i): i for i in range(3, 300) if len(tokenizer.token_bytes(i)) == 1}
    return [single[bytes([b])] for b in text.encode()]


def test_a_stop_string_does_not_match_before_min_tokens_nor_in_arguments() -> None:
    ids = ids_of('a stop b <tool_call>{"name": "time", "arguments": {"x": "stop"}}</tool_call> stop c')
    p = parser(tools=TOOLS, stop=["stop"], min_tokens=12, max_tokens=500)
    said = kit.told(kit.taken(p, kit.outputs(ids, range(1, len(ids)))))
    assert said == [("content", "a stop b "), ("call", 0, "time", '{"x": "stop"}')]
    assert p.stop_reason == "stop"


def test_what_was_held_for_a_stop_comes_out_at_the_end() -> None:
    ids = ids_of("please s")
    p = parser(stop=["stop"])
    pieces = [p.push(d) for d in kit.outputs(ids, range(1, len(ids)))]
    assert kit.told([x for out in pieces[:-1] for x in out]) == [("content", "please ")]
    assert kit.told(pieces[-1]) == [("content", "s")] and p.stop_reason is None


def test_the_stop_token_itself_is_shown_only_when_asked_for() -> None:
    for include, said in ((False, "a"), (True, "a.")):
        dot = ids_of(".")[0]
        p = parser(stop_token_ids=[dot], include_stop_str_in_output=include)
        assert kit.told(kit.taken(p, kit.outputs([*ids_of("a")[:-1], dot], stop_reason=dot))) == [("content", said)]
        assert p.stop_reason == dot and p.tokens == 2


def test_log_probabilities_follow_the_text_their_tokens_made() -> None:
    for marks in (True, False):
        tokenizer = kit.vocabulary(marks=marks)
        ids = ids_of("<think>hm 안</think>\n\nSure 😀 < ok", marks=marks)
        for cuts in ((), range(1, len(ids)), (7, 9)):
            p = parser(marks=marks, tools=TOOLS)
            pieces = kit.taken(p, kit.outputs(ids, cuts, logprobs=True))
            for kind, text in ((Reasoning, "hm 안"), (Content, "Sure 😀 < ok")):
                made = [entry for x in pieces if isinstance(x, kind) for entry in x.logprobs]
                data = b"".join(entry.data for entry in made)
                assert text.encode() in data and len(data) <= len(text.encode()) + 6
                assert all(entry.data == tokenizer.token_bytes(entry.token_id) and entry.token_id in entry.position for entry in made)
            assert all(x.text for x in pieces if isinstance(x, Content))


def test_tokens_are_counted_with_those_of_reasoning() -> None:
    ids = ids_of("<think>a b</think>c d")
    close = ids.index(kit.vocabulary().control_tokens["</think>"])
    p = parser()
    kit.taken(p, kit.outputs(ids, range(1, len(ids))))
    assert (p.tokens, p.reasoning_tokens) == (len(ids), close + 1)


def test_random_tokens_never_raise_and_never_leak_half_characters() -> None:
    draw = random.Random(7)
    size = kit.vocabulary().vocab_size
    for _ in range(150):
        ids = [draw.randrange(3, size) for _ in range(draw.randrange(1, 40))]
        seen = []
        for cuts in ((), range(1, len(ids)), [draw.randrange(1, 40)]):
            p = parser(tools=TOOLS, stop=["zz"])
            pieces = kit.taken(p, kit.outputs(ids, cuts, finish="length", logprobs=True))
            seen.append(kit.told([x for x in pieces if getattr(x, "text", "x")]))
        assert seen[0] == seen[1] == seen[2]
