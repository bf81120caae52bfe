"""The tokenizer that a GGUF file carries in its metadata, rebuilt for `tokenizers`.

Owns: vocabulary kinds `gpt2` (byte-level BPE) and `llama` (SentencePiece BPE), how each names its way of cutting text. Never
touches: weights. A kind or cut that is not known is refused by name: a near miss would give other ids without a sign.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from deepinfer.engine.tokenizer import Tokenizer
from deepinfer.engine.tokenizer_store import ChatTemplates
from deepinfer.errors import CheckpointError, UnsupportedFormatError
from deepinfer.models.loaders.gguf_file import gguf_parts, metadata, open_gguf

# Token types of the format.
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4

# `tokenizer.ggml.pre` → (pattern that cuts text, None for GPT-2's own; whole words before merges; NFC first; begins with bos).
_LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CUTS: dict[str, tuple[str | None, bool, bool, bool]] = {
    "gpt-2": (None, False, False, False),
    "smollm": (None, False, False, False),
    "llama-bpe": (_LLAMA3, True, False, True),
    "llama3": (_LLAMA3, True, False, True),
    "llama-v3": (_LLAMA3, True, False, True),
    "qwen2": (_QWEN2, False, True, False),
    "deepseek-r1-qwen": (_QWEN2, False, True, True),
    "tekken": (_TEKKEN, True, False, True),
}


def gguf_tokenizer(path: str) -> Tokenizer:
    """The tokenizer of a GGUF file (of a sharded model, any part).

    Raises:
        UnsupportedFormatError: the vocabulary is of a kind, or cuts text in a way, that is not known.
        CheckpointError: the metadata are incomplete.
    """
    meta = metadata(open_gguf(gguf_parts(Path(path))[0]))
    kind = meta.get("tokenizer.ggml.model")
    tokens, types = meta.get("tokenizer.ggml.tokens"), meta.get("tokenizer.ggml.token_type")
    if kind is None or not tokens:
        raise CheckpointError(f"{path} holds no tokenizer; pass tokenizer=<directory or hub id>")
    if kind == "gpt2":
        backend, begins = _byte_level(path, meta, tokens)
    elif kind == "llama":
        backend, begins = _sentencepiece(path, meta, tokens)
    else:
        raise UnsupportedFormatError(
            f"{path}: tokenizer kind {kind!r} is not read (gpt2 and llama are); pass tokenizer=<directory or hub id>"
        )
    types = types or [1] * len(tokens)
    backend.add_tokens(
        [
            AddedToken(text, special=kind_of != _USER_DEFINED, normalized=False)
            for text, kind_of in zip(tokens, types, strict=True)
            if kind_of in (_UNKNOWN, _CONTROL, _USER_DEFINED)
        ]
    )
    special = _special_tokens(meta, tokens)
    _surround(backend, meta, special, begins)
    return Tokenizer(backend, special_tokens=special, chat_template=_chat_templates(meta), name=path)


def _byte_level(path: str, meta: Mapping[str, Any], tokens: Sequence[str]) -> tuple[Backend, bool]:
    name = meta.get("tokenizer.ggml.pre")
    if name not in _CUTS:
        raise UnsupportedFormatError(
            f"{path}: tokenizer.ggml.pre {name!r} is not known ({', '.join(_CUTS)} are); pass tokenizer=<directory or hub id>"
        )
    pattern, whole_words, nfc, begins = _CUTS[name]
    merges = meta.get("tokenizer.ggml.merges")
    if merges is None:
        raise CheckpointError(f"{path} has no tokenizer.ggml.merges; pass tokenizer=<directory or hub id>")
    pairs = [tuple(merge.split(" ", 1)) for merge in merges]
    backend = Backend(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=pairs, ignore_merges=whole_words))
    if nfc:
        backend.normalizer = normalizers.NFC()
    if pattern is not None:
        cut: Any = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
        backend.pre_tokenizer = pre_tokenizers.Sequence([cut, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    elif name == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        backend.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    else:
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return backend, begins


def _sentencepiece(path: str, meta: Mapping[str, Any], tokens: Sequence[str]) -> tuple[Backend, bool]:
    """SentencePiece's BPE merges the pair whose result has the best score; as a list: every split of every piece, best first."""
    scores = meta.get("tokenizer.ggml.scores")
    if scores is None or len(scores) != len(tokens):
        raise CheckpointError(f"{path} has no score for every token; pass tokenizer=<directory or hub id>")
    vocab = {t: i for i, t in enumerate(tokens)}
    ranked = [
        (-scores[i], vocab[piece[:at]], vocab[piece[at:]], piece[:at], piece[at:])
        for piece, i in vocab.items()
        for at in range(1, len(piece))
        if piece[:at] in vocab and piece[at:] in vocab
    ]
    ranked.sort(key=lambda r: r[:3])
    unknown = tokens[int(meta.get("tokenizer.ggml.unknown_token_id", 0))]
    model = models.BPE(vocab=vocab, merges=[r[3:] for r in ranked], unk_token=unknown, byte_fallback=True, fuse_unk=True)
    backend = Backend(model)
    steps: list[Any] = [normalizers.Replace(" ", "▁")]
    ends: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if meta.get("tokenizer.ggml.add_space_prefix", True):
        steps.insert(0, normalizers.Prepend("▁"))
        ends.append(decoders.Strip(" ", 1, 0))
    backend.normalizer = normalizers.Sequence(steps)
    backend.decoder = decoders.Sequence(ends)
    return backend, True


def _special_tokens(meta: Mapping[str, Any], tokens: Sequence[str]) -> dict[str, str]:
    """Text of the named tokens that chat templates use."""
    names = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    ids = {ours: meta.get(f"tokenizer.ggml.{theirs}_token_id") for theirs, ours in names.items()}
    return {name: tokens[int(i)] for name, i in ids.items() if i is not None and 0 <= int(i) < len(tokens)}


def _surround(backend: Backend, meta: Mapping[str, Any], special: Mapping[str, str], begins: bool) -> None:
    """Adds bos before and eos behind a prompt, where the file (or its kind) says so."""
    first = special.get("bos_token") if meta.get("tokenizer.ggml.add_bos_token", begins) else None
    last = special.get("eos_token") if meta.get("tokenizer.ggml.add_eos_token", False) else None
    around = {text: backend.token_to_id(text) for text in (first, last) if text is not None}
    if around:
        pieces = [p for p in (first, "$A", last) if p is not None]
        backend.post_processor = processors.TemplateProcessing(single=pieces, special_tokens=list(around.items()))


def _chat_templates(meta: Mapping[str, Any]) -> ChatTemplates | None:
    """The template, or all of them by name when there are several."""
    default = meta.get("tokenizer.chat_template")
    prefix = "tokenizer.chat_template."
    named = {key.removeprefix(prefix): text for key, text in meta.items() if key.startswith(prefix) and isinstance(text, str)}
    if named and default is not None:
        return {"default": default, **named}
    return named or default
