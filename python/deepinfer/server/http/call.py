"""One request and its answer.

Owns: :class:`Call`: what a handler knows of a request, how it answers, what happens when it fails or its client leaves. Never
touches: routes, what bodies mean.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any

from starlette.datastructures import Headers

from deepinfer.server.errors import ApiError, Protocol, as_api_error
from deepinfer.server.http.body import ClientLeftError, parse_json, read_body
from deepinfer.server.http.sse import EventStream
from deepinfer.server.records import CLIENT_LEFT, CallRecord
from deepinfer.server.tenants import Tenant

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from deepinfer.server.state import ServerState

log = logging.getLogger("deepinfer.server")

_GOOD_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
_JSON = {"content-type": "application/json"}


def good_request_id(text: object) -> bool:
    """Whether a client's id of its request can be used: short and plain, so that it harms no log."""
    return isinstance(text, str) and _GOOD_ID.fullmatch(text) is not None


class Call:
    """One request.

    Attributes:
        state: what all calls share.
        tenant: who asks.
        request_id: the client's, where it sent a usable ``x-request-id``; echoed under that name.
        headers: of the request, by names in lower case.
        path_params: parts of the path that the route names.
        record: what is known of the call at its end.
    """

    def __init__(self, state: ServerState, route: str, protocol: Protocol, scope: Scope, receive: Receive, send: Send) -> None:
        self.state = state
        self.protocol: Protocol = protocol
        self.headers = Headers(scope=scope)
        self.path_params: Mapping[str, Any] = scope.get("path_params", {})
        self.query: bytes = scope.get("query_string", b"")
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.tenant: Tenant = state.keys.public
        given = self.headers.get("x-request-id")
        self.request_id = given if given is not None and good_request_id(given) else secrets.token_hex(16)
        self.record = CallRecord(self.method, route, self.request_id, traceparent=self.headers.get("traceparent"), started=time.monotonic())
        self.answer_headers: dict[str, str] = {}
        """Further headers of the answer, whatever it is."""
        self._receive, self._send = receive, send
        self._stream: EventStream | None = None
        self._task: asyncio.Task[Any] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._ending: BaseException | None = None  # why the handler was cancelled, if by this module
        self._over = False  # the last byte is out

    # What a handler asks for

    async def json(self) -> dict[str, Any]:
        """The body, a JSON object. From here on the handler is cancelled when its client leaves.

        Raises:
            ApiError: it is too large, too slow, too deep, or no JSON object.
        """
        kind = self.headers.get("content-type", "").partition(";")[0].strip().lower()
        # A page of another origin can send anything but JSON without asking the browser first.
        if "origin" in self.headers and kind != "application/json" and not kind.endswith("+json"):
            raise ApiError(415, "the body must be sent as application/json", code="unsupported_media_type")
        s = self.state.settings
        body = await read_body(self._receive, self.headers, most=s.max_body_bytes, seconds=s.body_timeout)
        self._watch()
        return parse_json(body, most_depth=s.max_json_depth)

    async def reply(self, status: int, body: Mapping[str, Any] | bytes | None, headers: Mapping[str, str] | None = None) -> None:
        """Answers with JSON, or with bytes whose type is in ``headers``; ``None`` is an empty body."""
        if body is None or isinstance(body, bytes):
            data, kind = body or b"", {}
        else:
            data, kind = json.dumps(body, ensure_ascii=True, allow_nan=False, separators=(",", ":")).encode(), _JSON
        await self.start(status, {**kind, "content-length": str(len(data)), **(headers or {})})
        await self.write(data, more=False)

    def events(self) -> EventStream:
        """The answer as a stream of events."""
        self.record.stream = True
        self._stream = EventStream(self, self.state.settings.ping_interval)
        return self._stream

    def cancel(self, reason: BaseException) -> None:
        """Ends the handler; the client is told ``reason``, unless it has left."""
        if self._ending is None and not self._over and self._task is not None:
            self._ending = reason
            self._task.cancel()

    # What the answer is made of

    async def start(self, status: int, headers: Mapping[str, str]) -> None:
        """Sends status and headers."""
        self.record.status = status
        self.record.first_byte = time.monotonic()
        everything = {**headers, **self.answer_headers, "x-request-id": self.request_id}
        raw = [(k.encode("latin-1"), v.encode("latin-1")) for k, v in everything.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": raw})

    async def write(self, data: bytes, *, more: bool) -> None:
        """Sends a piece of the body; waits while the client does not read."""
        if not more:
            self._over = True
        await self._send({"type": "http.response.body", "body": data, "more_body": more})

    # The call as a whole

    async def run(self, handler: Callable[[Call], Awaitable[None]]) -> None:
        """Has a handler answer. Whatever goes wrong is this call's alone."""
        self._task = asyncio.current_task()
        self.state.calls.add(self)
        try:
            try:
                self.state.hosts.check(self.headers.getlist("host"))
                await handler(self)
                if self._stream is not None:
                    await self._stream.end()
            except asyncio.CancelledError:
                if self._ending is None or self._task is None:
                    raise
                self._task.uncancel()
                raise self._ending from None
        except ClientLeftError:
            self.record.status = CLIENT_LEFT
        except Exception as e:
            with contextlib.suppress(ConnectionError):
                await self._fail(e)
        finally:
            self.state.calls.discard(self)
            if self._stream is not None:
                self._stream.stop()
            if self._watching is not None:
                self._watching.cancel()
            self.record.ended = time.monotonic()
            self.record.tenant = self.tenant.name
            self.state.observe(self.record)

    async def _fail(self, e: Exception) -> None:
        self._task = None  # nothing is left to cancel
        error = as_api_error(e)
        self.record.code = error.code
        if error.status >= 500 and not isinstance(e, ApiError):
            log.error("request %s to %s failed", self.request_id, self.record.route, exc_info=e if error.status == 500 else None)
        if self._stream is not None:
            self._stream.stop()
        if self._over:
            return
        if self.record.status != 0:  # the status is out: one event, or a cut answer
            if self._stream is not None:
                await self._stream.send(error.body(self.protocol), "error" if self.protocol == "anthropic" else None)
                await self._stream.end()
            return
        headers = dict(error.headers)
        if error.status == 501:
            headers["x-should-retry"] = "false"  # clients of both protocols try all others above 499 again
        if error.retry_after is not None:
            headers["retry-after"] = str(max(1, round(error.retry_after)))
        await self.reply(error.status, error.body(self.protocol), headers)

    def _watch(self) -> None:
        if self._watching is None:
            self._watching = asyncio.create_task(self._notice_leaving())

    async def _notice_leaving(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.cancel(ClientLeftError())
