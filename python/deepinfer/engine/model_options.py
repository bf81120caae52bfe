"""Settings of models with caches of their own kind, from what a user gave and the environment."""

from __future__ import annotations

from dataclasses import replace

from deepinfer.engine import environ
from deepinfer.engine.config import EngineConfig
from deepinfer.errors import ConfigError
from deepinfer.models.base import ConfigurableModel, Drafter, Fp8CacheModel, Model, ModelOptions
from deepinfer.models.loaders import no_fp8_cache
from deepinfer.speculative import SpeculativeSettings

_DEFAULT_BLOCK = 64
_SETTINGS = ("yoco_prefill_truncation", "yoco_prefill_keep_tokens", "max_backtracking_tokens", "engram_cache_gib", "engram_tables")


def block_tokens(config: EngineConfig, model: Model) -> int:
    """Tokens of a page: what was asked for, else the model's own choice."""
    if config.block_size is not None:
        return config.block_size
    return model.block_tokens if isinstance(model, ConfigurableModel) else _DEFAULT_BLOCK


def drafting_of(config: EngineConfig, model: Model) -> SpeculativeSettings | None:
    """Drafting of this model as it was asked for in code or, for a model with draft stages, by the environment; ``None`` = none.

    Raises:
        ConfigError: the model cannot draft so.
    """
    can = model.draft_tokens if isinstance(model, Drafter) else 0
    settings = config.speculative_settings
    if settings is None:
        if config.speculative is not None or not can or not environ.get("USE_NEXTN_DECODE"):
            return None
        settings = replace(config, speculative="dspark").speculative_settings
        assert settings is not None
    if settings.method == "dspark":
        settings = replace(settings, temperatures=environ.get("DFLASH_CONFIDENCE_HEAD_TEMPERATURE"))
    return settings.resolved(config.model, can)


def configure_model(config: EngineConfig, model: Model, max_draft: int, drafts: bool = False) -> ModelOptions:
    """Sets a model up and gives what holds. Variables of the environment concern models that have these settings and no others.

    Raises:
        ConfigError: a value the model cannot run with, or a setting it does not have.
    """
    form = config.kv_cache_dtype
    if form == "fp8":
        if not isinstance(model, Fp8CacheModel):
            raise no_fp8_cache(config.model)
        form = "auto"  # of what else it may keep
    if not isinstance(model, ConfigurableModel):
        asked = [name for name in _SETTINGS if getattr(config, name) is not None]
        if form != "auto":
            asked.append(f"kv_cache_dtype={form!r}")
        if asked:
            raise ConfigError(f"{asked[0]} is a setting of models with compressed caches; leave it out for {config.model}")
        return ModelOptions(max_draft=max_draft, drafts=drafts)
    mode, keep, back = config.yoco_prefill_truncation, config.yoco_prefill_keep_tokens, config.max_backtracking_tokens
    return model.configure(
        ModelOptions(
            cache_form=form,
            truncation=environ.get("YOCO_PREFILL_TRUNCATION_MODE") if mode is None else mode,
            keep_tokens=environ.get("YOCO_PREFILL_KEEP_TOKENS") if keep is None else keep,
            max_backtracking=environ.get("MAX_BACKTRACKING_TOKENS") if back is None else back,
            max_draft=max_draft,
            table_cache_bytes=None if config.engram_cache_gib is None else int(config.engram_cache_gib * 2**30),
            table_place=config.engram_tables or "auto",
            drafts=drafts,
        )
    )
