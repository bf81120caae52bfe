"""`/`: a page to talk with the model and to see what the server does, with nothing from elsewhere.

Owns: the page's files and what a browser may do with them. Never touches: what the page asks for, which are the routes everyone has.
"""

from __future__ import annotations

import hashlib
from functools import cache
from importlib.resources import files

from deepinfer.server.errors import ApiError
from deepinfer.server.http.call import Call

KINDS = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}

HEADERS = {
    # Scripts, styles and requests of this server only, nothing inline, and no other page may frame it.
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",
}


@cache
def assets() -> dict[str, tuple[bytes, str, str]]:
    """Every file by name: bytes, content type, entity tag."""
    found = {}
    for file in (files("deepinfer.server") / "page").iterdir():
        kind = KINDS.get(file.name.rpartition(".")[2])
        if kind is not None:
            data = file.read_bytes()
            found[file.name] = data, kind, f'"{hashlib.sha256(data).hexdigest()[:32]}"'
    return found


async def index(call: Call) -> None:
    """The page itself."""
    await _send(call, "index.html")


async def asset(call: Call) -> None:
    """One of its files."""
    await _send(call, str(call.path_params["name"]))


async def _send(call: Call, name: str) -> None:
    if not call.state.settings.page or name not in assets():
        raise ApiError(404, "no such route" if call.state.settings.page else "the page is turned off (--no-page)", code="not_found")
    data, kind, tag = assets()[name]
    if call.headers.get("if-none-match") == tag:
        await call.reply(304, None, HEADERS | {"etag": tag})
    else:
        await call.reply(200, data, HEADERS | {"etag": tag, "content-type": kind})
