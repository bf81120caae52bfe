"""`/v1/completions` of a real server: forms of a prompt, whole and streamed answers, log-probabilities, what is refused."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from server_kit import Served

GREEDY: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_tokens": 6, "ignore_eos": True}


def complete(server: Served, **fields: Any) -> dict[str, Any]:
    answer = server.post("/v1/completions", {**GREEDY, **fields})
    assert answer.status_code == 200, answer.text
    made: dict[str, Any] = answer.json()
    return made


def joined(events: list[Any], index: int = 0) -> str:
    assert events[-1] == "[DONE]"
    return "".join(c["text"] for e in events[:-1] for c in e["choices"] if c["index"] == index)


def test_text_ids_and_lists_of_both_are_one_prompt(server: Served) -> None:
    ids = server.post("/tokenize", {"prompt": "the fox"}).json()["tokens"]
    text = complete(server, prompt="the fox")
    assert complete(server, prompt=ids)["choices"][0]["text"] == text["choices"][0]["text"]
    mixed = complete(server, prompt=["the fox", ids])
    assert [(c["index"], c["text"]) for c in mixed["choices"]] == [(i, text["choices"][0]["text"]) for i in range(2)]
    assert mixed["usage"]["prompt_tokens"] == 2 * len(ids) and mixed["usage"]["completion_tokens"] == 12
    assert text["object"] == "text_completion" and text["model"] == "tiny" and text["choices"][0]["finish_reason"] == "length"


def test_a_stream_says_what_the_whole_answer_says(server: Served) -> None:
    fields = {
        **GREEDY,
        "prompt": ["the quick", "brown"],
        "n": 2,
        "temperature": 1.0,
        "seed": 5,
        "max_tokens": 12,
        "logprobs": 2,
        "echo": True,
    }
    whole = server.post("/v1/completions", fields).json()
    events = server.events("/v1/completions", {**fields, "stream": True, "stream_options": {"include_usage": True}})
    for choice in whole["choices"]:
        assert joined(events, choice["index"]) == choice["text"]
        pieces = [c for e in events[:-1] for c in e["choices"] if c["index"] == choice["index"]]
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            assert [x for c in pieces for x in c["logprobs"][name]] == choice["logprobs"][name]
        assert [c["finish_reason"] for c in pieces] == [None] * (len(pieces) - 1) + [choice["finish_reason"]]
    assert events[-2]["choices"] == []
    counts = ("prompt_tokens", "completion_tokens", "total_tokens")
    assert [events[-2]["usage"][name] for name in counts] == [whole["usage"][name] for name in counts]
    assert all(e["usage"] is None for e in events[:-2])


def test_the_second_answer_to_a_cold_prompt_is_no_hit(server: Served) -> None:
    def cached(stream: bool) -> int:
        body = {**GREEDY, "prompt": f"{stream}: a stream of a cold prompt? " * 8, "n": 2, "temperature": 1.0}
        if stream:
            asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
            usage = server.events("/v1/completions", asked)[-2]["usage"]
        else:
            usage = server.post("/v1/completions", body).json()["usage"]
        hits: int = usage["prompt_tokens_details"]["cached_tokens"]
        return hits

    for stream in (False, True):
        assert cached(stream) == 0 and cached(stream) > 16


def test_without_asking_there_is_no_usage_chunk(server: Served) -> None:
    events = server.events("/v1/completions", {**GREEDY, "prompt": "x", "stream": True})
    assert all(e["choices"] and "usage" not in e for e in events[:-1])


def test_echo_gives_prompt_and_exactly_the_tokens_asked_for(server: Served) -> None:
    ids = server.post("/tokenize", {"prompt": "hello world"}).json()["tokens"]
    scored = complete(server, prompt=ids, echo=True, max_tokens=1, logprobs=1)["choices"][0]
    logprobs = scored["logprobs"]
    assert len(logprobs["tokens"]) == len(ids) + 1
    assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
    for token, value, top in zip(logprobs["tokens"][1:], logprobs["token_logprobs"][1:], logprobs["top_logprobs"][1:], strict=True):
        assert top[token] >= value and max(top.values()) >= value
        assert value in top.values() or top[token] > value  # another token that reads the same may be likelier
    assert logprobs["token_logprobs"][-1] == max(logprobs["top_logprobs"][-1].values())  # greedy
    assert logprobs["text_offset"][:2] == [0, len(logprobs["tokens"][0])]
    alone = complete(server, prompt=ids, echo=True, max_tokens=0, logprobs=1)
    assert alone["choices"][0]["text"] == "hello world" and alone["usage"]["completion_tokens"] == 0
    assert alone["choices"][0]["logprobs"]["token_logprobs"] == logprobs["token_logprobs"][:-1]
    assert alone["choices"][0]["finish_reason"] == "length"


def test_extensions(server: Served) -> None:
    answer = complete(server, prompt="the fox", prompt_logprobs=1, return_token_ids=True, stop_token_ids=[5], min_tokens=2)
    (choice,) = answer["choices"]
    ids = choice["prompt_token_ids"]
    assert ids == server.post("/tokenize", {"prompt": "the fox"}).json()["tokens"] and len(choice["token_ids"]) == 6
    assert choice["prompt_logprobs"][0] is None and [str(i) in p for i, p in zip(ids[1:], choice["prompt_logprobs"][1:], strict=True)]
    stopped = complete(server, prompt="the fox", stop_token_ids=choice["token_ids"][2:3], return_token_ids=True)["choices"][0]
    assert stopped["finish_reason"] == "stop" and stopped["stop_reason"] == choice["token_ids"][2]


def test_prompt_logprobs_do_not_depend_on_what_is_cached(server: Served) -> None:
    fields: dict[str, Any] = {"prompt": "the quick brown fox jumps over the lazy dog " * 3, "prompt_logprobs": 2}
    cold = complete(server, **fields)["choices"][0]["prompt_logprobs"]
    plain = complete(server, prompt=fields["prompt"])
    assert plain["usage"]["prompt_tokens_details"]["cached_tokens"] > 0  # it is cached by now
    assert complete(server, **fields)["choices"][0]["prompt_logprobs"] == cold
    echoed = complete(server, prompt=fields["prompt"], echo=True, max_tokens=0, logprobs=2)["choices"][0]["logprobs"]
    ids = server.post("/tokenize", {"prompt": fields["prompt"]}).json()["tokens"]
    assert echoed["token_logprobs"][1:] == [p[str(i)]["logprob"] for i, p in zip(ids[1:], cold[1:], strict=True)]


def test_an_answer_keeps_to_its_form(server: Served) -> None:
    fields: dict[str, Any] = {"prompt": "x", "max_tokens": 20, "temperature": 1.0, "seed": 1, "ignore_eos": False}
    assert complete(server, **fields, structured_outputs={"choice": ["yes", "no"]})["choices"][0]["text"] in ("yes", "no")
    form = {"type": "regex", "pattern": "[0-9]{3}"}
    assert complete(server, **fields, response_format=form)["choices"][0]["text"].isdigit()
    wrong = server.post("/v1/completions", {**GREEDY, "prompt": "x", "response_format": {"type": "regex", "pattern": "("}})
    assert wrong.status_code == 400 and wrong.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"prompt": "x", "suffix": "y"}, "suffix", "not served"),
        ({"prompt": "x", "best_of": 3}, "best_of", "equals n"),
        ({"prompt": "x", "use_beam_search": True}, "use_beam_search", "not served"),
        ({"prompt": "x", "temperature": "hot"}, "temperature", "number"),
        ({"prompt": "x", "top_p": 2}, "top_p", "top_p"),
        ({"prompt": "x", "n": 3}, "n", "same answer"),
        ({"prompt": "x", "max_tokens": 0}, "max_tokens", "at least 1"),
        ({"prompt": "x", "stop": {"a": 1}}, "stop", "list"),
        ({"prompt": "x", "stream": "yes"}, "stream", "true or false"),
        ({"prompt": "x", "stream_options": {"include_usage": True}}, "stream_options", "stream: true"),
        ({"prompt": "x", "stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage", "true or false"),
        ({"prompt": "x", "logprobs": "many"}, "logprobs", "integer"),
        ({"prompt": "x", "logprobs": 21}, "logprobs", "at most 20"),
        ({"prompt": "x", "prompt_logprobs": -1}, "prompt_logprobs", "at most 20"),
        ({"prompt": "x", "bad_words": ["a"] * 1025}, "bad_words", "1025 entries"),
        ({"prompt": "x", "stop": "a" * 70000}, "stop", "characters"),
        ({"prompt": "x", "logit_bias": {"9999": 1}}, "prompt", "vocabulary"),
        ({"prompt": "x", "request_id": "a b"}, "request_id", "letters"),
        ({}, "prompt", "prompt must be"),
        ({"prompt": []}, "prompt", "prompt must be"),
        ({"prompt": ["x", [1.5]]}, "prompt", "prompt must be"),
        ({"prompt": ["x", [9999]]}, "prompt[1]", "vocabulary"),
        ({"prompt": ""}, "prompt", "empty"),
    ],
)
def test_what_is_wrong_is_named(server: Served, fields: dict[str, Any], param: str, says: str) -> None:
    answer = server.post("/v1/completions", {**GREEDY, **fields})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error" and error["param"] == param and says in error["message"], error


def test_half_a_surrogate_pair_is_no_text(server: Served) -> None:
    body = b'{"prompt": "\\ud800"}'
    answer = httpx.post(f"{server.url}/v1/completions", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400 and "Unicode" in answer.json()["error"]["message"]


def test_a_prompt_that_is_too_long_has_its_code(server: Served) -> None:
    answer = server.post("/v1/completions", {**GREEDY, "prompt": [5] * 600})
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "context_length_exceeded"
    assert complete(server, prompt=[5] * 600, truncate_prompt_tokens=20)["usage"]["prompt_tokens"] == 20


def test_unknown_fields_are_ignored(server: Served) -> None:
    assert complete(server, prompt="x", user="u", best_of=1, suffix=None, something={"new": [1]})["choices"][0]["finish_reason"] == "length"
