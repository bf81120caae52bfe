"""JSON that stands in a text: the arguments of a call, as a model or a client wrote them.

Owns: what of that is read as an object. Never touches: bodies of requests (`http.body`), what arguments mean.
"""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn

_MOST_DEPTH = 64
"""Deeper values would end whoever walks them: templates, and writers of JSON."""


def _constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def read_object(text: str) -> dict[str, Any] | None:
    """The object that a text is; ``None`` if it is none that can be written as JSON in UTF-8 again. No text is an empty object."""
    try:
        read = json.loads(text or "{}", parse_constant=_constant)
    except (ValueError, RecursionError):
        return None
    return read if isinstance(read, dict) and _is_plain(read) else None


def _is_plain(value: Any) -> bool:
    level = [value]
    for _ in range(_MOST_DEPTH):
        for v in level:
            if isinstance(v, float) and not math.isfinite(v):
                return False
        texts = [t for v in level for t in (v if isinstance(v, dict) else (v,)) if isinstance(t, str)]
        if any(0xD800 <= ord(c) < 0xE000 for t in texts if not t.isascii() for c in t):
            return False
        level = [m for v in level if isinstance(v, dict | list) for m in (v.values() if isinstance(v, dict) else v)]
        if not level:
            return True
    return False
