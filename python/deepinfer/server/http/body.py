"""The body of a request: read under limits, then as JSON.

Owns: size, time and depth limits. Never touches: what the fields mean.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import re
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any, NoReturn

from deepinfer.server.errors import ApiError, BadRequestError

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]

_LINGER = 1.0
"""Seconds in which the rest of a body that is too large is thrown away, so that its sender gets to read the answer."""

# A string, closed or not, or a bracket. Never tries a place twice, so that its time is linear.
_TOKENS = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*(?:"|\\?\Z)|[\[\]{}]', re.DOTALL)


_KINDS = {list: "an array", str: "a string", bool: "a truth value", type(None): "null"}


class ClientLeftError(Exception):
    """Nobody is there to be answered."""


async def read_body(receive: Receive, headers: Mapping[str, str], *, most: int, seconds: float) -> bytes:
    """All bytes of a body.

    Raises:
        ApiError: more than ``most`` bytes (413), or not there in time (408).
        ClientLeftError: the connection was closed before its end.
    """
    said = headers.get("content-length", "")
    if said.isdigit() and int(said[:19]) > most:
        await _too_large(receive, most, waiting="expect" in headers)
    parts: list[bytes] = []
    length, more = 0, True
    try:
        async with asyncio.timeout(seconds):
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientLeftError
                part = message.get("body", b"")
                length, more = length + len(part), message.get("more_body", False)
                if length > most:
                    break
                parts.append(part)
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {seconds:g} s", code="body_timeout", headers={"connection": "close"}) from None
    if length > most:
        await _too_large(receive, most, waiting=not more)
    return b"".join(parts)


async def _too_large(receive: Receive, most: int, *, waiting: bool) -> NoReturn:
    """Says so; first reads on for a moment, unless the sender waits for the answer already."""
    left = 8 * most
    if not waiting:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LINGER):
                more = True
                while more and left > 0:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientLeftError
                    left -= len(message.get("body", b""))
                    more = message.get("more_body", False)
    raise ApiError(413, f"the body has more than {most} bytes; send less at once", code="body_too_large", headers={"connection": "close"})


def _constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _number(text: str) -> float:
    if math.isinf(number := float(text)):
        raise ValueError(f"{text[:20]} is too large a number")
    return number


def parse_json(body: bytes, *, most_depth: int) -> dict[str, Any]:
    """A body as a JSON object.

    Raises:
        BadRequestError: it is none, or is nested too deep.
    """
    if body.count(b"[") + body.count(b"{") > most_depth:
        _check_depth(body, most_depth)
    try:
        read = json.loads(body.decode(), parse_constant=_constant, parse_float=_number)
    except UnicodeDecodeError:
        raise BadRequestError("the body is not UTF-8", code="invalid_json") from None
    except json.JSONDecodeError as e:
        raise BadRequestError(f"the body is no JSON: {e.msg} at character {e.pos}", code="invalid_json") from None
    except (ValueError, RecursionError) as e:  # a number of thousands of digits, one beyond floats, NaN
        why = "a number has thousands of digits" if "int_max_str_digits" in str(e) else e
        raise BadRequestError(f"the body is no JSON: {why}", code="invalid_json") from None
    if not isinstance(read, dict):
        raise BadRequestError(f"the body must be a JSON object, got {_KINDS.get(type(read), 'a number')}", code="invalid_json")
    return read


def _check_depth(body: bytes, most: int) -> None:
    depth = 0
    for found in _TOKENS.finditer(body):
        match found[0]:
            case b"[" | b"{":
                depth += 1
                if depth > most:
                    raise BadRequestError(f"the body is nested deeper than {most} levels; flatten it", code="json_too_deep")
            case b"]" | b"}":
                depth -= 1
