"""Where a KV store is, as people write it.

Owns: which texts are addresses, and what ``~`` means in them. Never touches: the store.
"""

from __future__ import annotations

import os

FORMS = ("dir:PATH", "tcp://HOST:PORT[,HOST:PORT...]", "unix:/PATH", "agent:/PATH")
"""What an engine may be given."""


def is_address(text: object) -> bool:
    """Whether it names a store, so that a slip is found before a model is loaded."""
    if not isinstance(text, str):
        return False
    kind, _, place = text.partition(":")
    if kind == "tcp":
        return place.startswith("//") and all(_is_entry_point(one) for one in place[2:].split(","))
    return bool(place) if kind == "dir" else kind in ("unix", "agent") and place.startswith(("/", "~/"))


def expanded(address: str) -> str:
    """With the home directory for a ``~`` that begins a path: shells leave it alone behind the colon."""
    kind, _, place = address.partition(":")
    return f"{kind}:{os.path.expanduser(place)}" if place.startswith("~") else address


def _is_entry_point(text: str) -> bool:
    host, _, port = text.rpartition(":")
    return bool(host) and "/" not in host and port.isdecimal() and port.isascii() and int(port) < 2**16
