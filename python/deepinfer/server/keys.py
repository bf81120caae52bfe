"""Keys, and whose they are.

Owns: the file of keys and tenants, reading it again when it changes, finding a tenant in constant time. Never touches: HTTP, what
tenants may do. Of a key only its SHA-256 is kept.
"""

from __future__ import annotations

import difflib
import hashlib
import hmac
import logging
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from deepinfer.errors import ConfigError
from deepinfer.sampling import TrafficClass
from deepinfer.server.ledger import Ledger
from deepinfer.server.settings import ServerSettings, read_yaml
from deepinfer.server.tenants import PUBLIC, Tenant

log = logging.getLogger("deepinfer.server")

_EVERY = 1.0
"""Seconds between two looks at the file."""

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_HASH = re.compile(r"sha256:([0-9a-fA-F]{64})")
_LIMITS = ("requests_per_minute", "tokens_per_minute")
_FIELDS = ("name", "keys", "cache_salt", "traffic_class", "priority", *_LIMITS)


def digest(key: str) -> bytes:
    """What is kept and compared of a key."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


class Keys:
    """Every key and its tenant. Without any key everybody is the tenant ``public``.

    Args:
        ledger: where tenants' use is counted together with other processes.

    Raises:
        ConfigError: the file cannot be used.
    """

    def __init__(self, settings: ServerSettings, ledger: Ledger | None = None) -> None:
        self._ledger = ledger
        self.public = Tenant(PUBLIC)
        self._given = {digest(key): self.public for key in settings.api_key}
        self._path = settings.api_key_file
        self._tenants = {PUBLIC: self.public} if self._given or self._path is None else {}
        self._by_digest = dict(self._given)
        self._seen: tuple[int, int, int] | None = None
        self._looked = 0.0
        if self._path is not None:
            self._seen = _stamp(self._path)
            self._load(self._path)

    @property
    def tenants(self) -> list[Tenant]:
        """All tenants there have been, once each."""
        return list(self._tenants.values())

    @property
    def wanted(self) -> bool:
        """Whether a request needs a key."""
        return bool(self._by_digest)

    def find(self, key: str) -> Tenant | None:
        """Whose key it is; ``None``: nobody's."""
        self._look()
        wanted, found = digest(key), None
        for known, tenant in self._by_digest.items():  # all of them, whichever fits
            if hmac.compare_digest(known, wanted):
                found = tenant
        return found

    def _look(self) -> None:
        """Reads the file again if it has changed. A file that cannot be used changes nothing, and is complained of once."""
        now = time.monotonic()
        if self._path is None or now - self._looked < _EVERY:
            return
        self._looked = now
        stamp = _stamp(self._path)
        if stamp == self._seen:
            return
        self._seen = stamp
        try:
            self._load(self._path)
        except ConfigError as e:
            log.error("%s; the keys that were read before stay in use", e)

    def _load(self, path: str) -> None:
        found = read_keys(path)
        by_digest = dict(self._given)
        for tenant, digests in found:
            tenant.ledger = self._ledger
            kept = self._tenants.setdefault(tenant.name, tenant)
            if kept is not tenant:
                kept.become(tenant)
            by_digest.update(dict.fromkeys(digests, kept))
        self._by_digest = by_digest


def _stamp(path: str) -> tuple[int, int, int] | None:
    try:
        s = os.stat(path)
    except OSError:
        return None
    return s.st_mtime_ns, s.st_size, s.st_ino


def read_keys(path: str) -> list[tuple[Tenant, list[bytes]]]:
    """Tenants of a file and the digests of their keys.

    Raises:
        ConfigError: it cannot be read, or something in it is wrong.
    """
    where = f"--api-key-file {path}"
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as e:
        raise ConfigError(f"{where} cannot be read: {e.strerror or e}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{where} is not UTF-8") from None
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    if not lines:
        raise ConfigError(f"{where} has no keys; write one a line, or tenants")
    if any(line.startswith("tenants:") for line in lines):  # behind "---", say, of which no line is to become a key
        return _read_tenants(text, where)
    return [(Tenant(PUBLIC), [_digest(line, where) for line in lines])]


def _digest(key: Any, where: str) -> bytes:
    if not isinstance(key, str) or not key or any(c.isspace() for c in key):
        raise ConfigError(f"{where}: a key must be text without spaces")
    hashed = _HASH.fullmatch(key)
    if hashed is None and key.startswith("sha256:"):
        raise ConfigError(f"{where}: sha256: must be followed by 64 hexadecimal digits")
    return bytes.fromhex(hashed[1]) if hashed is not None else digest(key)


def _read_tenants(text: str, where: str) -> list[tuple[Tenant, list[bytes]]]:
    read = read_yaml(text, where)
    entries = read.get("tenants") if isinstance(read, dict) and set(read) == {"tenants"} else None
    if not isinstance(entries, list) or not entries:
        raise ConfigError(f"{where} must hold 'tenants:' and a list of them, nothing else")
    found: list[tuple[Tenant, list[bytes]]] = []
    names: set[str] = set()
    taken: set[bytes] = set()
    for place, entry in enumerate(entries):
        tenant, digests = _read_tenant(entry, f"{where}: tenant {place + 1}")
        if tenant.name in names:
            raise ConfigError(f"{where}: the tenant {tenant.name} stands there twice")
        if taken.intersection(digests) or len(set(digests)) < len(digests):
            raise ConfigError(f"{where}: a key of tenant {tenant.name} stands there twice")
        names.add(tenant.name)
        taken.update(digests)
        found.append((tenant, digests))
    return found


def _read_tenant(entry: Any, where: str) -> tuple[Tenant, list[bytes]]:
    if not isinstance(entry, Mapping):
        raise ConfigError(f"{where} must be a mapping with 'name' and 'keys'")
    for key in entry:
        if key not in _FIELDS:
            near = difflib.get_close_matches(str(key), _FIELDS, n=1)
            raise ConfigError(f"{where} has an unknown field {key!r}" + (f"; did you mean {near[0]}?" if near else ""))
    name, keys = entry.get("name"), entry.get("keys")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigError(f"{where} needs a name of up to 64 letters, digits and ._-")
    where = f"{where} ({name})"
    if not isinstance(keys, list) or not keys:
        raise ConfigError(f"{where} needs a list of keys")
    # Tenants share no cached prefix, unless they are given one salt; "" is the cache of those without tenants.
    salt = entry.get("cache_salt", f"tenant/{name}")
    if not isinstance(salt, str):
        raise ConfigError(f"{where}: cache_salt must be text")
    kind = entry.get("traffic_class", "chat")
    if kind not in get_args(TrafficClass):
        raise ConfigError(f"{where}: traffic_class must be one of {', '.join(get_args(TrafficClass))}")
    numbers: dict[str, Any] = {}
    for field, low in (("priority", -(2**31)), *((limit, 0) for limit in _LIMITS)):
        value = entry.get(field, 0)
        if type(value) is not int or not low <= value < 2**31:
            raise ConfigError(f"{where}: {field} must be an integer" + (" of at least 0" if low == 0 else ""))
        numbers[field] = value
    return Tenant(name, salt or None, kind, **numbers), [_digest(key, where) for key in keys]
