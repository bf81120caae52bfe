"""A tokenizer for random checkpoints: byte-level BPE over letters, with as many compressed ids as a configuration says.

Every text can be written with it. What it lacks is language: its longer tokens are all pairs, triples, … of letters in order.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from string import ascii_lowercase
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from ...errors import ConfigError
from .engram import compressed_keys
from .topology import DeepseekV41Topology

BOS, EOS, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"


def _alphabet() -> list[str]:
    """How byte-level BPE spells the 256 bytes."""
    return sorted(pre_tokenizers.ByteLevel.alphabet())


def _letters() -> Iterator[tuple[str, str]]:
    """All words of two and more letters, shorter ones first, as (all but the last letter, the last letter)."""
    length = 2
    while True:
        for letters in product(ascii_lowercase, repeat=length):
            yield "".join(letters[:-1]), letters[-1]
        length += 1


def _assemble(vocab: dict[str, int], merges: list[tuple[str, str]], special: list[str]) -> Tokenizer:
    made = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    made.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, vocab[BOS])])
    return made


def build_tokenizer(topology: DeepseekV41Topology, named: dict[str, int]) -> Tokenizer:
    """A tokenizer of ``topology.vocab`` tokens; ``named``: text → id of control tokens, ``BOS`` among them.

    Where the token map is derived from it, it has exactly ``engram_compressed_vocab_size`` compressed ids. Raises
    ``ConfigError`` if no such vocabulary exists or there is no room for control tokens and bytes.
    """
    vocab, engram = topology.vocab, topology.engram
    alphabet = _alphabet()
    if vocab < len(named) + len(alphabet):
        raise ConfigError(
            f"'vocab_size' = {vocab} has no room for {len(named)} control tokens and {len(alphabet)} bytes; "
            f"make it at least {len(named) + len(alphabet)}"
        )
    words = _letters()
    merges: list[tuple[str, str]] = []
    texts = list(alphabet)
    room = vocab - len(named) - len(alphabet)
    capitals = 0
    if engram is not None and topology.token_map == "derive":
        base = _assemble(_numbered(texts, {text: number for number, text in enumerate(named)}), [], list(named))
        keys = len(set(compressed_keys(base)))
        # a word in capitals shares the compressed id of the same word in small letters: it takes a token and gives no id
        least, most = keys + (room + 1) // 2, keys + room
        if not least <= engram.vocab <= most:
            raise ConfigError(
                f"a byte-level vocabulary of {vocab} tokens is made with {least} to {most} compressed ids, not {engram.vocab} "
                "('engram_compressed_vocab_size'); change it, or set 'x_engram_token_map' to 'identity'"
            )
        capitals = most - engram.vocab
    small = room - capitals
    heads = [next(words) for _ in range(small)]
    for group, count in ((heads, small), ([(a.upper(), b.upper()) for a, b in heads], capitals)):
        merges += group[:count]
        texts += [first + last for first, last in group[:count]]
    return _assemble(_numbered(texts, named), merges, sorted(named, key=named.__getitem__))


def _numbered(texts: list[str], named: dict[str, int]) -> dict[str, int]:
    """Ids in order for ``texts``, around those that are taken."""
    taken = set(named.values())
    free = (number for number in range(len(texts) + len(named) + max(taken, default=0) + 1) if number not in taken)
    return {**dict(zip(texts, free, strict=False)), **named}


def control_tokens(config: dict[str, Any], topology: DeepseekV41Topology) -> dict[str, int]:
    """Text → id of the tokens that a configuration names; ``ConfigError`` if two share an id or one is out of range."""
    text = config.get("text_config") or {}
    named: dict[str, int] = {}
    for content, field, default in ((BOS, "bos_token_id", 0), (EOS, "eos_token_id", 1), (PAD, "pad_token_id", 2)):
        value = config.get(field, text.get(field, default))
        named[content] = value[0] if isinstance(value, list) and value else value
    if topology.vision is not None:
        named["<｜image｜>"] = topology.vision.image_token
    if topology.drafts.stages:
        named["<｜draft▁noise｜>"] = topology.drafts.noise_token
    for content, number in named.items():
        if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < topology.vocab:
            raise ConfigError(f"the id of {content}, {number!r}, is not one of {topology.vocab} tokens; correct it in the configuration")
    if len(set(named.values())) != len(named):
        raise ConfigError(
            f"control tokens share an id: {', '.join(f'{text} {number}' for text, number in named.items())}; give each its own"
        )
    return named


def save_tokenizer(made: Tokenizer, directory: Path, max_length: int) -> None:
    """``tokenizer.json`` and ``tokenizer_config.json``."""
    made.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "add_bos_token": True,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
