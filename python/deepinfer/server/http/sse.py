"""Server-sent events, written straight to the connection.

Owns: framing, the moment at which headers go out, keep-alive comments. Never touches: what events say.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deepinfer.server.http.call import Call

_dumps = json.JSONEncoder(ensure_ascii=True, allow_nan=False, separators=(",", ":")).encode
_HEADERS = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", "x-accel-buffering": "no"}


def frame(data: Mapping[str, Any] | str, event: str | None = None) -> bytes:
    """One event. JSON is on one line and all ASCII, so that no reader can take a character of a text for a line's end."""
    text = data if isinstance(data, str) else _dumps(data)
    return f"data: {text}\n\n".encode() if event is None else f"event: {event}\ndata: {text}\n\n".encode()


class EventStream:
    """The answer of one call as events; made by `Call.events`.

    Status 200 and the headers go out with the first event, or with the first keep-alive: until then an error is still an ordinary answer.
    """

    def __init__(self, call: Call, ping_interval: float) -> None:
        self._call = call
        self._interval = ping_interval
        self._sent = asyncio.get_running_loop().time()
        self._pinging: asyncio.Task[None] | None = asyncio.create_task(self._ping())
        self.ended = False

    async def send(self, data: Mapping[str, Any] | str, event: str | None = None) -> None:
        """Sends one event; waits while the client does not read."""
        await self._write(frame(data, event))

    async def done(self) -> None:
        """Sends the mark by which chat and completions end."""
        await self._write(b"data: [DONE]\n\n")

    async def end(self) -> None:
        """Ends the answer; idempotent. The call does this when its handler returns."""
        self.stop()
        if not self.ended:
            self.ended = True
            await self._start()
            await self._call.write(b"", more=False)

    def stop(self) -> None:
        """No keep-alive from here on."""
        if self._pinging is not None:
            self._pinging.cancel()
            self._pinging = None

    async def _write(self, data: bytes) -> None:
        self._sent = asyncio.get_running_loop().time()
        await self._start()
        await self._call.write(data, more=True)

    async def _start(self) -> None:
        if self._call.record.status == 0:
            await self._call.start(200, _HEADERS)

    async def _ping(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            left = self._sent + self._interval - loop.time()
            if left > 0:
                await asyncio.sleep(left)
            else:
                await self._write(b": ping\n\n")
