"""From a name to a model that runs: finding files, reading checkpoint formats, filling parameters."""

from .load import keep_fp8_cache, load_model, model_of_size, no_fp8_cache
from .resolve import resolve_model
from .resolved import ResolvedModel, TokenizerSource

__all__ = ["ResolvedModel", "TokenizerSource", "keep_fp8_cache", "load_model", "model_of_size", "no_fp8_cache", "resolve_model"]
