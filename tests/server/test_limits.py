"""What is turned away before the engine hears of it: bodies, queues, keys, rates."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest
import uvicorn
import uvicorn.server as uvicorn_server

from deepinfer.errors import ConfigError
from deepinfer.server.errors import ApiError
from deepinfer.server.http.body import parse_json
from deepinfer.server.http.listen import http_protocol
from deepinfer.server.keys import digest, read_keys
from deepinfer.server.settings import ServerSettings
from deepinfer.server.tenants import Bucket, Tenant
from server_kit import App, in_loop, scripted

BODY: dict[str, Any] = {"prompt": "the fox", "max_tokens": 20}


def settings(**values: Any) -> ServerSettings:
    return ServerSettings(served_model_name=("m",), **values)


# Bodies


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "no JSON"),
        (b"{", "no JSON"),
        (b"[1]", "object"),
        (b"null", "object, got null"),
        (b'"x"', "object"),
        (b'{"a": NaN}', "NaN"),
        (b'{"a": -Infinity}', "Infinity"),
        (b'{"a": ' + b"9" * 5000 + b"}", "no JSON: a number has thousands of digits$"),
        (b'{"a": [-1e400]}', "-1e400 is too large"),
        (b'{"a": "\xff"}', "UTF-8"),
        (b'{"a": ' + b"[" * 100 + b"]" * 100 + b"}", "deeper"),
        (b'{"a": ' + b'{"b":' * 100_000, "deeper"),
        (b"\xef\xbb\xbf{}", "no JSON"),
    ],
)
def test_a_bad_body_is_named(body: bytes, says: str) -> None:
    with pytest.raises(ApiError, match=says) as caught:
        parse_json(body, most_depth=64)
    assert caught.value.status == 400


def test_depth_counts_brackets_outside_of_strings_only() -> None:
    flat = {"ids": [[i] for i in range(500)], "text": "[" * 500 + '\\"' + "{" * 500}
    assert parse_json(json.dumps(flat).encode(), most_depth=3) == flat
    with pytest.raises(ApiError, match="deeper than 2"):
        parse_json(json.dumps({"a": [[1]] * 3}).encode(), most_depth=2)


def test_the_depth_of_a_string_without_an_end_takes_linear_time() -> None:
    with pytest.raises(ApiError):
        parse_json(b"[" * 40 + b'"' + b'\\"' * 2_000_000, most_depth=39)


@in_loop
async def test_a_body_that_is_too_large_is_refused_before_it_is_read() -> None:
    async with scripted(settings(max_body_bytes=1000)) as app:
        said = app.send("POST", "/v1/completions", chunks=[b""], headers={"content-length": "5000", "expect": "100-continue"})
        assert (await said.done()).status == 413
        chunked = app.send("POST", "/v1/completions", chunks=[b"x" * 300] * 30)
        await chunked.done()
        assert chunked.status == 413 and chunked.json()["error"]["code"] == "body_too_large" and chunked.headers["connection"] == "close"
        fits = json.dumps({**BODY, "user": "u" * 900}).encode()
        assert len(fits) <= 1000
        good = app.send("POST", "/v1/completions", chunks=[fits[:500], fits[500:]])
        app.front.feed(await app.front.only(), app.front.ids("a"), "stop")
        assert (await good.done()).status == 200


@in_loop
async def test_a_body_that_does_not_come_is_given_up() -> None:
    async with scripted(settings(body_timeout=0.05)) as app:
        call = app.send("POST", "/v1/completions", chunks=[b'{"prompt":'], complete=False)
        await call.done()
        assert call.status == 408 and call.json()["error"]["code"] == "body_timeout"


@in_loop
async def test_a_page_of_another_origin_must_ask_first() -> None:
    async with scripted(settings()) as app:
        odd = {"origin": "http://evil.example", "content-type": "text/plain"}
        assert (await app.send("POST", "/v1/completions", BODY, headers=odd).done()).status == 415
        asked = {"origin": "http://evil.example", "access-control-request-method": "POST"}
        assert (await app.send("OPTIONS", "/v1/completions", headers=asked).done()).status == 405
    async with scripted(settings(cors_origin=("http://good.example",))) as app:
        asked["origin"] = "http://good.example"
        allowed = await app.send("OPTIONS", "/v1/completions", headers=asked).done()
        assert allowed.status == 200 and allowed.headers["access-control-allow-origin"] == "http://good.example"
        asked["origin"] = "http://evil.example"
        assert "access-control-allow-origin" not in (await app.send("OPTIONS", "/v1/completions", headers=asked).done()).headers


@in_loop
async def test_a_client_that_reads_nothing_is_cut_off_and_one_that_reads_slowly_is_not() -> None:
    class Transport(asyncio.Transport):
        aborted = 0

        def abort(self) -> None:
            self.aborted += 1

        def is_closing(self) -> bool:
            return False

    async with scripted(settings(write_timeout=0.05)) as app:
        transport = Transport()
        config = uvicorn.Config(app.app, log_config=None)
        protocol: Any = http_protocol(app.state.settings)(config=config, server_state=uvicorn_server.ServerState(), app_state={})  # type: ignore[call-arg]
        protocol.connection_made(transport)
        for _ in range(4):
            protocol.pause_writing()
            await asyncio.sleep(0.02)
            protocol.resume_writing()
        await asyncio.sleep(0.1)
        assert not transport.aborted
        protocol.pause_writing()
        await asyncio.sleep(0.1)
        assert transport.aborted == 1
        protocol.connection_lost(ConnectionResetError())


# Admission


async def finish(app: App, count: int) -> None:
    while len(app.front.submitted) < count:
        await asyncio.sleep(0)
    for request_id in app.front.submitted:
        app.front.feed(request_id, app.front.ids("a"), "stop")


@in_loop
async def test_a_full_queue_turns_away_and_has_room_again() -> None:
    async with scripted(settings(max_queued_requests=1), max_num_seqs=2) as app:
        calls = [app.send("POST", "/v1/completions", BODY) for _ in range(3)]
        while len(app.front.submitted) < 3:
            await asyncio.sleep(0)
        refused = await app.send("POST", "/v1/completions", BODY).done()
        assert refused.status == 503 and refused.json()["error"]["code"] == "queue_full" and refused.headers["retry-after"] == "1"
        never = await app.send("POST", "/v1/completions", {**BODY, "prompt": ["a"] * 4}).done()
        assert never.status == 400 and "at most 3" in never.json()["error"]["message"]
        await finish(app, 3)
        assert [(await c.done()).status for c in calls] == [200] * 3
        assert app.state.admission.turned_away == 1


@in_loop
async def test_tokens_in_flight_are_bounded_and_one_that_is_alone_always_runs() -> None:
    async with scripted(settings(max_tokens_in_flight=30)) as app:
        first = app.send("POST", "/v1/completions", {**BODY, "max_tokens": 100})
        await app.front.only()
        refused = await app.send("POST", "/v1/completions", {**BODY, "max_tokens": 1}).done()
        assert refused.status == 503 and refused.json()["error"]["code"] == "tokens_full"
        await finish(app, 1)
        assert (await first.done()).status == 200


# Keys and tenants

TENANTS = """
tenants:
  - name: a
    keys: [key-a, key-a2]
    requests_per_minute: 2
  - name: b
    keys: ["sha256:{hash}"]
    traffic_class: agent
    priority: 3
    tokens_per_minute: 100
  - name: c
    keys: [key-c]
    cache_salt: tenant/a
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "keys.yaml"
    path.write_text(TENANTS.format(hash=digest("key-b").hex()), encoding="utf-8")
    return path


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@in_loop
async def test_a_key_guards_what_it_should() -> None:
    async with scripted(settings(api_key=("k1", "k2"))) as app:
        for method, path in (("POST", "/v1/completions"), ("GET", "/v1/models"), ("POST", "/tokenize"), ("GET", "/tokenizer_info")):
            for headers in ({}, bearer("k3"), bearer(""), {"authorization": "Basic k1"}, {"x-api-key": "K1"}):
                call = await app.send(method, path, BODY, headers=headers).done()
                assert call.status == 401 and call.json()["error"]["type"] == "authentication_error", path
                assert call.headers["www-authenticate"] == "Bearer"
        for headers in (bearer("k1"), bearer("k2"), {"x-api-key": "k1"}, {"authorization": "bearer k1"}):
            assert (await app.send("GET", "/v1/models", headers=headers).done()).status == 200
        for path in ("/health", "/ready", "/version"):
            assert (await app.send("GET", path).done()).status == 200


async def params_of(app: App, key: str, **fields: Any) -> Any:
    app.front.submitted.clear()
    call = app.send("POST", "/v1/completions", {**BODY, **fields}, headers=bearer(key))
    request_id = await app.front.only()
    request = app.front.submitted[request_id]
    app.front.feed(request_id, app.front.ids("ab"), "stop")
    assert (await call.done()).status == 200
    return request


@pytest.fixture
def keyed(file: Path) -> ServerSettings:
    return settings(api_key_file=str(file))


@in_loop
async def test_tenants_share_no_prefix_unless_told_to(keyed: ServerSettings) -> None:
    async with scripted(keyed) as app:
        salts = {key: (await params_of(app, key)).salt for key in ("key-a", "key-b", "key-c")}
        assert salts["key-a"] == salts["key-c"] != salts["key-b"] and salts["key-a"]
        own = (await params_of(app, "key-b", cache_salt="x")).salt
        assert own not in (*salts.values(), b"x")
        request = await params_of(app, "key-b", priority=-9)
        assert request.priority == 3 and request.params.traffic_class == "agent"
        assert (await params_of(app, "key-b", traffic_class="chat")).params.traffic_class == "chat"


def test_no_salt_runs_into_what_a_client_says() -> None:
    from deepinfer.sampling import SamplingParams

    tenants = [Tenant("a", "x"), Tenant("b", "x1"), Tenant("c", "1:x")]
    made = [t.params(SamplingParams(cache_salt=s)).cache_salt for t in tenants for s in (None, "1", "x", "1:x", "2:x1")]
    assert len(set(made)) == len(made)


@in_loop
async def test_rates_are_kept_and_told(keyed: ServerSettings) -> None:
    async with scripted(keyed) as app:

        async def ask(key: str, **fields: Any) -> Any:
            call = app.send("POST", "/v1/completions", {**BODY, **fields}, headers=bearer(key))
            while not call.task.done():
                for request_id in list(app.front.submitted):
                    app.front.feed(request_id, app.front.ids("ab") * 40, "stop")
                await asyncio.sleep(0)
            return call

        first = await ask("key-a")
        assert first.status == 200
        assert first.headers["x-ratelimit-limit-requests"] == "2" and first.headers["x-ratelimit-remaining-requests"] == "1"
        assert first.headers["x-ratelimit-reset-requests"] == "30.0s" and "x-ratelimit-limit-tokens" not in first.headers
        assert (await ask("key-a2")).status == 200
        refused = await ask("key-a")
        assert refused.status == 429 and refused.json()["error"]["code"] == "rate_limit_exceeded"
        assert 28 <= int(refused.headers["retry-after"]) <= 30 and refused.headers["x-ratelimit-remaining-requests"] == "0"
        assert (await ask("key-c")).status == 200  # another tenant
        spent = await ask("key-b")
        assert spent.status == 200 and spent.headers["x-ratelimit-limit-tokens"] == "100"
        assert (await ask("key-b")).status == 200  # a little was left; now there is a debt
        later = await ask("key-b")
        assert later.status == 429 and "tokens" in later.json()["error"]["message"]
        a, b = (next(t for t in app.state.keys.tenants if t.name == n).usage for n in "ab")
        assert (a.requests, a.rejected, b.requests, b.rejected) == (2, 1, 2, 1)
        assert b.completion_tokens == 160 and b.prompt_tokens == 2 * len(app.front.ids("the fox"))


def test_a_bucket_refills_evenly() -> None:
    now = 0.0
    bucket = Bucket(60, lambda: now)
    bucket.take(90)
    assert bucket.level() == -30 and bucket.wait(1) == 31
    now = 31
    assert bucket.level() == 1 and bucket.wait(1) == 0 and bucket.wait(1000) == 59
    bucket.change(120)
    assert bucket.level() == 61
    now = 1000
    assert bucket.level() == 120


@in_loop
async def test_the_file_is_read_again_and_a_broken_one_changes_nothing(
    file: Path, keyed: ServerSettings, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("deepinfer.server.keys._EVERY", 0.0)
    async with scripted(keyed) as app:

        async def status(key: str) -> int:
            return (await app.send("GET", "/v1/models", headers=bearer(key)).done()).status

        usage = app.state.keys.find("key-a").usage  # type: ignore[union-attr]
        file.write_text("tenants: [{name: a, keys: [new]}]", encoding="utf-8")
        assert (await status("new"), await status("key-a"), await status("key-b")) == (200, 401, 401)
        assert app.state.keys.find("new").usage is usage  # type: ignore[union-attr]
        for broken in ("tenants: [{name: a}]", "tenants: [", ""):
            caplog.clear()
            file.write_text(broken, encoding="utf-8")
            assert [await status("new") for _ in range(3)] == [200] * 3
            assert caplog.text.count("stay in use") == 1
        os.unlink(file)
        assert await status("new") == 200
        file.write_text("plain\n# comment\n", encoding="utf-8")
        assert (await status("plain"), await status("new")) == (200, 401)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no keys"),
        ("# nothing\n", "no keys"),
        ("sha256:12\n", "64 hexadecimal"),
        ("tenants: []", "list of them"),
        ("tenants: [1]", "mapping"),
        ("tenants: [{name: a, keys: [k]}]\nmore: 1", "nothing else"),
        ("tenants: [{name: a, keys: []}]", "list of keys"),
        ("tenants: [{name: 'a b', keys: [k]}]", "needs a name"),
        ("tenants: [{name: a, keys: [k], prority: 1}]", "did you mean priority"),
        ("tenants: [{name: a, keys: [k], priority: x}]", "priority must be"),
        ("tenants: [{name: a, keys: [k], tokens_per_minute: -1}]", "at least 0"),
        ("tenants: [{name: a, keys: [k], traffic_class: bulk}]", "traffic_class"),
        ("tenants: [{name: a, keys: [k]}, {name: a, keys: [l]}]", "twice"),
        ("tenants: [{name: a, keys: [k]}, {name: b, keys: [k]}]", "twice"),
        ("tenants: [{name: a, keys: [k], cache_salt: 3}]", "cache_salt"),
        ("tenants: [{name: a, keys: [3]}]", "must be text"),
        ("- name: a\nkeys: [k]", "without spaces"),
        ("---\ntenants: [1]", "mapping"),
        ("tenants: [2024-13-41]", "no YAML"),
        ("tenants: " + "[" * 5000, "no YAML"),
        ("tenants:\n  - keys: [sk-secret, 'sk-other]", "no YAML at line 2, column 33: found unexpected end of stream"),
        ("tenants: [*sk-secret]", "no YAML at line 1, column 11$"),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "keys"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=says) as caught:
        read_keys(str(path))
    assert "sk-" not in str(caught.value) and "\n" not in str(caught.value)
