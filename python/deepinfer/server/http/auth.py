"""Whose request it is, by the key that it brings.

Owns: where a key stands in a request, and what its sender is told. Never touches: which keys there are (see `keys`).
"""

from __future__ import annotations

from collections.abc import Mapping

from deepinfer.server.errors import ApiError
from deepinfer.server.keys import Keys
from deepinfer.server.tenants import Tenant

_ASK = {"www-authenticate": "Bearer"}


def key_of(headers: Mapping[str, str]) -> str | None:
    """The key of a request, of ``Authorization: Bearer`` or ``x-api-key``; ``None`` if it brings none."""
    scheme, _, value = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and value.strip():
        return value.strip()
    return headers.get("x-api-key") or None


def tenant_of(keys: Keys, headers: Mapping[str, str]) -> Tenant:
    """The tenant of a request.

    Raises:
        ApiError: 401; it has no key where one is needed, or one that is nobody's.
    """
    if not keys.wanted:
        return keys.public
    key = key_of(headers)
    if key is None:
        message = "no API key; send 'Authorization: Bearer KEY' or 'x-api-key: KEY'"
        raise ApiError(401, message, code="missing_api_key", headers=_ASK)
    tenant = keys.find(key)
    if tenant is None:
        raise ApiError(401, "the API key is not known here; check it for missing characters", code="invalid_api_key", headers=_ASK)
    return tenant
