"""By which names a server may be asked: a page of another site that has its own name point here gets nothing."""

from __future__ import annotations

from typing import Any

import pytest

from deepinfer.errors import ConfigError
from deepinfer.server.errors import ApiError
from deepinfer.server.http.hosts import Hosts
from deepinfer.server.settings import ServerSettings
from server_kit import Served, in_loop, scripted, serving

LOCAL = ["localhost", "LOCALHOST:8000", "localhost.:80", "127.0.0.1", "127.0.0.1:8000", "127.8.9.1", "[::1]:8000", "[::1]", "a.localhost"]
FOREIGN = [
    "evil.example",
    "evil.example:8000",
    "localhost.evil.example",
    "127.0.0.1.evil.example",
    "10.0.0.1:8000",
    "",
    "a:b:c",
    "[::1",
    "x@localhost",
]


def accepted(settings: dict[str, Any], *given: str) -> bool:
    try:
        Hosts(ServerSettings(**settings)).check(given)
    except ApiError as e:
        assert e.status == 403 and e.code == "host_not_allowed" and "--allowed-host" in e.message
        return False
    return True


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "127.0.0.2"])
def test_on_a_loopback_address_only_names_of_this_machine_are_good(host: str) -> None:
    assert [name for name in LOCAL if not accepted({"host": host}, name)] == []
    assert [name for name in FOREIGN if accepted({"host": host}, name)] == []
    assert accepted({"host": host}), "a request without the header comes from no browser"
    assert not accepted({"host": host}, "localhost", "evil.example"), "one good name does not make up for another one"


def test_elsewhere_any_name_is_good_unless_names_are_given() -> None:
    for settings in ({"host": "0.0.0.0"}, {"host": "::"}, {"uds": "/run/x"}, {"allowed_host": ("*",)}):
        assert all(accepted(settings, name) for name in (*LOCAL, *FOREIGN)), settings
    named = {"host": "0.0.0.0", "allowed_host": ("Chat.Example", "10.0.0.1", "fd00::7")}
    for name in ("chat.example", "CHAT.example.:443", "10.0.0.1:8000", "[fd00::7]:8000", "0.0.0.0:8000", *LOCAL):
        assert accepted(named, name), name
    for name in ("evil.example", "x.chat.example", "10.0.0.2", "fd00::7"):
        assert not accepted(named, name), name


def test_further_names_of_a_loopback_address() -> None:
    named = {"allowed_host": ("box.lan",)}
    assert accepted(named, "box.lan:8000") and accepted(named, "localhost") and not accepted(named, "evil.example")


@pytest.mark.parametrize("name", ["", "box:8000", "http://box", "box/", "a b", "[::1]"])
def test_a_name_that_is_none_is_refused_at_the_start(name: str) -> None:
    with pytest.raises(ConfigError, match="--allowed-host takes a host name"):
        ServerSettings(allowed_host=("good", name))


@in_loop
async def test_every_route_says_no_in_its_protocols_shape() -> None:
    async with scripted() as app:
        body = {"model": "m", "prompt": "a", "max_tokens": 1}
        for method, path in (
            ("POST", "/v1/completions"), ("POST", "/v1/chat/completions"), ("POST", "/v1/responses"), ("POST", "/v1/messages"),
            ("GET", "/"), ("GET", "/health"), ("GET", "/metrics"), ("GET", "/v1/models"), ("GET", "/nothing"), ("PUT", "/health"),
        ):  # fmt: skip
            said = await app.send(method, path, body if method == "POST" else None, headers={"host": "evil.example:8000"}).done()
            assert said.status == 403, path
            error = said.json()["error"]
            assert error["type"] == "permission_error" and "'evil.example:8000'" in error["message"]
            if path == "/v1/messages":
                assert said.json()["type"] == "error"
            else:
                assert error["code"] == "host_not_allowed"
        assert not app.front.submitted
        assert (await app.send("GET", "/health", headers={"host": "localhost:8000"}).done()).status == 200


@pytest.fixture(scope="module")
def named() -> Any:
    with serving(None, "--allowed-host", "box.lan", "--allowed-host", "box") as made:
        yield made


def test_a_server_heeds_its_option(named: Served) -> None:
    for host, status in (("box.lan", 200), ("box:1", 200), ("localhost", 200), ("evil.example", 403)):
        assert named.get("/v1/models", headers={"host": host}).status_code == status, host
    assert named.get("/v1/models").status_code == 200
