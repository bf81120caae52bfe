"""Other people's clients against a real server: openai (sync, async, streams, tools, parse) and anthropic."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Literal

import anthropic
import openai
import pytest
from pydantic import BaseModel

from server_kit import Served, serving

HI = [{"role": "user", "content": "the quick brown fox"}]
SCHEMA = {"type": "object", "properties": {"unit": {"enum": ["C", "F"]}}, "required": ["unit"], "additionalProperties": False}
TOOL = {"type": "function", "function": {"name": "weather", "description": "of a city", "parameters": SCHEMA, "strict": True}}


TEMPLATE = (
    "{% for t in tools or [] %}{{ t.function.name }} {% endfor %}{% for m in messages %}{{ m.role }}: {{ m.content or '' }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
DIRECT = {"reasoning_effort": "none"}
"""A model of random weights would think for ever."""


class Choice(BaseModel):
    """A form that a model of random weights gets to the end of."""

    unit: Literal["C", "F"]
    sunny: bool


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    """A tiny random model, whose template says little of tools."""
    with serving(None, "--served-model-name", "tiny", "--chat-template", TEMPLATE) as made:
        yield made


@pytest.fixture(scope="module")
def client(server: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120) as made:
        yield made


@pytest.fixture(scope="module")
def claude(server: Served) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=120) as made:
        yield made


def test_openai_lists_models_and_chats(client: openai.OpenAI) -> None:
    assert [m.id for m in client.models.list()] == ["tiny"]
    made = client.chat.completions.create(
        model="tiny",
        messages=HI,
        n=2,
        seed=7,
        temperature=1.0,
        max_completion_tokens=8,
        logprobs=True,
        top_logprobs=2,
        logit_bias={"40": -100},
    )
    assert [c.index for c in made.choices] == [0, 1] and made.usage is not None and made.usage.prompt_tokens > 4
    assert made.choices[0].message.content != made.choices[1].message.content
    for choice in made.choices:
        assert choice.finish_reason in ("stop", "length") and choice.message.role == "assistant"
        assert choice.logprobs is not None and choice.logprobs.content
        for entry in choice.logprobs.content:
            assert len(entry.top_logprobs) == 2 and entry.logprob <= 0 and entry.bytes is not None
    assert made._request_id


def test_openai_streams_what_it_gives_at_once(client: openai.OpenAI) -> None:
    asked = {"model": "tiny", "messages": HI, "seed": 3, "temperature": 0.8, "max_tokens": 12}
    whole = client.chat.completions.create(**asked)  # type: ignore[call-overload]
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))  # type: ignore[call-overload]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
    assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason] == [whole.choices[0].finish_reason]
    assert chunks[-1].choices == [] and chunks[-1].usage.total_tokens == whole.usage.total_tokens


def test_a_stop_string_ends_the_answer_in_the_engine(client: openai.OpenAI, server: Served) -> None:
    asked = {
        "model": "tiny",
        "messages": HI,
        "seed": 11,
        "temperature": 0.9,
        "max_tokens": 60,
        "extra_body": {"ignore_eos": True, **DIRECT},
    }
    whole = client.chat.completions.create(**asked).choices[0].message.content  # type: ignore[call-overload]
    pairs = (whole[i : i + 2] for i in range(len(whole) // 3, len(whole) - 1))
    stop = next(p for p in pairs if "\ufffd" not in p)
    known = whole[: whole.index(stop)]
    for _ in range(2):
        cut = client.chat.completions.create(**asked, stop=[stop])  # type: ignore[call-overload]
        assert cut.choices[0].message.content == known and cut.choices[0].finish_reason == "stop" and cut.usage.completion_tokens < 60
        chunks = list(client.chat.completions.create(**asked, stop=stop, stream=True))  # type: ignore[call-overload]
        assert "".join(c.choices[0].delta.content or "" for c in chunks) == known
    assert server.get("/ready").status_code == 200


def test_openai_calls_tools(client: openai.OpenAI) -> None:
    made = client.chat.completions.create(
        model="tiny", messages=HI, tools=[TOOL], tool_choice="required", max_tokens=300, seed=1, extra_body=DIRECT
    )
    (choice,) = made.choices
    assert choice.finish_reason == "tool_calls" and choice.message.tool_calls
    for call in choice.message.tool_calls:
        assert call.type == "function" and call.function.name == "weather" and json.loads(call.function.arguments)["unit"] in "CF"
    with client.chat.completions.stream(
        model="tiny", messages=HI, tools=[TOOL], tool_choice={"type": "function", "function": {"name": "weather"}}, max_tokens=300, seed=1
    ) as events:
        kinds = {e.type for e in events}
        final = events.get_final_completion()
    assert "tool_calls.function.arguments.done" in kinds
    (call,) = final.choices[0].message.tool_calls or ()
    again = client.chat.completions.create(
        model="tiny",
        max_tokens=4,
        messages=[*HI, final.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "sunny"}],
    )
    assert again.usage.prompt_tokens > made.usage.prompt_tokens - 60


def test_openai_parses_forms(client: openai.OpenAI) -> None:
    made = client.chat.completions.parse(model="tiny", messages=HI, response_format=Choice, max_tokens=300, seed=2, extra_body=DIRECT)
    assert isinstance(made.choices[0].message.parsed, Choice)
    response = client.responses.parse(model="tiny", input="hi", text_format=Choice, max_output_tokens=300, reasoning={"effort": "none"})
    assert isinstance(response.output_parsed, Choice)


def test_openai_responses(client: openai.OpenAI) -> None:
    short = client.responses.create(model="tiny", input="the fox", instructions="be brief", max_output_tokens=4, temperature=0)
    assert short.status == "incomplete" and short.incomplete_details is not None and short.usage is not None
    choice = {"structured_outputs": {"choice": ["a quick fox", "the lazy dog"]}}
    asked = {"model": "tiny", "input": "the fox", "reasoning": {"effort": "none"}, "temperature": 0, "extra_body": choice}
    made = client.responses.create(**asked)  # type: ignore[call-overload]
    assert made.status == "completed" and made.output_text in choice["structured_outputs"]["choice"]
    with client.responses.stream(**asked) as events:
        kinds = [e.type for e in events]
        final = events.get_final_response()
    assert kinds[0] == "response.created" and final.output_text == made.output_text
    called = client.responses.create(
        model="tiny",
        input="hi",
        tools=[{"type": "function", "name": "weather", "parameters": SCHEMA, "strict": True}],
        tool_choice="required",
        parallel_tool_calls=False,
        max_output_tokens=300,
        reasoning={"effort": "none"},
    )
    (call,) = (i for i in called.output if i.type == "function_call")
    assert json.loads(call.arguments)["unit"] in "CF"


def test_openai_async_many_at_once(server: Served) -> None:
    async def run() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120) as client:

            async def one(seed: int) -> str:
                stream = await client.chat.completions.create(model="tiny", messages=HI, max_tokens=6, seed=seed, stream=True)  # type: ignore[arg-type, call-overload]
                return "".join([c.choices[0].delta.content or "" async for c in stream])

            return await asyncio.gather(*(one(i % 4) for i in range(12)))

    texts = asyncio.run(run())
    assert texts[:4] == texts[4:8] == texts[8:]


def test_openai_gets_typed_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="other", messages=HI)  # type: ignore[arg-type]
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as wrong:
        client.chat.completions.create(model="tiny", messages=HI, temperature=9e5, top_p=3)  # type: ignore[arg-type]
    assert wrong.value.param in ("temperature", "top_p")
    remote = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "http://x/y"}}}
    with pytest.raises(openai.BadRequestError, match="leads out"):
        client.chat.completions.create(model="tiny", messages=HI, response_format=remote)  # type: ignore[call-overload]
    with pytest.raises(openai.BadRequestError) as long:
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x y" * 2000}])
    assert long.value.code == "context_length_exceeded"


def test_anthropic_messages(claude: anthropic.Anthropic) -> None:
    made = claude.messages.create(
        model="tiny", max_tokens=8, system="be brief", messages=[{"role": "user", "content": "the fox"}], extra_body={"temperature": 0}
    )
    assert made.role == "assistant" and made.stop_reason in ("max_tokens", "end_turn") and made.usage.output_tokens > 0
    with claude.messages.stream(
        model="tiny", max_tokens=8, system="be brief", messages=[{"role": "user", "content": "the fox"}], extra_body={"temperature": 0}
    ) as events:
        text = "".join(events.text_stream)
        final = events.get_final_message()
    assert text == "".join(b.text for b in made.content if b.type == "text") and final.usage.output_tokens == made.usage.output_tokens
    counted = claude.messages.count_tokens(model="tiny", system="be brief", messages=[{"role": "user", "content": "the fox"}])
    assert counted.input_tokens == made.usage.input_tokens + (made.usage.cache_read_input_tokens or 0)


def test_anthropic_calls_tools(claude: anthropic.Anthropic) -> None:
    made = claude.messages.create(
        model="tiny",
        max_tokens=300,
        messages=[{"role": "user", "content": "hi"}],
        tools=[{"name": "weather", "input_schema": SCHEMA}],
        tool_choice={"type": "tool", "name": "weather"},
    )
    (block,) = (b for b in made.content if b.type == "tool_use")
    assert made.stop_reason == "tool_use" and block.name == "weather" and block.input["unit"] in "CF"  # type: ignore[index]


def test_anthropic_gets_typed_errors(claude: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError):
        claude.messages.create(model="other", max_tokens=5, messages=[{"role": "user", "content": "x"}])
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        claude.messages.create(model="tiny", max_tokens=0, messages=[{"role": "user", "content": "x"}])
