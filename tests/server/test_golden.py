"""Streamed answers of every protocol, byte for byte as they were. To write them anew: GOLDEN=write pytest tests/server/test_golden.py"""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path
from typing import Any

import pytest

import chat_kit as kit
from deepinfer.server import fresh
from server_kit import in_loop, scripted

FOLDER = Path(__file__).parent / "golden"
TEXT = "<think>hm</think>Hi 😀"
CALLS = (
    '<think>hm</think>So:\n<tool_call>\n{"name": "f", "arguments": {"a": [1]}}\n</tool_call>\n'
    '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>'
)
OTHER = "ok"
FUNCTION = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "array"}}}}


def _cases() -> dict[str, tuple[str, dict[str, Any], str]]:
    """Name → path, body, first answer."""
    made: dict[str, tuple[str, dict[str, Any], str]] = {}
    asked = {"model": "m", "stream": True, "messages": [{"role": "user", "content": "hi"}]}
    for n, logprobs, usage, tools in itertools.product((1, 2), (False, True), (False, True), (False, True)):
        name = f"n{n}{'-logprobs' * logprobs}{'-usage' * usage}{'-tools' * tools}"
        body: dict[str, Any] = dict(asked)
        if n > 1:
            body["n"] = n
        if logprobs:
            body |= {"logprobs": True, "top_logprobs": 1}
        if usage:
            body["stream_options"] = {"include_usage": True}
        if tools:
            body["tools"] = [{"type": "function", "function": FUNCTION}, {"type": "function", "function": {"name": "g"}}]
        made[f"chat-{name}"] = ("/v1/chat/completions", body, CALLS if tools else TEXT)
        if not tools:
            text: dict[str, Any] = {k: v for k, v in body.items() if k not in ("messages", "top_logprobs", "logprobs")}
            made[f"completions-{name}"] = ("/v1/completions", {**text, "prompt": "hi", **({"logprobs": 1} if logprobs else {})}, OTHER)
    for logprobs, tools in itertools.product((False, True), (False, True)):
        body = {"model": "m", "stream": True, "input": "hi"}
        if logprobs:
            body |= {"include": ["message.output_text.logprobs"], "top_logprobs": 1}
        if tools:
            body["tools"] = [{"type": "function", **FUNCTION}, {"type": "function", "name": "g"}]
        made[f"responses{'-logprobs' * logprobs}{'-tools' * tools}"] = ("/v1/responses", body, CALLS if tools else TEXT)
    for tools in (False, True):
        body = {**asked, "max_tokens": 200, "thinking": {"type": "enabled", "budget_tokens": 1024}}
        if tools:
            body["tools"] = [{"name": "f", "input_schema": FUNCTION["parameters"]}, {"name": "g", "input_schema": {"type": "object"}}]
        made[f"messages{'-tools' * tools}"] = ("/v1/messages", body, CALLS if tools else TEXT)
    return made


CASES = _cases()


async def transcript(path: str, body: dict[str, Any], text: str) -> bytes:
    """The bytes of one answer."""
    tokenizer = kit.vocabulary()
    async with scripted(tokenizer=tokenizer, max_model_len=1024) as app:
        kit.answering(app, kit.drawn(tokenizer, text), kit.drawn(tokenizer, OTHER))
        answer = await app.send("POST", path, body, headers={"x-request-id": "golden"}).done()
        assert answer.status == 200, answer.body
        return answer.body


@pytest.mark.parametrize("name", sorted(CASES))
@in_loop
async def test_the_bytes_of_a_streamed_answer(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = itertools.count(1)
    monkeypatch.setattr(fresh, "new_id", lambda prefix: f"{prefix}{next(numbers)}")
    monkeypatch.setattr(fresh, "now", lambda: 1_700_000_000)
    made = await transcript(*CASES[name])
    file = FOLDER / f"{name}.sse"
    if os.environ.get("GOLDEN") == "write":
        FOLDER.mkdir(exist_ok=True)
        file.write_bytes(made)
    assert made.decode() == file.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", sorted(n for n in CASES if n.startswith(("chat", "completions"))))
def test_each_answer_has_one_role_and_one_end_and_counts_come_last(name: str) -> None:
    _, body, text = CASES[name]
    events = [line[6:] for line in (FOLDER / f"{name}.sse").read_text(encoding="utf-8").split("\n") if line.startswith("data: ")]
    assert events.pop() == "[DONE]"
    chunks = [json.loads(e) for e in events]
    n, usage, chat = body.get("n", 1), "stream_options" in body, name.startswith("chat")
    counted = [c for c in chunks if c.get("usage")]
    assert counted == (chunks[-1:] if usage else []) and all(("usage" in c) == usage for c in chunks)
    if usage:
        last = chunks.pop()
        made = len(kit.drawn(kit.vocabulary(), text)) + (n - 1) * len(kit.drawn(kit.vocabulary(), OTHER))
        assert last["choices"] == [] and last["usage"]["completion_tokens"] == made
        assert last["usage"]["total_tokens"] == made + last["usage"]["prompt_tokens"]
        assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 4}
    for index in range(n):
        mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        ends = [c["finish_reason"] for c in mine if c["finish_reason"] is not None]
        assert ends == ["tool_calls" if "tools" in body and index == 0 else "stop"] and mine[-1]["finish_reason"] == ends[0]
        assert all(len(c["choices"]) == 1 for c in chunks)
        if chat:
            assert [c["delta"].get("role") for c in mine] == ["assistant"] + [None] * (len(mine) - 1)
            said = "".join(c["delta"].get("content") or "" for c in mine)
            assert said == (("So:\n" if "tools" in body else "Hi 😀") if index == 0 else OTHER)
            shown = [e for c in mine for e in (c["logprobs"] or {}).get("content") or []]
            assert (b"".join(bytes(e["bytes"]) for e in shown).decode() == said) == bool(body.get("logprobs"))
            assert all(len(e["top_logprobs"]) == 1 for e in shown)


@in_loop
async def test_what_streams_is_what_comes_at_once() -> None:
    """Text, reasoning, calls and counts of the two ways, for every protocol."""
    tokenizer = kit.vocabulary()
    async with scripted(tokenizer=tokenizer, max_model_len=1024) as app:
        kit.answering(app, kit.drawn(tokenizer, CALLS), kit.drawn(tokenizer, OTHER))
        for name in ("chat-n2-logprobs-usage-tools", "responses-logprobs-tools", "messages-tools"):
            path, body, _ = CASES[name]
            streamed = (await app.send("POST", path, body).done()).events()
            whole = (
                await app.send("POST", path, {**{k: v for k, v in body.items() if k != "stream_options"}, "stream": False}).done()
            ).json()
            if path.endswith("completions"):
                chunks = [c for e in streamed[:-2] for c in e["choices"]]
                assert streamed[-2]["usage"] == whole["usage"]
                for choice in whole["choices"]:
                    mine = [c for c in chunks if c["index"] == choice["index"]]
                    assert "".join(c["delta"].get("content") or "" for c in mine) == choice["message"]["content"]
                    assert [e for c in mine for e in (c["logprobs"] or {}).get("content") or []] == choice["logprobs"]["content"]
                    assert mine[-1]["finish_reason"] == choice["finish_reason"]
            elif path.endswith("responses"):
                final = streamed[-1][1]["response"]
                assert [e[1]["sequence_number"] for e in streamed] == list(range(len(streamed)))
                assert all(name == e["type"] for name, e in streamed)
                for made in (final, whole):
                    for item in made["output"]:
                        item["id"] = item["call_id"] = ""
                assert final["output"] == whole["output"] and final["usage"] == whole["usage"] and final["status"] == "completed"
            else:
                assert streamed[-2][1]["usage"] == whole["usage"] and streamed[-2][1]["delta"]["stop_reason"] == "tool_use"
                parts = {e["index"]: "" for _, e in streamed if "index" in e}
                for _, e in streamed:
                    if e["type"] == "content_block_delta":
                        parts[e["index"]] += next(v for k, v in e["delta"].items() if k != "type")
                assert list(parts.values()) == ["hm", "So:\n", '{"a": [1]}', "{}"]
                assert [b.get("input", b.get("text", b.get("thinking"))) for b in whole["content"]] == ["hm", "So:\n", {"a": [1]}, {}]
