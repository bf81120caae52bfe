"""From a name to a model that runs: finding files, reading checkpoint formats, filling parameters."""

from .load import load_model, model_of_size
from .resolve import resolve_model
from .resolved import ResolvedModel, TokenizerSource

__all__ = ["ResolvedModel", "TokenizerSource", "load_model", "model_of_size", "resolve_model"]
