"""The half of an engine that deals in text, made from a model's files.

Owns: which tokenizer, template, end-of-sequence ids and sampling defaults a model comes with. Never touches: weights, tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from deepinfer.engine.chat_template import ChatTemplate, load_chat_template
from deepinfer.engine.config import EngineConfig
from deepinfer.engine.input_processor import InputProcessor, ModelLimits
from deepinfer.engine.tokenizer import Tokenizer, load_tokenizer
from deepinfer.errors import ConfigError
from deepinfer.models import ResolvedModel

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")


@dataclass(frozen=True)
class TextSide:
    """What a model's files say about text; see :class:`InputProcessor` for the meaning of the parts.

    ``eos_ids`` are those of `generation_config.json`, else of `config.json`, and the tokenizer's own.
    """

    tokenizer: Tokenizer | None
    chat_template: ChatTemplate | None
    eos_ids: tuple[int, ...]
    generation_config: Mapping[str, Any]
    seed: int
    architecture: str = ""

    def input_processor(self, limits: ModelLimits) -> InputProcessor:
        """Preparation of requests for an engine with these limits."""
        return InputProcessor(
            self.tokenizer,
            self.chat_template,
            limits=limits,
            eos_ids=self.eos_ids,
            generation_config=self.generation_config,
            seed=self.seed,
        )


def load_text_side(config: EngineConfig, resolved: ResolvedModel) -> TextSide:
    """Reads tokenizer, template and defaults of a resolved model.

    A model without tokenizer files still takes token ids.

    Raises:
        ConfigError, ModelNotFoundError: tokenizer or chat template cannot be read.
    """
    tokenizer = _tokenizer(config, resolved)
    template = None
    if tokenizer is not None:
        if tokenizer.chat_template is None and resolved.chat_template:
            tokenizer.chat_template = resolved.chat_template
        template = load_chat_template(config.chat_template, tokenizer)
    elif config.chat_template is not None:
        raise ConfigError("chat_template was given, but this model has no tokenizer; pass tokenizer= as well")
    ids = resolved.eos_token_ids
    own = tokenizer.special_id("eos_token") if tokenizer is not None else None
    if own is not None and own not in ids:
        ids = (*ids, own)
    return TextSide(tokenizer, template, ids, resolved.generation_config, config.seed, resolved.architecture)


def _tokenizer(config: EngineConfig, resolved: ResolvedModel) -> Tokenizer | None:
    if config.tokenizer is not None:
        return load_tokenizer(config.tokenizer)
    folder = resolved.tokenizer.path
    if folder.is_dir() and not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        return None
    return load_tokenizer(str(folder))
