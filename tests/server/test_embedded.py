"""JSON within texts: what a client or a model wrote as a call's arguments, however odd, is an object or a text, never a fault."""

from __future__ import annotations

import json

import httpx
import pytest

from deepinfer.server.conversation import ToolCallArguments, ToolCallStart
from deepinfer.server.dialogue import Counts
from deepinfer.server.embedded import read_object
from deepinfer.server.errors import BadRequestError
from deepinfer.server.protocols.messages_answer import MessagesAnswer
from server_kit import Served

DEEP = [depth * '{"a":' + "1" + depth * "}" for depth in (65, 900, 100_000)]
ODD = [*DEEP, '{"a": NaN}', '{"a": 1e999}', '{"a": "\\ud800"}', '{"\\udfff": 1}', '{"a": ' + "9" * 5000 + "}", "[1]", "5", "{", "\x00"]


def test_what_is_an_object_and_what_is_none() -> None:
    assert read_object("") == {} and read_object('{"a": [1, {"b": "ü"}]}') == {"a": [1, {"b": "ü"}]}
    assert read_object(63 * '{"a":' + "1" + 63 * "}") is not None
    assert [read_object(text) for text in ODD] == [None] * len(ODD)


@pytest.mark.parametrize("arguments", ODD, ids=range(len(ODD)))
def test_a_client_may_write_anything_as_arguments(server: Served, arguments: str) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}
    body = {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [call]}]}
    answer = server.post("/tokenize", body)
    assert answer.status_code == 200, answer.text
    ids = answer.json()["tokens"]
    assert json.dumps(arguments, ensure_ascii=False) in server.post("/detokenize", {"tokens": ids}).json()["prompt"]


def test_arguments_that_are_no_object_come_as_they_are() -> None:
    for text in ODD:
        answer = MessagesAnswer("m", "id", Counts())
        for piece in (ToolCallStart(0, "c", "f"), ToolCallArguments(0, text)):
            answer._blocks.add(piece)
        (made,) = answer.whole()["content"]
        assert (made["input"], made["partial_input"]) == ({}, text)


def test_an_error_repeats_no_more_of_what_was_sent_than_a_line_of_it(server: Served) -> None:
    answer = server.post("/v1/completions", {"prompt": "x", "temperature": "y" * 70_000})
    assert answer.status_code == 400 and len(answer.json()["error"]["message"]) < 1010
    assert BadRequestError("y" * 999).message == "y" * 999


def test_what_an_answer_repeats_can_be_written(server: Served) -> None:
    for number, status in (("1e308", 200), ("1e309", 400)):
        body = '{"input": "x", "max_output_tokens": 1, "metadata": {"a": NUMBER}}'.replace("NUMBER", number)
        answer = httpx.post(f"{server.url}/v1/responses", content=body, timeout=60)
        assert answer.status_code == status, answer.text
