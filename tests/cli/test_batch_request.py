"""Bodies of batch lines: what is passed on, what is refused by name, what a response looks like."""

from __future__ import annotations

from typing import Any

import pytest

from deepinfer import StructuredOutputs
from deepinfer.cli.batch_file import LineError
from deepinfer.cli.batch_request import read_body, response_body
from deepinfer.outputs import CompletionOutput, Logprob, RequestOutput

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("url", "body", "says"),
    [
        (CHAT, {}, "messages must be"),
        (CHAT, {"messages": []}, "messages must be"),
        (CHAT, {"messages": [{"content": "x"}]}, "role"),
        (CHAT, {"messages": [{"role": "user", "content": None}]}, "content"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "text parts"),
        (CHAT, {"messages": MESSAGES, "temprature": 0}, "did you mean temperature"),
        (CHAT, {"messages": MESSAGES, "stream": True}, "stream is not served"),
        (CHAT, {"messages": MESSAGES, "tools": [{"type": "function"}]}, "tools is not served"),
        (CHAT, {"messages": MESSAGES, "response_format": {"type": "xml"}}, "type 'xml' is not known"),
        (CHAT, {"messages": MESSAGES, "response_format": {"type": "json_schema"}}, "needs .*json_schema"),
        (CHAT, {"messages": MESSAGES, "response_format": "json"}, "an object with a type"),
        (CHAT, {"messages": MESSAGES, "structured_outputs": {"regexp": "a"}}, "no regexp"),
        (
            CHAT,
            {"messages": MESSAGES, "structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
            "give one of them",
        ),
        (CHAT, {"messages": MESSAGES, "top_logprobs": 3}, "needs logprobs"),
        (CHAT, {"messages": MESSAGES, "logprobs": 3}, "true or false"),
        (CHAT, {"messages": MESSAGES, "max_tokens": 3, "max_completion_tokens": 4}, "differ"),
        (CHAT, {"messages": MESSAGES, "prompt": "x"}, "unknown field 'prompt'"),
        (COMPLETIONS, {}, "prompt must be"),
        (COMPLETIONS, {"prompt": []}, "prompt must be"),
        (COMPLETIONS, {"prompt": [1, "a"]}, "prompt must be"),
        (COMPLETIONS, {"prompt": [True]}, "prompt must be"),
        (COMPLETIONS, {"prompt": "x", "echo": True}, "echo is not served"),
        (COMPLETIONS, {"prompt": "x", "suffix": "y"}, "suffix is not served"),
        (COMPLETIONS, {"prompt": "x", "best_of": 3}, "best_of"),
    ],
)
def test_what_is_not_served_is_named(url: str, body: dict[str, Any], says: str) -> None:
    with pytest.raises(LineError, match=says):
        read_body(url, body)


def test_labels_and_neutral_values_are_accepted() -> None:
    body = {"messages": MESSAGES, "model": "m", "user": "u", "stream": False, "tools": [], "response_format": {"type": "text"}}
    assert read_body(CHAT, body).sampling == {"max_tokens": None}


@pytest.mark.parametrize(
    ("body", "form"),
    [
        ({"response_format": {"type": "json_object"}}, StructuredOutputs(json_object=True)),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}, "strict": True}}},
            StructuredOutputs(json={"type": "object"}, strict=True),
        ),
        ({"response_format": {"type": "json_schema", "name": "n", "schema": {}, "strict": None}}, StructuredOutputs(json={})),
        ({"response_format": {"type": "regex", "pattern": "a+"}}, StructuredOutputs(regex="a+")),
        ({"response_format": {"type": "grammar", "grammar": 'root ::= "a"'}}, StructuredOutputs(grammar='root ::= "a"')),
        (
            {"response_format": {"type": "structural_tag", "format": {"type": "any_text"}}},
            StructuredOutputs(structural_tag={"type": "structural_tag", "format": {"type": "any_text"}}),
        ),
        ({"structured_outputs": {"choice": ["a", "b"], "regex": None, "strict": None}}, StructuredOutputs(choice=["a", "b"])),
    ],
)
def test_forms_of_answers_are_read(body: dict[str, Any], form: StructuredOutputs) -> None:
    assert read_body(CHAT, {"messages": MESSAGES, **body}).sampling["structured_outputs"] == form
    assert read_body(COMPLETIONS, {"prompt": "x", **body}).sampling["structured_outputs"] == form


def test_sampling_values_are_passed_on() -> None:
    body = {"messages": MESSAGES, "temperature": 0.5, "seed": 3, "n": 2, "logprobs": True, "top_logprobs": 4, "max_completion_tokens": 9}
    work = read_body(CHAT, body)
    assert work.sampling == {"temperature": 0.5, "seed": 3, "n": 2, "logprobs": 4, "max_tokens": 9}
    assert read_body(COMPLETIONS, {"prompt": "x", "stop": "s", "best_of": 1}).sampling == {"stop": "s"}


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert read_body(CHAT, {"messages": [{"role": "user", "content": parts}]}).messages == [{"role": "user", "content": "ab"}]


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [("x", ["x"]), ([1, 2], [[1, 2]]), (["x", "y"], ["x", "y"]), ([[1], [2, 3]], [[1], [2, 3]]), (["x", [1]], ["x", [1]])],
)
def test_every_form_of_a_prompt(prompt: Any, prompts: list[Any]) -> None:
    assert read_body(COMPLETIONS, {"prompt": prompt}).prompts == prompts


def output(prompt_tokens: int, answers: list[CompletionOutput], cached: int = 0) -> RequestOutput:
    return RequestOutput("r", "p", list(range(prompt_tokens)), answers, True, num_cached_tokens=cached)


def test_a_chat_response() -> None:
    work = read_body(CHAT, {"messages": MESSAGES, "logprobs": True, "top_logprobs": 1})
    position = {7: Logprob(-2.0, 2, "é"), 5: Logprob(-1.0, 1, "b")}
    body = response_body(work, "m", 12, [output(4, [CompletionOutput(0, "é", [7], logprobs=[position], finish_reason="stop")], cached=3)])
    assert body["object"] == "chat.completion" and body["model"] == "m" and body["created"] == 12
    assert body["usage"] == {
        "prompt_tokens": 4,
        "completion_tokens": 1,
        "total_tokens": 5,
        "prompt_tokens_details": {"cached_tokens": 3},
    }
    (choice,) = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": "é"} and choice["finish_reason"] == "stop"
    assert choice["logprobs"]["content"] == [
        {"token": "é", "logprob": -2.0, "bytes": [195, 169], "top_logprobs": [{"token": "b", "logprob": -1.0, "bytes": [98]}]}
    ]


def test_choices_of_several_prompts_are_numbered_through() -> None:
    work = read_body(COMPLETIONS, {"prompt": ["x", "y"], "n": 2, "temperature": 1})
    outputs = [output(1, [CompletionOutput(i, t, [1], finish_reason="length") for i, t in enumerate(pair)]) for pair in ("ab", "cd")]
    body = response_body(work, "m", 0, outputs)
    assert [(c["index"], c["text"], c["logprobs"]) for c in body["choices"]] == [
        (0, "a", None),
        (1, "b", None),
        (2, "c", None),
        (3, "d", None),
    ]


def test_completion_logprobs_keep_their_offsets() -> None:
    work = read_body(COMPLETIONS, {"prompt": "x", "logprobs": 1})
    positions = [{1: Logprob(-0.5, 1, "ab")}, {2: Logprob(-3.0, 2, "c"), 9: Logprob(-0.1, 1, "d")}]
    body = response_body(work, "m", 0, [output(1, [CompletionOutput(0, "abc", [1, 2], logprobs=positions, finish_reason="length")])])
    assert body["choices"][0]["logprobs"] == {
        "tokens": ["ab", "c"],
        "token_logprobs": [-0.5, -3.0],
        "top_logprobs": [{"ab": -0.5}, {"d": -0.1, "c": -3.0}],
        "text_offset": [0, 2],
    }
