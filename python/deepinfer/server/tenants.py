"""Who asks: tenants, what they may use and have used.

Owns: tenants, rate limits, counters of use. Never touches: keys (see `keys`), HTTP.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from deepinfer.sampling import SamplingParams, TrafficClass
from deepinfer.server.errors import ApiError
from deepinfer.server.ledger import Ledger


@dataclass(slots=True)
class Usage:
    """What one tenant has used since the start; plain counters that only grow."""

    requests: int = 0
    rejected: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0


class Bucket:
    """A limit per minute that refills evenly. What it holds may go below zero: answers are paid for when they are over.

    Attributes:
        used: what was taken and has not come back by the time ``at``.
    """

    def __init__(self, per_minute: int, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self.per_minute = per_minute
        self.used, self.at = 0.0, now()

    def level(self) -> float:
        """What is left."""
        now = self._now()
        self.used = max(0.0, self.used - max(0.0, now - self.at) * self.per_minute / 60)
        self.at = now
        return self.per_minute - self.used

    def take(self, amount: float) -> None:
        """Takes so much, whatever is left."""
        self.level()
        self.used += amount

    def wait(self, amount: float) -> float:
        """Seconds until so much is there, or all that there can be."""
        return max(0.0, min(amount, self.per_minute) - self.level()) * 60 / self.per_minute

    def change(self, per_minute: int) -> None:
        """Another limit; what was used stays used."""
        self.level()
        self.per_minute = per_minute


@dataclass(slots=True, eq=False)
class Tenant:
    """One tenant. The object stays when the file of keys is read again, and with it what was used.

    Attributes:
        cache_salt: prompts of tenants with different salts share no cached prefix; ``None``: the common one.
        priority: requests are served no earlier than this lets them (smaller is earlier).
        traffic_class: of requests that bring none.
        requests_per_minute, tokens_per_minute: 0 is no limit.
        ledger: where what was used is kept with other processes; ``None``: it is this one's alone.
    """

    name: str
    cache_salt: str | None = None
    traffic_class: TrafficClass = "chat"
    priority: int = 0
    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    usage: Usage = field(default_factory=Usage)
    ledger: Ledger | None = None
    _requests: Bucket | None = field(init=False, default=None)
    _tokens: Bucket | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self._requests = _changed(self._requests, self.requests_per_minute)
        self._tokens = _changed(self._tokens, self.tokens_per_minute)

    def become(self, other: Tenant) -> None:
        """Takes over another one's settings."""
        for name in ("cache_salt", "traffic_class", "priority", "requests_per_minute", "tokens_per_minute"):
            setattr(self, name, getattr(other, name))
        self.__post_init__()

    def pay(self, prompt_tokens: int) -> dict[str, str]:
        """Pays for a request that comes in: itself and its prompt. Gives the headers that say what is left.

        Raises:
            ApiError: 429; a limit is reached.
        """
        with self._counting():
            waits = [bucket.wait(amount) for bucket, amount in ((self._requests, 1), (self._tokens, prompt_tokens)) if bucket is not None]
            wait = max(waits, default=0.0)
            if wait > 0:
                self.usage.rejected += 1
                which = "requests" if self._requests is not None and self._requests.wait(1) > 0 else "tokens"
                limit = self.requests_per_minute if which == "requests" else self.tokens_per_minute
                message = f"the limit of {limit} {which} a minute is reached; try again in {math.ceil(wait)} s"
                raise ApiError(429, message, code="rate_limit_exceeded", retry_after=math.ceil(wait), headers=self._headers())
            if self._requests is not None:
                self._requests.take(1)
            if self._tokens is not None:
                self._tokens.take(prompt_tokens)
            return self._headers()

    def pay_answer(self, tokens: int) -> None:
        """Pays for what was generated."""
        if self._tokens is not None:
            with self._counting():
                self._tokens.take(tokens)

    @contextmanager
    def _counting(self) -> Iterator[None]:
        """What other processes have counted is known, and they know what is counted here, as if there were one."""
        buckets = [(place, bucket) for place, bucket in ((0, self._requests), (2, self._tokens)) if bucket is not None]
        if self.ledger is None or not buckets:
            yield
            return
        with self.ledger.entry(self.name) as entry:
            for place, bucket in buckets:
                if entry[place + 1]:
                    bucket.used, bucket.at = entry[place : place + 2]
            try:
                yield
            finally:
                for place, bucket in buckets:
                    entry[place : place + 2] = bucket.used, bucket.at

    def _headers(self) -> dict[str, str]:
        """The limits and what is left of them, under the names that OpenAI's service uses."""
        made: dict[str, str] = {}
        for name, bucket in (("requests", self._requests), ("tokens", self._tokens)):
            if bucket is not None:
                made[f"x-ratelimit-limit-{name}"] = str(bucket.per_minute)
                made[f"x-ratelimit-remaining-{name}"] = str(max(0, math.floor(bucket.level())))
                made[f"x-ratelimit-reset-{name}"] = _span(bucket.wait(bucket.per_minute))
        return made

    def params(self, params: SamplingParams) -> SamplingParams:
        """A request's sampling values under this tenant's salt and priority."""
        salt = params.cache_salt
        if self.cache_salt is not None:
            # The length keeps a tenant's salt from running into what its client says.
            salt = f"{len(self.cache_salt)}:{self.cache_salt}{salt or ''}"
        priority = max(params.priority, self.priority)
        if (salt, priority) == (params.cache_salt, params.priority):
            return params
        return params.clone(cache_salt=salt, priority=priority)


PUBLIC = "default"
"""Name of the one tenant where there are none."""


def _changed(bucket: Bucket | None, per_minute: int) -> Bucket | None:
    if not per_minute:
        return None
    if bucket is None:
        return Bucket(per_minute)
    if bucket.per_minute != per_minute:
        bucket.change(per_minute)
    return bucket


def _span(seconds: float) -> str:
    """A time as such headers give it: 20ms, 1.5s, 2m3s."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    minutes, rest = divmod(seconds, 60)
    return f"{int(minutes)}m{math.ceil(rest)}s" if minutes else f"{rest:.1f}s"
