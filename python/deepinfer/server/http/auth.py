"""Whose request it is, by the key that it brings.

Owns: where a key stands in a request, and finding its tenant in constant time. Never touches: what tenants may do.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping

from deepinfer.server.errors import ApiError
from deepinfer.server.settings import ServerSettings
from deepinfer.server.tenants import PUBLIC, Tenant


def digest(key: str) -> bytes:
    """What is kept and compared of a key."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def key_of(headers: Mapping[str, str]) -> str | None:
    """The key of a request, of ``Authorization: Bearer`` or ``x-api-key``; ``None`` if it brings none."""
    scheme, _, value = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and value.strip():
        return value.strip()
    return headers.get("x-api-key") or None


class Keys:
    """Every key and whose it is; without any key everybody is one tenant."""

    def __init__(self, settings: ServerSettings) -> None:
        self.public = Tenant(PUBLIC)
        self._by_digest: dict[bytes, Tenant] = {digest(k): self.public for k in settings.api_key}

    @property
    def tenants(self) -> list[Tenant]:
        """All tenants, once each."""
        return list(dict.fromkeys(self._by_digest.values())) or [self.public]

    def find(self, headers: Mapping[str, str]) -> Tenant:
        """The tenant of a request.

        Raises:
            ApiError: 401; no key, or one that is nobody's.
        """
        if not self._by_digest:
            return self.public
        key = key_of(headers)
        if key is None:
            message = "no API key; send 'Authorization: Bearer KEY' or 'x-api-key: KEY'"
            raise ApiError(401, message, code="missing_api_key", headers={"www-authenticate": "Bearer"})
        wanted, found = digest(key), None
        for known, tenant in self._by_digest.items():  # all of them, whichever fits
            if hmac.compare_digest(known, wanted):
                found = tenant
        if found is None:
            message = "the API key is not known here; check it for missing characters"
            raise ApiError(401, message, code="invalid_api_key", headers={"www-authenticate": "Bearer"})
        return found
