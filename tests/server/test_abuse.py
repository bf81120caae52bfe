"""Requests that are wrong in every way, and clients that leave at every moment: nobody else notices, and nothing stays."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import random
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from server_kit import Local, local

GOOD: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"model": "tiny", "prompt": "the fox", "max_tokens": 2, "temperature": 0.5, "stop": ["a"], "logit_bias": {"5": 1}}),
    ("/v1/completions", {"prompt": [[5, 6], "x"], "max_tokens": 1, "echo": True, "logprobs": 1, "n": 2, "seed": 3}),
    ("/v1/completions", {"prompt": "x", "stream": True, "stream_options": {"include_usage": True}, "max_tokens": 2, "min_p": 0.1}),
    ("/tokenize", {"prompt": "hello", "add_special_tokens": True}),
    ("/tokenize", {"messages": [{"role": "user", "content": "x"}], "add_generation_prompt": True}),
    ("/detokenize", {"tokens": [5, 6, 7]}),
    (
        "/v1/chat/completions",
        {
            "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "x"}]}],
            "max_completion_tokens": 2,
            "logprobs": True,
            "top_logprobs": 2,
            "tools": [
                {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}}
            ],
            "response_format": {"type": "text"},
        },
    ),
    (
        "/v1/chat/completions",
        {
            "messages": [
                {"role": "user", "content": "x"},
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [{"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
                },
                {"role": "tool", "tool_call_id": "a", "content": "1"},
            ],
            "max_tokens": 2,
            "stream": True,
            "n": 2,
            "temperature": 1,
        },
    ),
    ("/v1/responses", {"input": [{"role": "user", "content": "x"}], "max_output_tokens": 16, "instructions": "i", "stream": True}),
    (
        "/v1/responses",
        {"input": "x", "max_output_tokens": 16, "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}}},
    ),
    (
        "/v1/messages",
        {
            "model": "tiny",
            "max_tokens": 2,
            "system": [{"type": "text", "text": "s"}],
            "messages": [{"role": "user", "content": "x"}],
            "stop_sequences": ["z"],
        },
    ),
    ("/v1/messages/count_tokens", {"model": "tiny", "messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}]}),
]

# Each breaks any of the bodies above.
# Values that stand in for others anywhere in a body.
ODD: list[Any] = [None, True, -1, 0.5, 1 << 70, "", "x", "\ud800", [], {}, [None], {"type": "x"}, [[]], "<|im_end|>"]

WRONG: dict[str, list[Any]] = {
    "prompt": [None, 5, {}, [], [None], [[]], [1, "a"], [True], "", -1, 1e400],
    "max_tokens": [0.5, -1, "2", [], {}, True],
    "temperature": [-1, "1", [], {}, True],
    "n": [0, -1, 1.5, "1", 1 << 20],
    "top_p": [0, 2, "x", []],
    "seed": [-1, 1 << 63, 0.5, "x"],
    "stop": [5, {}, [1], [""]],
    "stop_token_ids": ["x", [99999], [-1], [0.5], {}],
    "logit_bias": [[], 5, {"x": 1}, {"5": "a"}, {"5": 1000}, {"99999": 1}],
    "logprobs": ["x", -7, 1.5, 1 << 40, []],
    "stream": ["x", 1, [], {}],
    "stream_options": [5, [], "x", {"include_usage": 5}],
    "model": ["other", 5, [], {}],
    "echo": ["x", 1],
    "suffix": ["x", 5],
    "best_of": [7, "x", []],
    "traffic_class": ["bulk", 5],
    "priority": [1.5, "x", 1 << 40],
    "truncate_prompt_tokens": [0, -7, "x"],
    "cache_salt": ["", 5],
    "bad_words": [5, [""], {}],
    "request_id": ["", "a b", 5],
}


def grammar(draw: random.Random) -> tuple[str, bytes]:
    """A completion with a field that cannot be served."""
    body = dict(GOOD[draw.randrange(3)][1])
    name = draw.choice(list(WRONG))
    body[name] = draw.choice(WRONG[name])
    if name == "prompt" and body[name] is None:
        del body[name]
    return "/v1/completions", json.dumps(body).encode()


def replacement(draw: random.Random) -> tuple[str, bytes]:
    """A good body in which a value somewhere is another one."""
    path, good = draw.choice(GOOD)
    body = json.loads(json.dumps(good))
    places: list[tuple[Any, Any]] = []

    def walk(value: Any) -> None:
        for key in value if isinstance(value, dict) else range(len(value)):
            places.append((value, key))
            if isinstance(value[key], dict | list):
                walk(value[key])

    walk(body)
    for _ in range(draw.randint(1, 2)):
        value, key = draw.choice(places)
        value[key] = draw.choice(ODD)
    return path, json.dumps(body).encode()


def mutation(draw: random.Random) -> tuple[str, bytes]:
    """A good body with something changed, cut, repeated or put elsewhere; a few are still good."""
    path, good = draw.choice(GOOD)
    data = bytearray(json.dumps(good).encode())
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(len(data) + 1)
        match draw.randrange(6):
            case 0:
                del data[at:]
            case 1:
                data[at:at] = bytes([draw.randrange(256)])
            case 2:
                data[at : at + 1] = draw.choice([b'"', b"[", b"{", b"\\", b"\x00", b"-", b"1e999", b"null", b"\xed\xa0\x80"])
            case 3:
                data[at:at] = data[: draw.randrange(40)]
            case 4:
                data[at:at] = draw.choice([b"[", b'{"a":']) * draw.choice([5, 2000])
            case 5:
                del data[at : at + draw.randrange(10)]
        if not data:
            break
    return draw.choice([path] * 9 + ["/v1/models", "/nothing", "/v1/embeddings"]), bytes(data)


def resident() -> int:
    """Bytes of this process, the front."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


@pytest.fixture(scope="module")
def front() -> Iterator[Local]:
    with local() as made:
        yield made


def abuse(front: Local, count: int, seed: int = 7) -> None:
    """Sends so many requests, one after the other on a few connections."""
    draw = random.Random(seed)
    connection = http.client.HTTPConnection("127.0.0.1", front.port, timeout=60)
    start = 0
    statuses: dict[int, int] = {}
    for number in range(count):
        if number == count // 4:
            front.at_rest()
            start = resident()
        make = draw.choice((grammar, grammar, mutation, replacement))
        path, body = make(draw)
        wrong = make is grammar
        if draw.random() < 0.02:  # truncated: less than it says, then gone
            with socket.create_connection(("127.0.0.1", front.port)) as cut:
                head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body) + 50}\r\n\r\n".encode()
                cut.sendall((head + body)[: draw.randrange(len(head + body))])
            continue
        connection.request("POST", path, body, {"content-type": "application/json"})
        answer = connection.getresponse()
        said = answer.read()
        statuses[answer.status] = statuses.get(answer.status, 0) + 1
        assert not wrong or 400 <= answer.status < 500, (path, body, said)
        assert answer.status < 500 or answer.status == 501, (path, body, said)  # 501: embeddings
        if answer.status >= 400:
            assert json.loads(said)["error"]["message"], (path, body, said)
    front.at_rest()
    assert statuses.get(400, 0) > count / 2, statuses
    assert resident() - start < 24 << 20, f"{(resident() - start) >> 20} MiB more"


async def leave(front: Local, count: int, at_once: int, seed: int = 3) -> None:
    """Clients that go away after a random time, in whatever phase their request is."""
    draw = random.Random(seed)
    gate = asyncio.Semaphore(at_once)

    async def one(number: int) -> None:
        body = {"prompt": "x" * draw.randint(1, 300), "max_tokens": 400, "ignore_eos": True, "n": draw.choice([1, 1, 3]), "seed": number}
        body["stream"] = draw.random() < 0.5
        data = json.dumps(body).encode()
        head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        head = f"{head}content-length: {len(data)}\r\n\r\n".encode()
        async with gate:
            reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
            cut = draw.random() < 0.1
            writer.write((head + data)[: -draw.randrange(1, len(data))] if cut else head + data)
            with contextlib.suppress(TimeoutError, ConnectionError):
                await asyncio.wait_for(reader.read(), draw.expovariate(8))
            if draw.random() < 0.5:
                writer.transport.abort()
            writer.close()

    await asyncio.gather(*(one(number) for number in range(count)))


async def pipelined(front: Local) -> None:
    """Two requests on one connection, the second one while the first is answered; then the client goes."""
    data = json.dumps({"prompt": "x", "max_tokens": 480, "ignore_eos": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(data)}\r\n\r\n".encode()
    _, writer = await asyncio.open_connection("127.0.0.1", front.port)
    writer.write((head + data) * 2)
    while not front.state.calls:
        await asyncio.sleep(0.005)
    await asyncio.sleep(0.05)
    writer.transport.abort()


def ask(front: Local) -> Any:
    connection = http.client.HTTPConnection("127.0.0.1", front.port, timeout=60)
    connection.request("POST", "/v1/completions", json.dumps({"prompt": "the fox", "max_tokens": 8, "temperature": 0}))
    answer = connection.getresponse()
    assert answer.status == 200
    return json.loads(answer.read())["choices"]


def test_malformed_requests_are_4xx_and_leave_nothing(front: Local) -> None:
    before = ask(front)
    abuse(front, 400)
    assert ask(front) == before


def test_clients_that_leave_at_any_moment_leave_nothing(front: Local) -> None:
    before = ask(front)
    asyncio.run(leave(front, 60, 16))
    front.at_rest()
    assert ask(front) == before


def test_a_client_that_leaves_with_a_second_request_waiting_is_noticed(front: Local) -> None:
    asyncio.run(pipelined(front))
    front.at_rest()


def test_many_streams_at_once_lose_nothing(front: Local) -> None:
    async def stream(number: int) -> int:
        data = json.dumps({"prompt": "x", "max_tokens": 8, "ignore_eos": True, "stream": True, "return_token_ids": True, "seed": number})
        reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
        writer.write(f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(data)}\r\n\r\n{data}".encode())
        tokens = 0
        while (line := await reader.readline()) != b"data: [DONE]\n":
            if line.startswith(b"data: "):
                tokens += len(json.loads(line[6:])["choices"][0]["token_ids"])
        writer.close()
        return tokens

    async def all_of_them() -> list[int]:
        return await asyncio.gather(*(stream(number) for number in range(64)))

    assert asyncio.run(all_of_them()) == [8] * 64
    front.at_rest()


@pytest.mark.nightly
def test_256_streams_and_the_first_token_of_an_idle_engine() -> None:
    script = Path(__file__).parents[2] / "benches" / "serving.py"
    made = subprocess.run([sys.executable, str(script), "--json"], capture_output=True, timeout=600, check=True)
    figures = json.loads(made.stdout)
    assert figures["streams"]["lost"] == 0 and figures["first_token"]["added_ms"] <= 5


@pytest.mark.nightly
def test_ten_thousand_malformed_requests(front: Local) -> None:
    abuse(front, 10_000, seed=11)


@pytest.mark.nightly
def test_a_thousand_clients_that_leave(front: Local) -> None:
    free = front.run(front.llm.core_counts())
    asyncio.run(leave(front, 1000, 48))
    front.at_rest()
    now = front.run(front.llm.core_counts())
    for before, after in zip(free["groups"], now["groups"], strict=True):
        assert before["held"] == after["held"] == 0 and before["total"] == after["total"]
