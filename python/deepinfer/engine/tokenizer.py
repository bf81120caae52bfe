"""From text to token ids, with control tokens only where they are meant.

Owns: loading a tokenizer (directory, hub, GGUF), encoding, one-shot decoding, the split between text and control tokens.
Never touches: chat templates (`chat_template` renders them), growing sequences (`detokenizer`), the engine.

A control token is an added token that is special, or that looks like markup (`<...>`, `[...]`). In a prompt the caller
wrote as one string they all count, as with every other engine. In a rendered chat they count only where the template
wrote them: text of a message never becomes one (`encode_rendered`).
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from numbers import Integral
from pathlib import Path
from typing import Any

import tokenizers

from deepinfer.engine import tokenizer_store
from deepinfer.engine.detokenizer import Detokenizer, TokenTable
from deepinfer.engine.tokenizer_store import ChatTemplates
from deepinfer.errors import ConfigError, DeepInferError, InvalidRequestError, ModelNotFoundError, TokenOutOfRangeError


def _looks_like_markup(content: str) -> bool:
    return len(content) > 2 and content[0] + content[-1] in ("<>", "[]", "<｜", "｜｜")


class Tokenizer:
    """A vocabulary with its encoding rules; safe to share between threads once made.

    Args:
        backend: the fast tokenizer. It must not be changed afterwards.
        special_tokens: text of named special tokens that chat templates may use: ``bos_token``, ``eos_token``, ...
        chat_template: the model's own template(s), if it has any.
        name: where it came from, for messages.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str] | None = None,
        chat_template: ChatTemplates | None = None,
        name: str = "",
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.special_tokens = dict(special_tokens or {})
        self.chat_template = chat_template
        self.name = name
        self.table = TokenTable(backend)
        added = backend.get_added_tokens_decoder()
        unknown = self.special_tokens.get("unk_token")
        self._control = {t.content: i for i, t in added.items() if t.special or _looks_like_markup(t.content)}
        self._special = {t.content for t in added.values() if t.special}
        self._control_ids = frozenset(i for content, i in self._control.items() if content != unknown)
        self._strips = {t.content: (t.lstrip, t.rstrip) for t in added.values()}
        spellings = sorted(self._control, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, spellings))) if spellings else None
        self._plain: tokenizers.Tokenizer | None = None

    def __repr__(self) -> str:
        return f"Tokenizer({self.name!r}, vocab_size={self.vocab_size}, chat_template={'yes' if self.chat_template else 'no'})"

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included; the model's own vocabulary may be padded beyond it."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    @property
    def control_tokens(self) -> Mapping[str, int]:
        """Text → id of every control token."""
        return self._control

    @property
    def special_token_texts(self) -> frozenset[str]:
        """Texts of the control tokens that are marked special (the others only look like markup)."""
        return frozenset(self._special)

    def special_id(self, name: str) -> int | None:
        """Id of a named special token such as ``eos_token``."""
        text = self.special_tokens.get(name)
        return None if text is None else self.backend.token_to_id(text)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text whose control tokens count; ``add_special_tokens`` adds what the model puts around a prompt."""
        _check_text(text)
        return self.backend.encode(text, add_special_tokens=add_special_tokens).ids

    def encode_plain(self, text: str) -> list[int]:
        """Ids of a text in which nothing is a control token, whatever it spells."""
        _check_text(text)
        ids = self._plain_backend().encode(text, add_special_tokens=False).ids
        if self._control_ids.isdisjoint(ids):
            return ids
        # The vocabulary's own pieces spell a control token (unigram models): break every spelling after its first character.
        cuts = [0, *(m.start() + 1 for m in self._matches(text)), len(text)]
        plain = self._plain_backend()
        ids = [i for a, b in pairwise(cuts) for i in plain.encode(text[a:b], add_special_tokens=False).ids]
        if not self._control_ids.isdisjoint(ids):
            raise InvalidRequestError("a text cannot be written without control tokens of this vocabulary; remove their spelling from it")
        return ids

    def encode_rendered(self, text: str, foreign: Mapping[int, bool]) -> list[int]:
        """Ids of a rendered chat; equal to ``encode(text, add_special_tokens=False)`` unless a message spells a control token.

        Args:
            text: the rendered conversation.
            foreign: positions of characters that came from a message (at least those that control tokens are made of);
                ``True``: no control token may use it, ``False`` (an assistant's own turn): only no special token.
        """
        _check_text(text)
        spans: list[tuple[int, int, int]] = []  # start, end, id of each control token of the template
        spoofed = False
        for m in self._matches(text):
            strict = m[0] in self._special
            if any(foreign.get(p) is not None and (strict or foreign[p]) for p in range(m.start(), m.end())):
                spoofed = True
            elif not spans or m.start() >= spans[-1][1]:
                spans.append((*self._swallowed(text, m), self._control[m[0]]))
        if not spoofed:
            ids = self.encode(text, add_special_tokens=False)
            if [i for i in ids if i in self._control_ids] == [i for _, _, i in spans if i in self._control_ids]:
                return ids
        ids, at = [], 0
        for start, end, token in spans:
            ids += self.encode_plain(text[at:start]) if start > at else []
            ids.append(token)
            at = end
        return ids + (self.encode_plain(text[at:]) if at < len(text) else [])

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True, spaces_between_special_tokens: bool = True) -> str:
        """Text of a whole sequence, by the same road as streamed text."""
        d = Detokenizer(self.table, skip_special_tokens=skip_special_tokens, spaces_between_special_tokens=spaces_between_special_tokens)
        return d.feed(ids) + d.flush()

    def token_bytes(self, token_id: int) -> bytes:
        """UTF-8 bytes that a token adds inside a text; part of a character for some."""
        return self.table.token_bytes(token_id)

    def token_text(self, token_id: int) -> str:
        """The same as text; bytes that are no whole character show as U+FFFD."""
        return self.table.token_bytes(token_id).decode(errors="replace")

    def bad_word_ids(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Token sequences that spell the words, at the start of a text and after a space."""
        found: dict[tuple[int, ...], None] = {}
        for word in words:
            bare = word.strip()
            for spelling in (word,) if not bare else (bare, " " + bare):
                ids = tuple(self.encode(spelling, add_special_tokens=False))
                if ids:
                    found[ids] = None
        return tuple(found)

    def _matches(self, text: str) -> Iterator[re.Match[str]]:
        """Spellings of control tokens, overlapping ones included, longest first at each place."""
        pattern, at = self._pattern, 0
        while pattern is not None and (m := pattern.search(text, at)):
            yield m
            at = m.start() + 1

    def _swallowed(self, text: str, m: re.Match[str]) -> tuple[int, int]:
        """Span of a control token with the white space that it takes in on either side."""
        (left, right), start, end = self._strips[m[0]], m.start(), m.end()
        while left and start and text[start - 1].isspace():
            start -= 1
        while right and end < len(text) and text[end].isspace():
            end += 1
        return start, end

    def _plain_backend(self) -> tokenizers.Tokenizer:
        """A copy to which control tokens are ordinary text; made on first need, since copying a vocabulary takes time."""
        if self._plain is None:
            data = json.loads(self.backend.to_str())
            data["added_tokens"] = [t for t in data["added_tokens"] if t["content"] not in self._control]
            data["post_processor"] = None
            _never_prepend(data.get("pre_tokenizer"))
            self._plain = tokenizers.Tokenizer.from_str(json.dumps(data))
        return self._plain


def check_token_ids(ids: Sequence[int], vocab_size: int) -> list[int]:
    """The ids as a list of its own of plain ints.

    Raises:
        TokenOutOfRangeError: one is no integer in ``[0, vocab_size)``; the message names the first.
    """
    if set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < vocab_size:  # nearly all prompts: no Python code for each id
        return list(ids)
    for place, token in enumerate(ids):
        if not isinstance(token, Integral) or isinstance(token, bool):
            raise TokenOutOfRangeError(f"token ids must be integers, got {token!r} at position {place}")
        if not 0 <= token < vocab_size:
            raise TokenOutOfRangeError(f"token id {token} at position {place} is outside the vocabulary of {vocab_size} tokens")
    return [int(token) for token in ids]  # numpy's integers


def _check_text(text: str) -> None:
    """Lone surrogates cannot be encoded; say so instead of failing inside the tokenizer."""
    try:
        text.encode()
    except UnicodeEncodeError as e:
        raise InvalidRequestError(f"the text is not valid Unicode at character {e.start}: {e.reason}; remove or replace it") from None


def _never_prepend(step: dict[str, Any] | None) -> None:
    """Text after a control token is not the first of its prompt, so it gets no word mark put before it."""
    for part in (step or {}).get("pretokenizers", [step]):
        if part and part.get("prepend_scheme") == "first":
            part["prepend_scheme"] = "never"


@contextmanager
def _of_any_model() -> Iterator[None]:
    """Keeps transformers from warning that it does not know the model beside the tokenizer: it is not asked to run it."""

    def wanted(record: logging.LogRecord) -> bool:
        return "to instantiate a model of type" not in str(record.msg)

    logger = logging.getLogger("transformers.configuration_utils")
    logger.addFilter(wanted)
    try:
        yield
    finally:
        logger.removeFilter(wanted)


def load_tokenizer(source: str, revision: str | None = None) -> Tokenizer:
    """Reads a tokenizer from a directory, a hub id or a GGUF file. Code shipped with a model is never run.

    A directory's is kept as it was made (`deepinfer.engine.tokenizer_store`), so that this takes the library only once.

    Raises:
        ModelNotFoundError: nothing under that name.
        ConfigError: what is there has no fast tokenizer, or needs code of its own.
    """
    if source.endswith(".gguf"):
        from deepinfer.engine.gguf_tokenizer import gguf_tokenizer

        return gguf_tokenizer(source)
    file = tokenizer_store.file_of(Path(source))
    if file is not None and (kept := tokenizer_store.find(file)) is not None:
        with suppress(Exception):  # of a damaged file
            restored = tokenizers.Tokenizer.from_str(kept.backend)
            return Tokenizer(restored, special_tokens=kept.special_tokens, chat_template=kept.chat_template, name=source)
    from transformers import AutoTokenizer

    try:
        with _of_any_model():
            made = AutoTokenizer.from_pretrained(source, revision=revision, trust_remote_code=False)
    except OSError as e:
        if Path(source).is_dir():
            raise ConfigError(f"{source} has no tokenizer files (tokenizer.json); pass tokenizer=<directory or hub id>") from e
        raise ModelNotFoundError(f"no tokenizer found under {source!r}: not a directory, and not reachable as a hub id") from e
    except DeepInferError:
        raise
    except Exception as e:  # transformers raises many kinds for files it cannot read
        first = str(e).strip().splitlines()[0] if str(e).strip() else type(e).__name__
        raise ConfigError(f"the tokenizer of {source!r} cannot be read ({first}); pass tokenizer=<directory or hub id>") from e
    backend = getattr(made, "backend_tokenizer", None)
    if not isinstance(backend, tokenizers.Tokenizer):
        raise ConfigError(f"the tokenizer of {source!r} has no fast form (tokenizer.json); pass tokenizer= one that has")
    named = {k: str(v) for k, v in made.special_tokens_map.items() if isinstance(v, str) or hasattr(v, "content")}
    if file is not None:
        tokenizer_store.keep(file, backend, named, made.chat_template)
    return Tokenizer(backend, special_tokens=named, chat_template=made.chat_template, name=source)
