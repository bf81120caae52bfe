"""Grammars of one engine: what a model's text side and settings make of `deepinfer.structured`.

Owns: the vocabulary of a model as grammars see it, and the service with the engine's limits. Never touches: requests, steps.
"""

from __future__ import annotations

from deepinfer.engine import environ
from deepinfer.engine.config import EngineConfig
from deepinfer.engine.text_side import TextSide
from deepinfer.errors import GrammarError
from deepinfer.structured.service import GrammarService
from deepinfer.structured.vocabulary import Vocabulary


def make_grammar_service(config: EngineConfig, text: TextSide, vocab_size: int) -> GrammarService:
    """The service of an engine with so many columns of logits. Nothing is started before it is used."""
    workers, seconds, gib = config.grammar_workers, config.grammar_timeout, config.grammar_cache_gib
    gib = environ.get("XGRAMMAR_CACHE_GIB") if gib is None else gib
    if environ.get("XGRAMMAR_DISABLE_CACHE"):
        gib = 0
    return GrammarService(
        lambda: vocabulary_of(text, vocab_size),
        environ.get("SO_BUILDER_CPUS") if workers is None else workers,
        environ.get("XGRAMMAR_TIMEOUT") if seconds is None else seconds,
        int(gib * (1 << 30)),
    )


def vocabulary_of(text: TextSide, vocab_size: int) -> Vocabulary:
    """What grammars know of a model's tokens. Raises GrammarError if there is no tokenizer."""
    tokenizer = text.tokenizer
    if tokenizer is None:
        raise GrammarError("structured outputs need the texts of tokens, and this model came without a tokenizer; pass tokenizer=")
    count = max(tokenizer.backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
    control = tokenizer.control_tokens
    marks = [
        i for name, i in control.items() if name not in tokenizer.special_token_texts
    ]  # around reasoning and calls, in models that know these
    return Vocabulary.of(tokenizer.token_bytes, count, vocab_size, control.values(), text.eos_ids, marks)
