"""From token ids to text, a few ids at a time.

Owns: what text a token stands for, and the state that keeps a character split over tokens whole. Never touches: stop
strings (`stop_strings`), requests, the engine.

Two ways. Byte-level and byte-fallback vocabularies (nearly all language models) become a table id → bytes, and text is
decoded from the byte stream: constant work per token. Any other decoder is asked for the text of a short window of ids
and the new part is taken. Either way a character is given out when its last byte is there, never as a half.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import tokenizers

REPLACEMENT = "\ufffd"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_level_alphabet() -> dict[str, int]:
    """Character → byte of byte-level BPE: printable Latin-1 stands for itself, the rest is counted up from U+0100."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [b for b in range(256) if b not in set(printable)]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


_ALPHABET = _byte_level_alphabet()


@dataclass
class _Scheme:
    """What a decoder's steps amount to, for the families whose text is a concatenation of per-token bytes."""

    byte_level: bool = False
    byte_fallback: bool = False
    replacements: list[tuple[str, str]] = field(default_factory=list)
    metaspace: str | None = None  # its replacement character
    metaspace_drops_first: bool = False  # the first token loses its leading mark
    strip_left: int = 0  # spaces removed at the very start


def _read_scheme(decoder: dict[str, Any] | None) -> _Scheme | None:
    """The scheme of a decoder in `tokenizer.json` form; ``None`` if its text is not a plain concatenation."""
    if decoder is None:
        return None
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    scheme, fused = _Scheme(), False
    for step in steps:
        match step["type"]:
            case "ByteLevel" if not scheme.byte_fallback:
                scheme.byte_level = True
            case "ByteFallback" if not scheme.byte_level:
                scheme.byte_fallback = True
            case "Fuse":
                fused = True
            case "Replace" if "String" in step["pattern"] and not scheme.byte_level and (not fused or len(step["pattern"]["String"]) == 1):
                scheme.replacements.append((step["pattern"]["String"], step["content"]))
            case "Strip" if fused and step["content"] == " " and step["stop"] == 0:
                scheme.strip_left += step["start"]
            case "Metaspace" if not scheme.byte_level and scheme.metaspace is None:
                scheme.metaspace = step["replacement"]
                scheme.metaspace_drops_first = step.get("prepend_scheme", "always") != "never"
            case _:
                return None
    return scheme


class TokenTable:
    """Text of each token of one vocabulary; shared by all detokenizers, safe to share between threads."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self.backend = backend
        self.added = {i: token.content for i, token in backend.get_added_tokens_decoder().items()}
        self.special_ids = frozenset(i for i, token in backend.get_added_tokens_decoder().items() if token.special)
        self.scheme = _read_scheme(json.loads(backend.to_str()).get("decoder"))
        self._bytes: dict[int, bytes] = {}
        self._raw: dict[int, int] = {}

    def token_bytes(self, token_id: int) -> bytes:
        """UTF-8 bytes the token adds inside a text, possibly part of a character; empty for an id without a token."""
        known = self._bytes.get(token_id)
        return known if known is not None else self._look_up(token_id)

    def is_raw_byte(self, token_id: int) -> bool:
        """Whether this is a byte-fallback token, ``<0xE2>`` for example."""
        self.token_bytes(token_id)
        return token_id in self._raw

    def _look_up(self, token_id: int) -> bytes:
        token = self.backend.id_to_token(token_id) if 0 <= token_id < 2**32 else None
        made = b"" if token is None else self._make(token, token_id)
        self._bytes[token_id] = made
        return made

    def _make(self, token: str, token_id: int) -> bytes:
        scheme = self.scheme
        if scheme is None:
            return self.backend.decode([token_id], skip_special_tokens=False).encode()
        if scheme.byte_fallback and (found := _BYTE_TOKEN.fullmatch(token)):
            self._raw[token_id] = int(found[1], 16)
            return bytes([self._raw[token_id]])
        for old, new in scheme.replacements:
            token = token.replace(old, new)
        if scheme.metaspace is not None:
            token = token.replace(scheme.metaspace, " ")
        if scheme.byte_level and all(c in _ALPHABET for c in token):
            return bytes(_ALPHABET[c] for c in token)
        return token.encode()


class Detokenizer:
    """Text of one growing sequence.

    The pieces of :meth:`feed` and the last one of :meth:`flush`, joined, are the text of all ids decoded at once, however
    the ids were cut into calls. Bytes that are no UTF-8 become U+FFFD.

    Args:
        table: the vocabulary.
        skip_special_tokens: leave special tokens out.
        spaces_between_special_tokens: keep the space that some vocabularies put between two special tokens.
        prompt_ids: ids before the sequence. A vocabulary that drops the space at the start of a text does so only
            when nothing stands before it.
    """

    __slots__ = ("_at_start", "_decoder", "_in_raw", "_last_special", "_read", "_skip", "_spaces", "_strip", "_table", "_window")

    def __init__(
        self,
        table: TokenTable,
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
        prompt_ids: Iterable[int] = (),
    ) -> None:
        self._table = table
        self._skip: frozenset[int] = table.special_ids if skip_special_tokens else frozenset()
        self._spaces = spaces_between_special_tokens
        self._at_start = not any(i not in self._skip for i in prompt_ids)
        scheme = table.scheme
        self._strip = scheme.strip_left if scheme and self._at_start else 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._in_raw = False
        self._last_special = False
        self._window: list[int] = []  # ids whose text is not settled, after one that is (other decoders only)
        self._read = 0  # leading ids of the window whose text was given out

    def feed(self, ids: Sequence[int]) -> str:
        """Text that became certain with these ids."""
        step = self._feed_window if self._table.scheme is None else self._feed_bytes
        return "".join([step(i) for i in ids if i not in self._skip])

    def flush(self) -> str:
        """What is left at the end: an unfinished character shows as U+FFFD."""
        if self._table.scheme is None:
            text = self._window_text(self._window)[len(self._window_text(self._window[: self._read])) :]
            self._window, self._read = [], 0
            return text
        return self._end_run() if self._in_raw else self._decoder.decode(b"", final=True)

    def _feed_bytes(self, token_id: int) -> str:
        table, scheme = self._table, self._table.scheme
        data = table.token_bytes(token_id)
        if not data:
            return ""  # an id without a token is not there: it does not even end a run of bytes
        if self._at_start and scheme is not None:
            if scheme.metaspace is not None and scheme.metaspace_drops_first:
                data = data.replace(b" ", b"")
                self._at_start = False
            if self._strip:
                bare = data
                while self._strip and bare.startswith(b" "):
                    bare, self._strip = bare[1:], self._strip - 1
                if bare:
                    self._strip, self._at_start = 0, False
                data = bare
        raw = scheme is not None and scheme.byte_fallback and table.is_raw_byte(token_id)
        before = self._end_run() if self._in_raw and not raw else ""
        self._in_raw = raw
        return before + self._decoder.decode(data)

    def _end_run(self) -> str:
        """A run of byte tokens ended inside a character: one U+FFFD for each byte of it."""
        pending = self._decoder.getstate()[0]
        self._decoder.reset()
        return REPLACEMENT * len(pending)

    def _feed_window(self, token_id: int) -> str:
        special = token_id in self._table.added
        if special and self._last_special and not self._spaces:
            text = self.flush() + self._table.added[token_id]
            self._window, self._read = [token_id], 1
            return text
        self._last_special = special
        self._window.append(token_id)
        before = self._window_text(self._window[: self._read])
        now = self._window_text(self._window)
        if now.endswith(REPLACEMENT) and len(self._window) - self._read < 8:
            return ""  # perhaps the first bytes of a character
        piece = now[len(before) :]
        if piece:
            self._window = self._window[self._read :] if len(self._window) > 8 else self._window
            self._read = len(self._window)
        return piece

    def _window_text(self, ids: list[int]) -> str:
        return self._table.backend.decode(ids, skip_special_tokens=False) if ids else ""
