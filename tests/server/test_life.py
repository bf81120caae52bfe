"""Calls under odd timing, on an engine that does what the test says: clients that leave or do not read, errors half-way, the end."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from deepinfer.errors import GrammarBusyError
from deepinfer.server.conversation import Conversation, Tool
from deepinfer.server.dialogue import _LONG, _size
from deepinfer.server.records import CLIENT_LEFT, CallRecord
from deepinfer.server.settings import ServerSettings
from server_kit import App, in_loop, scripted

BODY: dict[str, Any] = {"prompt": "the fox", "max_tokens": 20}
STREAM: dict[str, Any] = {**BODY, "stream": True}


def records(app: App) -> list[CallRecord]:
    made: list[CallRecord] = []
    app.state.observers.append(made.append)
    return made


@pytest.mark.parametrize("phase", ["queued", "decoding"])
@pytest.mark.parametrize("fields", [{}, {"stream": True}, {"n": 3}, {"n": 2, "stream": True}, {"prompt": ["a", "b", "c"]}], ids=str)
@in_loop
async def test_a_client_that_leaves_frees_everything_at_once(phase: str, fields: dict[str, Any]) -> None:
    async with scripted() as app:
        seen = records(app)
        call = app.send("POST", "/v1/completions", {**BODY, **fields})
        prompts = 3 if isinstance(fields.get("prompt"), list) else 1
        while len(app.front.submitted) < prompts:
            await asyncio.sleep(0)
        ids = list(app.front.submitted)
        if phase == "decoding":
            for request_id in ids:
                app.front.feed(request_id, app.front.ids("ab"))
            await asyncio.sleep(0)
        call.leave()
        await call.done()
        assert sorted(app.front.cancelled) == sorted(ids)
        assert app.state.admission.answers == 0 and not app.state.calls
        assert seen[0].status == CLIENT_LEFT and not call.ended


@in_loop
async def test_a_client_that_leaves_in_the_middle_of_its_body_reaches_nobody() -> None:
    async with scripted() as app:
        seen = records(app)
        call = app.send("POST", "/v1/completions", chunks=[b'{"prompt": "x"', b"}"])
        call.leave()  # both pieces are read all the same, then nobody is there
        await call.done()
        assert app.front.submitted == {} or app.front.cancelled == list(app.front.submitted)
        assert [r.status for r in seen] == [CLIENT_LEFT]


@in_loop
async def test_a_client_that_leaves_while_its_grammar_is_compiled_reaches_nobody() -> None:
    async with scripted() as app:
        compiling, given_up = asyncio.Event(), asyncio.Event()

        async def compile_grammar(_: object) -> None:
            compiling.set()
            try:
                await asyncio.Event().wait()
            finally:
                given_up.set()

        app.front.compile_grammar = compile_grammar  # type: ignore[method-assign, assignment]
        call = app.send("POST", "/v1/completions", {**BODY, "structured_outputs": {"regex": "a+"}})
        await compiling.wait()
        call.leave()
        await call.done()
        assert given_up.is_set() and not app.front.submitted


@in_loop
async def test_a_grammar_for_which_there_is_no_time_is_nobodys_fault() -> None:
    async with scripted() as app:

        async def compile_grammar(_: object) -> None:
            raise GrammarBusyError("others keep the processes busy; try again later")

        app.front.compile_grammar = compile_grammar  # type: ignore[method-assign, assignment]
        form = {"structured_outputs": {"regex": "a+"}, "max_tokens": 5}
        said = [{"role": "user", "content": "hi"}]
        for path, body in (
            ("/v1/completions", {"prompt": ["a", "b"]}), ("/v1/completions", {"prompt": "a", "stream": True}),
            ("/v1/chat/completions", {"messages": said}), ("/v1/responses", {"input": "hi"}), ("/v1/messages", {"messages": said}),
        ):  # fmt: skip
            call = await app.send("POST", path, {**body, **form}).done()
            assert call.status == 503 and call.headers["retry-after"] == "5", (path, call.body)
            assert call.json()["error"]["type"] == "overloaded_error" and "try again later" in call.json()["error"]["message"]
            assert call.json().get("type") == ("error" if path == "/v1/messages" else None)
        assert not app.front.submitted


@in_loop
async def test_a_reader_that_lags_gets_several_tokens_as_one() -> None:
    async with scripted() as app:
        call = app.send("POST", "/v1/completions", STREAM, reading=False)
        request_id = await app.front.only()
        text = "the quick brown fox"
        for token in app.front.ids(text):
            app.front.feed(request_id, [token])
            await asyncio.sleep(0)
        app.front.feed(request_id, [], "length")
        await asyncio.sleep(0.01)
        call.reading.set()
        await call.done()
        events = call.events()
        assert "".join(e["choices"][0]["text"] for e in events[:-1]) == text
        assert len(events) <= 4  # what was on its way, the rest at once, the end
        assert events[-2]["choices"][0]["finish_reason"] == "length"


@in_loop
async def test_headers_wait_for_the_first_token_or_the_first_ping() -> None:
    async with scripted(ServerSettings(served_model_name=("m",), ping_interval=0.05)) as app:
        call = app.send("POST", "/v1/completions", STREAM)
        request_id = await app.front.only()
        await asyncio.sleep(0.02)
        assert call.status == 0
        await call.until(b": ping\n\n: ping\n\n")
        assert call.status == 200 and call.headers["content-type"].startswith("text/event-stream")
        assert call.headers["cache-control"] == "no-cache" and call.headers["x-accel-buffering"] == "no"
        app.front.feed(request_id, app.front.ids("ab"), "length")
        await call.done()
        assert [e["choices"][0]["text"] for e in call.events()[:-1]] == ["ab"]


@in_loop
async def test_an_error_after_the_headers_is_one_event_and_the_end() -> None:
    async with scripted() as app:
        call = app.send("POST", "/v1/completions", STREAM)
        request_id = await app.front.only()
        app.front.feed(request_id, app.front.ids("ab"))
        await call.until(b"ab")
        app.front.feed(request_id, [], "error", error="something inside")
        await call.done()
        last = call.events()[-1]
        assert last["error"]["code"] == "step_failed" and "something inside" not in last["error"]["message"]
        assert call.ended and b"[DONE]" not in call.body


@pytest.mark.parametrize("body", [BODY, STREAM, {**BODY, "prompt": ["a", "b"]}], ids=str)
@in_loop
async def test_a_failed_step_before_the_first_token_is_a_500(body: dict[str, Any]) -> None:
    async with scripted() as app:
        call = app.send("POST", "/v1/completions", body)
        while not app.front.submitted:
            await asyncio.sleep(0)
        app.front.feed(next(iter(app.front.submitted)), [], "error", error="x")
        await call.done()
        assert call.status == 500 and call.json()["error"]["code"] == "step_failed"


@in_loop
async def test_a_dead_engine_is_told_with_503_and_turns_health_red() -> None:
    async with scripted() as app:
        waiting = app.send("POST", "/v1/completions", BODY)
        streaming = app.send("POST", "/v1/completions", {**STREAM, "request_id": "s"})
        while len(app.front.submitted) < 2:
            await asyncio.sleep(0)
        app.front.feed(next(i for i in app.front.submitted if i.startswith("s#")), app.front.ids("ab"))
        await streaming.until(b"ab")
        app.front.die()
        await waiting.done()
        await streaming.done()
        assert waiting.status == 503 and waiting.json()["error"]["code"] == "engine_dead" and waiting.headers["retry-after"] == "30"
        assert streaming.events()[-1]["error"]["code"] == "engine_dead"
        for method, path, body in (("GET", "/health", None), ("GET", "/ready", None), ("POST", "/v1/completions", BODY)):
            call = await app.send(method, path, body).done()
            assert call.status == 503 and call.headers["retry-after"] == "30", path
        assert (await app.send("GET", "/version").done()).status == 200


@in_loop
async def test_while_it_drains_nothing_new_is_taken_in_and_the_hurried_are_told() -> None:
    async with scripted() as app:
        streaming, waiting = app.send("POST", "/v1/completions", STREAM), app.send("POST", "/v1/completions", BODY)
        while len(app.front.submitted) < 2:
            await asyncio.sleep(0)
        app.front.feed(next(i for i, r in app.front.submitted.items() if r.stream), app.front.ids("ab"))
        await streaming.until(b"ab")
        app.state.draining = True
        refused = await app.send("POST", "/v1/completions", BODY).done()
        assert refused.status == 503 and refused.json()["error"]["code"] == "shutting_down" and int(refused.headers["retry-after"]) >= 1
        assert (await app.send("GET", "/ready").done()).status == 503
        assert (await app.send("GET", "/health").done()).status == 200
        for call in list(app.state.calls):
            call.cancel(app.state.shutting_down())
        await streaming.done()
        await waiting.done()
        assert streaming.events()[-1]["error"]["code"] == "shutting_down" and streaming.ended
        assert waiting.status == 503 and len(app.front.cancelled) == 2


@in_loop
async def test_a_fault_of_ours_says_nothing_of_its_inside(caplog: pytest.LogCaptureFixture) -> None:
    async with scripted() as app:

        def fail(_: object) -> None:
            raise RuntimeError("secret detail")

        app.front.on_submit = fail
        call = await app.send("POST", "/v1/completions", BODY).done()
        assert call.status == 500 and call.json()["error"] == {
            "message": "internal error", "type": "api_error", "param": None, "code": "internal_error",
        }  # fmt: skip
        assert "secret detail" in caplog.text  # for whoever runs the server


@in_loop
async def test_a_record_says_what_was_done_and_no_text() -> None:
    async with scripted() as app:
        seen = records(app)
        call = app.send("POST", "/v1/completions", {**BODY, "n": 2}, headers={"x-request-id": "abc"})
        request_id = await app.front.only()
        app.front.feed(request_id, app.front.ids("ab"), "stop")
        app.front.feed(request_id, app.front.ids("the fox"), "length", index=1)
        await call.done()
        (record,) = seen
        assert (record.status, record.request_id, record.route, record.model) == (200, "abc", "/v1/completions", "m")
        (prompt,) = record.prompts
        assert prompt.prompt_tokens == len(app.front.ids("the fox")) and sorted(prompt.finish_reasons) == ["length", "stop"]
        assert prompt.completion_tokens == len(app.front.ids("ab")) + len(app.front.ids("the fox"))
        assert record.started <= record.first_byte <= record.ended and "fox" not in repr(record)


@in_loop
async def test_a_request_holds_its_place_while_it_is_prepared() -> None:
    async with scripted(ServerSettings(served_model_name=("m",), max_queued_requests=0), max_num_seqs=1) as app:
        compiling = asyncio.Event()

        async def compile_grammar(_: object) -> None:
            compiling.set()
            await asyncio.Event().wait()

        app.front.compile_grammar = compile_grammar  # type: ignore[method-assign, assignment]
        first = app.send("POST", "/v1/completions", {**BODY, "structured_outputs": {"regex": "a+"}})
        await compiling.wait()
        assert (await app.send("POST", "/v1/completions", BODY).done()).status == 503
        first.leave()
        await first.done()
        again = app.send("POST", "/v1/completions", BODY)
        app.front.feed(await app.front.only(), app.front.ids("ab"), "length")
        assert (await again.done()).status == 200


@in_loop
async def test_one_id_twice_at_once_is_two_requests() -> None:
    async with scripted() as app:
        calls = [app.send("POST", "/v1/completions", {**BODY, "request_id": "same"}) for _ in range(2)]
        while len(app.front.submitted) < 2:
            await asyncio.sleep(0)
        for i, request_id in enumerate(app.front.submitted):
            app.front.feed(request_id, app.front.ids("ab"[i]), "length")
        assert {(await call.done()).json()["choices"][0]["text"] for call in calls} == {"a", "b"}


# Text


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@in_loop
async def test_a_character_in_pieces_is_never_shown_in_pieces(size: int) -> None:
    text = "안녕하세요 😀😃 日本語 𓀀 naïve"
    async with scripted() as app:
        call = app.send("POST", "/v1/completions", {**STREAM, "max_tokens": 200})
        request_id = await app.front.only()
        ids = app.front.ids(text)
        assert len(ids) > len(text)  # most characters are several tokens
        for at in range(0, len(ids), size):
            app.front.feed(request_id, ids[at : at + size])
            await asyncio.sleep(0)
        app.front.feed(request_id, [], "length")
        await call.done()
        pieces = [e["choices"][0]["text"] for e in call.events()[:-1]]
        assert "".join(pieces) == text and not any("\ufffd" in p for p in pieces)
        assert call.body.isascii()


@pytest.mark.parametrize("size", [1, 2, 4])
@in_loop
async def test_a_stop_string_is_never_seen_and_nothing_else_is_held_back(size: int) -> None:
    before, stop, after = "the quick sto brown ", "stop here", " and on"
    async with scripted() as app:
        fields = {"stop": [stop, "never"], "max_tokens": 200}
        call = app.send("POST", "/v1/completions", {**STREAM, **fields})
        whole = app.send("POST", "/v1/completions", {**BODY, **fields})
        while len(app.front.submitted) < 2:
            await asyncio.sleep(0)
        ids = app.front.ids(before + stop + after)
        shown = ""
        for at in range(0, len(ids), size):
            for request_id in app.front.submitted:
                app.front.feed(request_id, ids[at : at + size])
            for _ in range(4):
                await asyncio.sleep(0)
            shown = "".join(e["choices"][0]["text"] for e in call.events() if isinstance(e, dict))
            said = app.front.get_tokenizer().decode(ids[: at + size])
            if stop not in said:
                held = said[len(shown) :]
                assert said.startswith(shown) and (stop.startswith(held) or "never".startswith(held)), (said, shown)
        await call.done()
        await whole.done()
        assert shown == before == whole.json()["choices"][0]["text"]
        last = call.events()[-2]["choices"][0]
        assert (last["finish_reason"], last["stop_reason"]) == ("stop", stop)
        assert len(app.front.stopped) == 2  # the engine was told
        counted = whole.json()["usage"]["completion_tokens"]
        assert app.front.stopped[0][2] == counted < len(ids)


@pytest.mark.parametrize("where", ["content", "arguments", "description", "parameters", "variable"])
def test_what_is_long_to_render_leaves_the_loop_wherever_it_stands(where: str) -> None:
    def size(text: str) -> int:
        at = dict.fromkeys(("content", "arguments", "description", "variable"), "") | {where: text}
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": at["arguments"]}}
        messages = [{"role": "user", "content": at["content"]}, {"role": "assistant", "content": None, "tool_calls": [call]}]
        tool = Tool("f", at["description"], {"properties": {text if where == "parameters" else "": {}}})
        return _size(Conversation(messages, (tool,), template_kwargs={"v": at["variable"]}))

    assert size("x") < _LONG < size("x" * _LONG)
