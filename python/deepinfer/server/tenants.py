"""Who asks: keys, the tenants they belong to, and what these may use.

Owns: tenants, their keys (as SHA-256 only), rate limits, counters of use. Never touches: HTTP (see `http.auth`), files other than
the one of keys.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from deepinfer.sampling import SamplingParams, TrafficClass


@dataclass(slots=True)
class Usage:
    """What one tenant has used since the start; plain counters that only grow."""

    requests: int = 0
    rejected: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0


@dataclass(slots=True, eq=False)
class Tenant:
    """One tenant; ``usage`` stays when the file of keys is read again.

    Attributes:
        cache_salt: prompts of tenants with different salts share no cached prefix; ``None``: the common one.
        priority: requests are served no earlier than this lets them (smaller is earlier).
        traffic_class: of requests that bring none.
        requests_per_minute, tokens_per_minute: 0 is no limit.
    """

    name: str
    cache_salt: str | None = None
    traffic_class: TrafficClass = "chat"
    priority: int = 0
    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    usage: Usage = field(default_factory=Usage)

    def params(self, params: SamplingParams, names_class: bool = False) -> SamplingParams:
        """A request's sampling values under this tenant's salt, priority and class; ``names_class``: it brought a class of its own."""
        salt = params.cache_salt
        if self.cache_salt is not None:
            # The length keeps a tenant's salt from running into what its client says.
            salt = f"{len(self.cache_salt)}:{self.cache_salt}{salt or ''}"
        changes = {
            "cache_salt": salt,
            "priority": max(params.priority, self.priority),
            "traffic_class": params.traffic_class if names_class else self.traffic_class,
        }
        changes = {name: value for name, value in changes.items() if value != getattr(params, name)}
        return params.clone(**changes) if changes else params


PUBLIC = "default"
"""Name of the one tenant where there are none."""
