"""The way of the bytes between two engines.

Owns: what a role needs of a transport, and the two that there are: shared memory on one machine, TCP between machines.
Never touches: what the bytes mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from deepinfer import _core

if TYPE_CHECKING:
    from deepinfer.engine.config import EngineConfig
    from deepinfer.kvcache.layout import KvLayout


class Transport(Protocol):
    """One end; safe from any thread. ``offer`` takes as long as a copy, ``pull`` and ``release`` as long as the other side needs.

    Each raises errors of `deepinfer.errors` only.
    """

    def offer(self, meta: bytes, segments: Sequence[Any], lease_s: float) -> bytes:
        """Copies host memory and lets whoever has the ticket fetch it within the lease; gives the ticket."""

    def pull(self, ticket: bytes, into: Sequence[Any]) -> bytes:
        """Fills host memory with what was offered; gives its ``meta``."""

    def release(self, ticket: bytes) -> bool:
        """Ends an offer, from either side; False if it had ended."""

    def ended(self) -> list[bytes]:
        """Tickets of own offers that were released or ran out since the last call."""

    def close(self) -> None:
        """Ends every offer."""


class CoreTransport:
    """The core's transfer; see `deepinfer._core.KvTransfer`.

    Args:
        kind: ``shm`` or ``tcp``.
        layout: bytes that both sides must agree on.
        token: shared secret.
        address: where to listen, for TCP.
        max_offers: alive at a time.
    """

    def __init__(self, kind: str, layout: bytes, token: bytes | None, address: str, max_offers: int) -> None:
        tcp = kind == "tcp"
        listen = address if tcp else None
        self._end = _core.KvTransfer("tcp" if tcp else "shm", layout=layout, token=token, max_offers=max_offers, listen=listen)
        self._tickets: dict[bytes, bytes] = {}  # of own offers, by the id that events carry

    def offer(self, meta: bytes, segments: Sequence[Any], lease_s: float) -> bytes:
        """See :class:`Transport`."""
        made = self._end.offer(meta, segments, lease_s)
        ticket = made.to_bytes()
        self._tickets[made.id] = ticket
        return ticket

    def pull(self, ticket: bytes, into: Sequence[Any]) -> bytes:
        """See :class:`Transport`."""
        return self._end.pull_into(_core.KvTicket(ticket), into)

    def release(self, ticket: bytes) -> bool:
        """See :class:`Transport`."""
        return self._end.release(_core.KvTicket(ticket))

    def ended(self) -> list[bytes]:
        """See :class:`Transport`."""
        found = [self._tickets.pop(offer, b"") for offer, kind in self._end.poll() if kind != "pulled"]
        return [ticket for ticket in found if ticket]

    def close(self) -> None:
        """See :class:`Transport`."""
        self._end.close()


def open_transport(config: EngineConfig, layout: KvLayout, max_offers: int) -> Transport:
    """The end that a configuration asks for.

    Raises:
        ConfigError, KvTransferError: the address or another setting cannot be used.
    """
    # Only a prompt engine offers: the other one's end listens where nobody comes, and never takes its neighbour's port.
    address = config.kv_transfer_address if config.engine_type == "prompt" else "127.0.0.1:0"
    return CoreTransport(config.kv_transfer, layout.canonical, config.kv_transfer_token, address, max_offers)
