"""The settings of an engine's KV store as they hold for a model, and the tier behind its address.

Owns: what is refused, how long a request may wait, what makes objects of two engines the same. Never touches: traffic.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from deepinfer import _core
from deepinfer.engine import environ
from deepinfer.engine.config import STORE_ROLES, EngineConfig
from deepinfer.engine.state_hits import window_hits
from deepinfer.errors import ConfigError
from deepinfer.kvcache.block_tier import BlockTier
from deepinfer.kvcache.layout import KvLayout
from deepinfer.kvcache.objects import GRAIN, ObjectForm
from deepinfer.kvcache.store_address import expanded
from deepinfer.models.base import StateGroup

PATIENCE = 60.0
"""Seconds that a request waits under ``wait``, and that anything on its way to the store may take before nobody waits for the next."""


@dataclass(frozen=True)
class StorePlan:
    """What holds for the traffic.

    Attributes:
        form: of the objects.
        rule: of models with windows, where sequences begin behind a hit.
        waits: whether requests wait for what the store has; ``patience``: for how many seconds at most.
        least: fewest tokens worth a fetch.
        write: the core's name of what is saved.
    """

    form: ObjectForm
    rule: _core.WindowRule | None
    waits: bool
    patience: float
    least: int
    write: Literal["on_finish", "write_through"]

    @property
    def keeps_slices(self) -> bool:
        """Whether every boundary at which slices are cut is the end of an object, which they hang off."""
        return self.rule is not None and self.rule.grain % GRAIN == 0

    @property
    def lease_ns(self) -> int:
        """The core's own bound, behind the traffic's."""
        return int((self.patience + 1.0) * 1e9)


def plan_store(
    config: EngineConfig, layout: KvLayout, state: Sequence[StateGroup], rule: object, given: BlockTier | None
) -> StorePlan | None:
    """The plan of an engine's store, ``None`` without one. ``given``: a tier to use instead of ``kv_store``.

    Raises:
        ConfigError: there are two stores, nothing is looked up, or the model's KV cannot be kept in objects.
    """
    if config.kv_store is None and given is None:
        return None
    if config.kv_store is not None and given is not None:
        raise ConfigError("kv_store names a store and another one was given; leave one of them out")
    if not config.enable_prefix_caching:
        raise ConfigError("a KV store keeps what prefix caching finds: set enable_prefix_caching=True or use no store")
    if config.engine_type == "completion":
        raise ConfigError("a completion engine computes no prompts; give the store to the prompt engine")
    if state and (window_hits(state) is None or not isinstance(rule, _core.WindowRule)):
        raise ConfigError("this model keeps state beside its KV that nothing makes up behind a stored beginning; leave kv_store out")
    patience = config.kv_prefetch_timeout if config.kv_prefetch == "timeout" else PATIENCE
    return StorePlan(
        form=ObjectForm(layout),
        rule=rule if isinstance(rule, _core.WindowRule) else None,
        waits=config.kv_prefetch != "best_effort",
        patience=patience,
        least=config.kv_prefetch_min_tokens,
        write=config.kv_store_write,
    )


def open_tier(config: EngineConfig, layout: KvLayout, numerics: str) -> BlockTier:
    """The tier at ``kv_store``. ``numerics``: what the bits of values depend on.

    Raises:
        ConfigError: the address or a size cannot be.
        DeepInferError: a store in a directory cannot be opened. One over sockets may come later.
    """
    assert config.kv_store is not None
    sizes = {} if config.kv_store_gib is None else {"capacity": int(config.kv_store_gib * 2**30)}
    tier: BlockTier = _core.KvTier(
        expanded(config.kv_store),
        tenant=config.kv_store_tenant,
        fingerprint=_fingerprint(layout, numerics),
        block_tokens=layout.block_tokens,
        first_stays=layout.identity.get("hit policy") == "replay",
        tokens=_tokens(config),
        tls_ca=config.kv_store_tls_ca,
        tls_name=config.kv_store_tls_name,
        **sizes,
    )
    return tier


def _tokens(config: EngineConfig) -> dict[str, bytes]:
    """Secrets by role: of the settings, else of the environment, there one for all of them first."""
    given: str | Mapping[str, str] | None = config.kv_store_token
    if given is None:
        given = environ.get("DEEPINFER_KV_STORE_TOKEN")
    if given is None:
        found = {role: environ.get(f"DEEPINFER_KVSTORE_TOKEN_{role.upper()}") for role in STORE_ROLES}
        given = {role: token for role, token in found.items() if token}
    return {role: token.encode() for role, token in (given if isinstance(given, Mapping) else dict.fromkeys(STORE_ROLES, given)).items()}


def _fingerprint(layout: KvLayout, numerics: str) -> bytes:
    """What KV values depend on besides tokens and the size of a block: engines that agree in it and not in the block share nothing."""
    return hashlib.blake2b(json.dumps({**layout.identity, "numerics": numerics}, sort_keys=True).encode(), digest_size=16).digest()
