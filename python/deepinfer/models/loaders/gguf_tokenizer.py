"""Rebuilds a fast tokenizer from the vocabulary that a GGUF file carries in its metadata."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from ...errors import CheckpointError, UnsupportedFormatError
from .gguf_file import gguf_parts, metadata, open_gguf

_UNKNOWN, _CONTROL, _USER, _BYTE = 2, 3, 4, 6  # GGUF token types; 1 is an ordinary piece, 5 an unused one

_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
# How each name of `tokenizer.ggml.pre` cuts text into words: a pattern, or None for the byte-level (GPT-2) one.
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACES
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACES
_WORDS: dict[str, str | None] = {
    "default": None,
    "gpt-2": None,
    "smollm": None,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
}
_SINGLE_DIGITS = {"smollm"}
_WHOLE_WORDS_FIRST = {"llama-bpe", "llama3", "llama-v3"}  # a word that is a token is not built from merges
_BOS_BY_DEFAULT = {"llama-bpe", "llama3", "llama-v3"}


@dataclass(frozen=True)
class GgufTokenizer:
    """What a GGUF file says about text.

    Attributes:
        backend: the fast tokenizer, with the file's ids.
        special_tokens: text of ``bos_token``, ``eos_token``, ``unk_token``, ``pad_token``, as far as named.
        chat_template: the template, if the file has one.
    """

    backend: tokenizers.Tokenizer
    special_tokens: dict[str, str] = field(default_factory=dict)
    chat_template: str | None = None


def gguf_tokenizer(path: str | Path) -> GgufTokenizer:
    """Tokenizer of a GGUF file (the first part of one in parts).

    Byte-level BPE (``gpt2``) and SentencePiece BPE (``llama``) vocabularies are read.

    Raises:
        UnsupportedFormatError: another kind of vocabulary or word rule; the message names it.
        CheckpointError: the file is damaged, or its vocabulary lists disagree.
    """
    file = gguf_parts(Path(path))[0]
    meta = metadata(open_gguf(file))
    kind = meta.get("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama"):
        raise UnsupportedFormatError(f"{file}: tokenizer.ggml.model {kind!r} is not read (gpt2 and llama are); pass tokenizer=<directory or hub id>")
    tokens = _column(meta, file, "tokens", str)
    types = _column(meta, file, "token_type", int, len(tokens)) or [1] * len(tokens)
    backend = _byte_level(meta, file, tokens) if kind == "gpt2" else _sentencepiece(meta, file, tokens, types)
    if backend.get_vocab_size() > len(tokens):
        raise CheckpointError(f"{file}: the tokenizer's vocabulary repeats tokens")
    backend.add_special_tokens([AddedToken(t, normalized=False, special=True) for t, k in zip(tokens, types, strict=True) if k == _CONTROL])
    backend.add_tokens([AddedToken(t, normalized=False, special=False) for t, k in zip(tokens, types, strict=True) if k == _USER])
    special = _special_tokens(meta, file, tokens)
    _surround(backend, meta, special, kind)
    return GgufTokenizer(backend, special, meta.get("tokenizer.chat_template"))


def _column(meta: Mapping[str, Any], file: Path, name: str, kind: type, length: int | None = None) -> list[Any]:
    values = meta.get(f"tokenizer.ggml.{name}")
    if values is None:
        if length is None:
            raise CheckpointError(f"{file}: metadata tokenizer.ggml.{name} is missing")
        return []
    if not isinstance(values, list) or not all(isinstance(v, kind) for v in values):
        raise CheckpointError(f"{file}: metadata tokenizer.ggml.{name} is not a list of {kind.__name__}")
    if length is not None and len(values) != length:
        raise CheckpointError(f"{file}: tokenizer.ggml.{name} has {len(values)} entries, the vocabulary {length}")
    return values


def _byte_level(meta: Mapping[str, Any], file: Path, tokens: list[str]) -> tokenizers.Tokenizer:
    rule = meta.get("tokenizer.ggml.pre", "default")
    if rule not in _WORDS:
        known = ", ".join(sorted(_WORDS))
        raise UnsupportedFormatError(f"{file}: tokenizer.ggml.pre {rule!r} is not read (known: {known}); pass tokenizer=<directory or hub id>")
    merges = []
    for line in _column(meta, file, "merges", str):
        pair = line.split(" ")
        if len(pair) != 2:
            raise CheckpointError(f"{file}: tokenizer.ggml.merges has an entry {line!r} that is not a pair")
        merges.append((pair[0], pair[1]))
    vocab = {token: i for i, token in enumerate(tokens)}
    try:
        model = models.BPE(vocab=vocab, merges=merges, ignore_merges=rule in _WHOLE_WORDS_FIRST)
    except Exception as error:  # the library raises a bare Exception for a merge of unknown pieces
        raise CheckpointError(f"{file}: tokenizer.ggml.merges does not fit the vocabulary: {error}") from error
    backend = tokenizers.Tokenizer(model)
    pattern = _WORDS[rule]
    steps: list[pre_tokenizers.PreTokenizer] = [pre_tokenizers.Digits(individual_digits=True)] if rule in _SINGLE_DIGITS else []
    if pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(pattern), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=bool(meta.get("tokenizer.ggml.add_space_prefix", False)), use_regex=pattern is None))
    if rule in ("qwen2", "deepseek-r1-qwen"):
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(meta: Mapping[str, Any], file: Path, tokens: list[str], types: list[int]) -> tokenizers.Tokenizer:
    scores = _column(meta, file, "scores", float, len(tokens))
    if not scores:
        raise CheckpointError(f"{file}: metadata tokenizer.ggml.scores is missing")
    vocab = {token: i for i, token in enumerate(tokens)}
    unknown = next((t for t, k in zip(tokens, types, strict=True) if k == _UNKNOWN), None)
    plain = [k not in (_UNKNOWN, _CONTROL, _USER, _BYTE) for k in types]
    # SentencePiece joins the neighbours whose piece has the best score: the same as merges in order of that score.
    merges: list[tuple[float, int, int, str, str]] = []
    for token, i in vocab.items():
        if not plain[i]:
            continue
        for cut in range(1, len(token)):
            left, right = vocab.get(token[:cut]), vocab.get(token[cut:])
            if left is not None and right is not None and plain[left] and plain[right]:
                merges.append((-scores[i], left, right, token[:cut], token[cut:]))
    merges.sort(key=lambda m: m[:3])
    has_bytes = _BYTE in types
    model = models.BPE(vocab=vocab, merges=[m[3:] for m in merges], unk_token=unknown, fuse_unk=True, byte_fallback=has_bytes)
    backend = tokenizers.Tokenizer(model)
    prefix = bool(meta.get("tokenizer.ggml.add_space_prefix", True))
    backend.normalizer = normalizers.Sequence([*([normalizers.Prepend("▁")] if prefix else []), normalizers.Replace(" ", "▁")])
    steps: list[decoders.Decoder] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return backend


def _special_tokens(meta: Mapping[str, Any], file: Path, tokens: list[str]) -> dict[str, str]:
    named = {}
    for role, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        value = meta.get(f"tokenizer.ggml.{key}_token_id")
        if value is None:
            continue
        if not 0 <= int(value) < len(tokens):
            raise CheckpointError(f"{file}: tokenizer.ggml.{key}_token_id {value} is outside the vocabulary of {len(tokens)}")
        named[f"{role}_token"] = tokens[int(value)]
    return named


def _surround(backend: tokenizers.Tokenizer, meta: Mapping[str, Any], special: Mapping[str, str], kind: str) -> None:
    """Adds bos and eos around a prompt where the file asks for it."""
    by_default = kind == "llama" or meta.get("tokenizer.ggml.pre") in _BOS_BY_DEFAULT
    bos = special.get("bos_token") if meta.get("tokenizer.ggml.add_bos_token", by_default) else None
    eos = special.get("eos_token") if meta.get("tokenizer.ggml.add_eos_token", False) else None
    named = [(t, backend.token_to_id(t)) for t in (bos, eos) if t is not None]
    if not named:
        return
    single = [*([bos] if bos else []), "$A", *([eos] if eos else [])]
    pair = [*single, *(f"{piece}:1" for piece in ([bos] if bos else [])), "$B:1", *(f"{eos}:1" for _ in ([eos] if eos else []))]
    backend.post_processor = processors.TemplateProcessing(single=" ".join(single), pair=" ".join(pair), special_tokens=named)
