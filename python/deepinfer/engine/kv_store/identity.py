"""What the keys of an engine's objects are made of besides tokens: engines that agree in all of it find each other's KV.

Owns: the fields, from settings, machine and model; the same without an engine, for whoever asks a store what it has (`identity_of`).
Never touches: weights, devices' memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypedDict

import torch

from deepinfer.engine.config import EngineConfig, RunConfig
from deepinfer.engine.model_options import block_tokens, configure_model, drafting_of
from deepinfer.engine.state_hits import window_hits
from deepinfer.errors import ConfigError
from deepinfer.kernels import KERNEL_SET
from deepinfer.kvcache.layout import form_of
from deepinfer.kvcache.objects import GRAIN
from deepinfer.models import ResolvedModel, resolve_model
from deepinfer.models.base import PagedGroup, StateGroup
from deepinfer.models.contract import checked_groups
from deepinfer.models.loaders import keep_fp8_cache
from deepinfer.models.registry import resolve_architecture


class NamesOfKv(TypedDict):
    """Fields of `_core.CoreConfig` and `_core.kv_keys` that root the hash chain."""

    model: str
    revision: str
    weight_format: str
    kv_format: str
    numerics: str
    hit_policy: str
    salt: bytes


def values_of(config: EngineConfig, run: RunConfig, resolved: ResolvedModel, state: Sequence[StateGroup]) -> dict[str, str]:
    """What KV values depend on besides tokens and the shapes of the groups."""
    dtype = str(run.dtype).removeprefix("torch.")
    # Scales of 8-bit KV are in the checkpoint, so that its revision tells them too.
    form = {"KV cache": "fp8"} if config.kv_cache_dtype == "fp8" else {}
    return {
        **form,
        "model": resolved.model_id,
        "revision": resolved.revision,
        "weights": f"dummy {config.seed}" if config.load_format == "dummy" else resolved.weight_format,
        "dtype": dtype,
        "numerics": f"{run.platform.name}/{KERNEL_SET}/{dtype}{'' if run.batch_invariant else '/any rows'}",
        # A model that has nothing to make up is exact under either.
        "hit policy": config.hit_policy if window_hits(state) else "exact",
    }


def names_of(
    values: dict[str, str], run: RunConfig, paged: Sequence[PagedGroup], state: Sequence[StateGroup], stored: bool, salt: bytes
) -> NamesOfKv:
    """What the names of KV are made of besides tokens and the size of a block. ``stored``: there is a KV store."""
    kept = "/".join(values[name] for name in ("dtype", "KV cache") if name in values)
    return NamesOfKv(
        model=values["model"],
        revision=values["revision"],
        weight_format=values["weights"],
        # Slices of states and what is in a KV store are found by hash alone, by other engines too.
        kv_format=f"{kept}/{form_of(paged, state)}" if state or stored else kept,
        # The same operators give other bits on another processor or with another torch; only a store brings such KV together.
        numerics=f"{values['numerics']}/{run.platform.arithmetic}" if stored else values["numerics"],
        hit_policy=values["hit policy"],
        salt=salt,
    )


def salt_of(config: EngineConfig) -> bytes:
    """What stands before each request's own salt where there is a store: who shares it."""
    return config.kv_store_tenant.encode() + b"\0"  # which no name has


def identity_of(config: EngineConfig, cache_salt: str = "") -> dict[str, Any]:
    """What an engine of these settings with a KV store makes its keys of, and the tenant that it is to the store. Weights are not read.

    Args:
        config: settings; ``kv_store`` may be left out.
        cache_salt: of the requests that are meant.

    Raises:
        ConfigError: its blocks fit no object of a store; else as for the engine.
    """
    run, resolved = config.resolve(), resolve_model(config.model, config.revision, config.load_format)
    model = resolve_architecture(resolved.architecture).from_config(resolved.config, run.dtype, torch.device("meta"))
    if config.kv_cache_dtype == "fp8":
        keep_fp8_cache(model, config.model)
    drafting = drafting_of(config, model)
    drafts = 0 if drafting is None else drafting.num_draft_tokens or 0
    configure_model(config, model, drafts, drafting is not None and drafting.method != "ngram" and drafts > 0)
    paged, state = checked_groups(model, block_tokens(config, model))
    block = paged[0].page_tokens
    if GRAIN % block:
        raise ConfigError(f"a block has {block} tokens here, an object of a KV store {GRAIN}: give a block_size that divides it")
    names = names_of(values_of(config, run, resolved, state), run, paged, state, True, salt_of(config) + cache_salt.encode())
    return {**names, "salt": names["salt"].hex(), "block_tokens": block, "tenant": config.kv_store_tenant}
