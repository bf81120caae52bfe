"""Settings of models with caches of their own kind, from what a user gave and the environment."""

from __future__ import annotations

from deepinfer.engine import environ
from deepinfer.engine.config import EngineConfig
from deepinfer.errors import ConfigError
from deepinfer.models.base import ConfigurableModel, Model, ModelOptions

_DEFAULT_BLOCK = 64
_SETTINGS = ("yoco_prefill_truncation", "yoco_prefill_keep_tokens", "max_backtracking_tokens", "engram_cache_gib")


def block_tokens(config: EngineConfig, model: Model) -> int:
    """Tokens of a page: what was asked for, else the model's own choice."""
    if config.block_size is not None:
        return config.block_size
    return model.block_tokens if isinstance(model, ConfigurableModel) else _DEFAULT_BLOCK


def configure_model(config: EngineConfig, model: Model, max_draft: int) -> ModelOptions:
    """Sets a model up and gives what holds. Variables of the environment concern models that have these settings and no others.

    Raises:
        ConfigError: a value the model cannot run with, or a setting it does not have.
    """
    if not isinstance(model, ConfigurableModel):
        asked = [name for name in _SETTINGS if getattr(config, name) is not None]
        if config.kv_cache_dtype != "auto":
            asked.append("kv_cache_dtype")
        if asked:
            raise ConfigError(f"{asked[0]} is a setting of models with compressed caches; leave it out for {config.model}")
        return ModelOptions(max_draft=max_draft)
    mode, keep, back = config.yoco_prefill_truncation, config.yoco_prefill_keep_tokens, config.max_backtracking_tokens
    return model.configure(
        ModelOptions(
            cache_form=config.kv_cache_dtype,
            truncation=environ.get("YOCO_PREFILL_TRUNCATION_MODE") if mode is None else mode,
            keep_tokens=environ.get("YOCO_PREFILL_KEEP_TOKENS") if keep is None else keep,
            max_backtracking=environ.get("MAX_BACKTRACKING_TOKENS") if back is None else back,
            max_draft=max_draft,
            table_cache_bytes=None if config.engram_cache_gib is None else int(config.engram_cache_gib * 2**30),
        )
    )
