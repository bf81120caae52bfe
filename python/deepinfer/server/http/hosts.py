"""By which names a server may be asked.

Owns: the check of the ``Host`` header. Never touches: sockets, keys, origins of pages (see `app`).

A page of any site can have its own name point to this machine's loopback address once it is loaded, and is then, for the browser, of one
origin with a server that listens there (DNS rebinding). What the browser cannot change is the name that it asks by.
"""

from __future__ import annotations

import contextlib
import ipaddress
import re
import socket
from collections.abc import Iterable

from deepinfer.server.errors import ApiError
from deepinfer.server.settings import ServerSettings

_HOST = re.compile(r"(?:\[([^\[\]]*)\]|([^:\[\]]*))(?::[0-9]*)?")
_SHOWN = 100


def is_loopback(host: str) -> bool:
    """Whether who listens on this address is reached from this machine only."""
    with contextlib.suppress(OSError, ValueError):
        found = socket.getaddrinfo(host or None, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        return ipaddress.ip_address(found[0][4][0]).is_loopback
    return False


class Hosts:
    """The names that requests may bear: of a server on a loopback address those of this machine alone, of any other one all, unless
    ``allowed_host`` says which."""

    def __init__(self, settings: ServerSettings) -> None:
        own = settings.uds is None and is_loopback(settings.host)
        anything = "*" in settings.allowed_host or not (own or settings.allowed_host)
        self._names = None if anything else {_plain(name) for name in (settings.host, *settings.allowed_host)}

    def check(self, given: Iterable[str]) -> None:
        """Checks every ``Host`` header of a request; one without any comes from no browser.

        Raises:
            ApiError: 403; it asks by a name that is none of this server's.
        """
        if self._names is None:
            return
        for host in given:
            found = _HOST.fullmatch(host.strip())
            name = _plain(found[1] or found[2] or "") if found is not None else ""
            if name not in self._names and not _is_of_this_machine(name):
                shown = host if len(host) <= _SHOWN else host[:_SHOWN] + "…"
                raise ApiError(
                    403,
                    f"this server is not to be asked by the name {shown!r}; ask by localhost, or add the name with --allowed-host",
                    code="host_not_allowed",
                )


def _plain(name: str) -> str:
    return name.lower().removesuffix(".")


def _is_of_this_machine(name: str) -> bool:
    if name == "localhost" or name.endswith(".localhost"):
        return True
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(name).is_loopback
    return False
