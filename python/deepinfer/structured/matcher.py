"""Compiled grammars in the engine's process: the matcher of one answer.

Owns: `ReadyGrammar` (what travels with a request), `Matcher`, and what a process has read of grammars and vocabularies. Never touches:
compilation, masks' way to the device.

A vocabulary is sent to a process once; grammars name it. Reading a grammar takes milliseconds (large ones more), so that fronts have it
read beside the steps (`Shelf.warm`) before the request comes; a request never depends on that.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepinfer.errors import GrammarError
from deepinfer.structured import bindings
from deepinfer.structured.vocabulary import Vocabulary

_MOST_VOCABULARIES = 8
_MOST_GRAMMARS = 256
_MOST_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class ReadyGrammar:
    """A compiled grammar, ready for any engine process that knows its vocabulary. Called, it makes the matcher of one answer; pickles.

    Attributes:
        key: names source, options and vocabulary.
        vocabulary: the vocabulary's fingerprint.
        data: the serialised grammar.
    """

    key: str
    vocabulary: str
    data: bytes

    def __call__(self) -> Matcher:
        return SHELF.matcher(self)


@dataclass(frozen=True, slots=True)
class _Known:
    """A vocabulary that this process has learned; ``blank``: tokens that may never stand in an answer."""

    info: Any
    size: int
    blank: frozenset[int]


class Matcher:
    """The `deepinfer.worker.grammar.Grammar` of one answer."""

    __slots__ = ("_matcher", "_vocabulary", "position")

    def __init__(self, matcher: Any, vocabulary: _Known) -> None:
        self._matcher, self._vocabulary = matcher, vocabulary
        self.position = 0

    @property
    def complete(self) -> bool:
        """Whether what was accepted is a whole text of the grammar."""
        return bool(self._matcher.is_completed() or self._matcher.is_terminated())

    def fill_mask(self, row: NDArray[np.int32]) -> None:
        """Writes the mask of the next token; nothing is allowed after the end."""
        if self._matcher.is_terminated():
            row[:] = 0
            return
        row[:] = -1  # a grammar that allows everything leaves the row as it is
        self._matcher.fill_next_token_bitmask(row)

    def accept(self, token: int) -> bool:
        """Moves over one token, one that ends an answer included."""
        known = self._vocabulary
        if not 0 <= token < known.size or token in known.blank or self._matcher.is_terminated():
            return False  # the native code would say so on stderr, too
        if not self._matcher.accept_token(token):
            return False
        self.position += 1
        return True

    def rollback(self, count: int) -> None:
        """Takes the last tokens back."""
        if not 0 <= count <= self.position:
            raise ValueError(f"{count} tokens cannot be taken back of {self.position}")
        if count:
            self._matcher.rollback(count)
            self.position -= count


class Shelf:
    """What this process has read: vocabularies, and the grammars that were used last."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._infos: OrderedDict[str, _Known] = OrderedDict()
        self._reading: dict[str, threading.Event] = {}
        self._grammars: OrderedDict[str, tuple[Any, int]] = OrderedDict()
        self._size = 0

    def expect(self, fingerprint: str) -> None:
        """A vocabulary is about to be learned, on another thread: whoever needs it waits."""
        with self._lock:
            if fingerprint not in self._infos:
                self._reading.setdefault(fingerprint, threading.Event())

    def learn(self, vocabulary: Vocabulary) -> None:
        """Takes in a vocabulary; a known one at once."""
        name = vocabulary.fingerprint
        with self._lock:
            if name in self._infos:
                self._infos.move_to_end(name)
                return
            done = self._reading.setdefault(name, threading.Event())
        try:
            info = vocabulary.info()
            known = _Known(info, vocabulary.size, frozenset(info.special_token_ids) - set(vocabulary.stop_ids))
            with self._lock:
                self._infos[name] = known
                while len(self._infos) > _MOST_VOCABULARIES:
                    self._infos.popitem(last=False)
        finally:
            with self._lock:
                self._reading.pop(name, None)
            done.set()

    def knows(self, fingerprint: str) -> bool:
        """Whether a vocabulary has been learned."""
        with self._lock:
            return fingerprint in self._infos

    def warm(self, grammar: ReadyGrammar) -> None:
        """Reads a grammar, so that the next matcher of it costs nothing."""
        self._compiled(grammar)

    def matcher(self, grammar: ReadyGrammar) -> Matcher:
        """A matcher at the beginning of an answer.

        Raises:
            GrammarError: the vocabulary is not known, or the grammar does not belong to it.
        """
        compiled, known = self._compiled(grammar)
        return Matcher(bindings.load().GrammarMatcher(compiled), known)

    def _compiled(self, grammar: ReadyGrammar) -> tuple[Any, _Known]:
        with self._lock:
            reading = self._reading.get(grammar.vocabulary)
        if reading is not None:
            reading.wait(60.0)
        with self._lock:
            known = self._infos.get(grammar.vocabulary)
            if known is None:
                raise GrammarError("this engine process does not know the vocabulary that the grammar was compiled for")
            self._infos.move_to_end(grammar.vocabulary)
            if (found := self._grammars.get(grammar.key)) is not None:
                self._grammars.move_to_end(grammar.key)
                return found[0], known
        try:
            compiled = bindings.load().CompiledGrammar.deserialize_json(grammar.data.decode(), known.info)
        except (RuntimeError, UnicodeDecodeError) as e:
            raise GrammarError(f"the compiled grammar cannot be read: {e}") from e
        with self._lock:
            if grammar.key not in self._grammars:
                self._grammars[grammar.key] = compiled, len(grammar.data)
                self._size += len(grammar.data)
                while len(self._grammars) > _MOST_GRAMMARS or (self._size > _MOST_BYTES and len(self._grammars) > 1):
                    self._size -= self._grammars.popitem(last=False)[1][1]
        return compiled, known


SHELF = Shelf()
