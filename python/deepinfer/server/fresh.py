"""What is new in every answer: its ids and its time.

Owns: random ids and the clock of answers; one place, so that a test can make both repeatable. Never touches: ids of requests (`http.call`).
"""

from __future__ import annotations

import secrets
import time


def new_id(prefix: str) -> str:
    """An id such as ``call_5f2a...`` that was not given out before."""
    return f"{prefix}{secrets.token_hex(12)}"


def now() -> int:
    """Seconds since 1970."""
    return int(time.time())
