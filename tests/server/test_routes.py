"""The small routes of a real server, and answers for what is no route."""

from __future__ import annotations

import pytest

from server_kit import Served


def test_models(server: Served) -> None:
    (card,) = server.get("/v1/models").json()["data"]
    assert card["id"] == "tiny" and card["max_model_len"] == 512 and card["object"] == "model"
    assert server.get("/v1/models/tiny").json() == card
    missing = server.get("/v1/models/some/other")
    assert missing.status_code == 404 and missing.json()["error"]["code"] == "model_not_found"
    assert server.post("/v1/completions", {"model": "other", "prompt": "x"}).json()["error"]["code"] == "model_not_found"


def test_health_ready_version(server: Served) -> None:
    for path in ("/health", "/ready"):
        answer = server.get(path)
        assert answer.status_code == 200 and answer.content == b""
    assert server.get("/version").json()["version"]


def test_tokens_there_and_back(server: Served) -> None:
    text = "hello <|im_start|> 안녕"
    made = server.post("/tokenize", {"model": "tiny", "prompt": text, "return_token_strs": True}).json()
    assert made["count"] == len(made["tokens"]) == len(made["token_strs"]) and made["max_model_len"] == 512
    assert 1 in made["tokens"]
    plain = server.post("/tokenize", {"prompt": text, "parse_special": False}).json()["tokens"]
    assert 1 not in plain
    for ids in (made["tokens"], plain):
        assert server.post("/detokenize", {"tokens": ids}).json() == {"prompt": text}
    assert server.post("/detokenize", {"tokens": []}).json() == {"prompt": ""}


def test_a_conversation_is_tokenised_without_what_its_user_spells(server: Served) -> None:
    chat = {"messages": [{"role": "user", "content": "<|im_end|>"}], "add_generation_prompt": False}
    ids = server.post("/tokenize", chat).json()["tokens"]
    assert ids.count(2) == 1  # the template's own


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": 3}, "prompt"),
        ("/tokenize", {"messages": "x"}, "messages"),
        ("/detokenize", {"tokens": "x"}, "tokens"),
        ("/detokenize", {"tokens": [1, None]}, "tokens"),
        ("/detokenize", {"tokens": [1, 99999]}, None),
    ],
)
def test_bad_tokens(server: Served, path: str, body: object, param: str | None) -> None:
    answer = server.post(path, body)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param


def test_tokenizer_info(server: Served) -> None:
    info = server.get("/tokenizer_info").json()
    assert info["eos_token"] == "<|im_end|>" and "im_start" in info["chat_template"]


def test_what_is_no_route_is_told_in_json(server: Served) -> None:
    missing = server.get("/v2/nothing")
    assert missing.status_code == 404 and missing.json()["error"]["code"] == "not_found" and missing.headers["x-request-id"]
    assert server.post("/v1/completions/", {}).status_code == 404
    wrong = server.get("/v1/completions")
    assert wrong.status_code == 405 and wrong.headers["allow"] == "POST" and wrong.json()["error"]["code"] == "method_not_allowed"
    embeddings = server.post("/v1/embeddings", {"input": "x", "model": "tiny"})
    assert embeddings.status_code == 501 and embeddings.json()["error"]["type"] == "not_supported_error"
    assert embeddings.headers["x-should-retry"] == "false", "clients would ask twice more"


def test_a_request_id_is_echoed_if_it_is_harmless(server: Served) -> None:
    assert server.get("/health", headers={"x-request-id": "my-id_1"}).headers["x-request-id"] == "my-id_1"
    for bad in ("a" * 200, "a b", "x\ty"):
        made = server.get("/health", headers={"x-request-id": bad}).headers["x-request-id"]
        assert made != bad and len(made) == 32
    answer = server.post("/v1/completions", {"prompt": "x", "max_tokens": 1}, headers={"x-request-id": "abc"})
    assert answer.json()["id"] == "cmpl-abc"
