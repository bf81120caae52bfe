"""Model families, the registry that finds them and the loaders that fill them.

Owns: what a configuration means, parameters, how hidden states and logits are computed, checkpoint formats. Never
touches: scheduling, KV allocation, sampling, text beyond naming where a tokenizer lies.

A family is four modules: ``topology`` (configuration → validated plan), ``containers`` (parameters under checkpoint
names), ``forward`` (how it is computed) and ``ops`` (tensors only). Entry points: ``resolve_model`` and ``load_model``.
"""

from .loaders import load_model, resolve_model
from .loaders.resolved import ResolvedModel
from .registry import register_model, resolve_architecture

__all__ = ["ResolvedModel", "load_model", "register_model", "resolve_architecture", "resolve_model"]
