"""One compilation: source in, serialised grammar and what the compiler said out.

Owns: calling xgrammar's compiler, its first mask, and making its messages readable. Never touches: processes, limits, caches. Runs inside
`compile_process`; whoever calls it elsewhere has no limits.
"""

from __future__ import annotations

import os
import re
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from deepinfer.errors import GrammarError, GrammarTimeoutError
from deepinfer.structured import bindings
from deepinfer.structured.vocabulary import Vocabulary

FIRST_MASK_SECONDS = 0.5
"""Processor time that a first mask may take: as much as any later one, see `deepinfer.worker.grammar.MaskClock`."""
_PLACE = re.compile(r"\[\d\d:\d\d:\d\d\]\s+\S+?\.(?:cc|h|cpp|cu):\d+:\s*")
_CHECK = re.compile(r"Check failed: \(.*?\) is (?:false|true):\s*")
_WARNING = re.compile(r"^Warning:\s*")
_MOST_SAID = 300
_MAY_BOUND = re.compile(r'"(?:min|max)Length"')
_WRONG_CLASS = r"[^\"\\\r\n]"
_RIGHT_CLASS = r"[^\0-\x1f\"\\]"


@dataclass(frozen=True)
class Compiled:
    """A serialised grammar, what of it is not held to, and the seconds that it took."""

    data: bytes
    reports: tuple[str, ...] = ()
    seconds: float = 0.0
    parts: Mapping[str, float] = field(default_factory=dict)


class Compiler:
    """Compiles for one vocabulary."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._bindings = bindings.load()
        self._size = vocabulary.size
        # One thread: several compilations run in processes side by side, beside engines that want their cores.
        self._compiler = self._bindings.GrammarCompiler(vocabulary.info(), max_threads=1, cache_enabled=False)

    def compile(self, kind: str, source: str, options: Mapping[str, Any]) -> Compiled:
        """Compiles, and makes the first mask, which can cost more than the compilation.

        Raises:
            GrammarError: the source is malformed.
            GrammarTimeoutError: its masks would be too slow, or memory ran out.
        """
        start = time.monotonic()
        with _heard() as said:
            try:
                compiled = self._made(kind, source, options)
            except MemoryError:
                raise GrammarTimeoutError("compiling it takes too much memory; make it smaller") from None
            except Exception as e:
                raise _readable(e) from None
        self._first_mask(compiled)
        try:
            data = compiled.serialize_json().encode()
        except MemoryError:
            raise GrammarTimeoutError("compiled it takes too much memory; make it smaller") from None
        except Exception as e:
            raise _readable(e) from None
        return Compiled(data, tuple(said), time.monotonic() - start)

    def _made(self, kind: str, source: str, options: Mapping[str, Any]) -> Any:
        match kind:
            case "json_schema" if _MAY_BOUND.search(source):
                return self._compiler.compile_grammar(self._mended(self._bindings.Grammar.from_json_schema(source, **options)))
            case "structural_tag" if _MAY_BOUND.search(source):
                return self._compiler.compile_grammar(self._mended(self._bindings.Grammar.from_structural_tag(source)))
            case "json_schema":
                return self._compiler.compile_json_schema(source, **options)
            case "regex":
                return self._compiler.compile_regex(source)
            case "grammar":
                return self._compiler.compile_grammar(source)
            case "structural_tag":
                return self._compiler.compile_structural_tag(source)
        raise GrammarError(f"there is no grammar of kind {kind!r}")

    def _mended(self, grammar: Any) -> Any:
        """Lets no control characters into strings with a length, where JSON forbids them. There are no escapes in these strings either; a
        rule with both makes masks a thousand times slower."""
        text = str(grammar)
        mended = text.replace(_WRONG_CLASS, _RIGHT_CLASS)
        return grammar if mended == text else self._bindings.Grammar.from_ebnf(mended)

    def _first_mask(self, compiled: Any) -> None:
        row = np.full(-(-self._size // 32), -1, np.int32)
        start = time.thread_time()
        try:
            self._bindings.GrammarMatcher(compiled).fill_next_token_bitmask(row)
        except MemoryError:
            raise GrammarTimeoutError("its first mask takes too much memory; make it smaller") from None
        except Exception as e:
            raise _readable(e) from None
        if (took := time.thread_time() - start) > FIRST_MASK_SECONDS:
            raise GrammarTimeoutError(f"its first mask takes {took:.1f} s, above {FIRST_MASK_SECONDS} s; make it less ambiguous or smaller")
        if not row.any():
            raise GrammarError("it allows no answer at all")


def clean(text: str) -> str:
    """A message of the native code without its file, line and time."""
    text = _CHECK.sub("", _PLACE.sub("", text.strip()))
    line = " ".join(text.split())
    return line if len(line) <= _MOST_SAID else line[: _MOST_SAID - 3] + "..."


def _readable(error: Exception) -> GrammarError:
    text = clean(str(error))
    if "bad_alloc" in text or "bad allocation" in text:
        return GrammarTimeoutError("compiling it takes too much memory; make it smaller")
    if isinstance(error, GrammarError):
        return error
    return GrammarError(text or type(error).__name__)


@contextmanager
def _heard() -> Iterator[list[str]]:
    """Collects what native code writes to stderr: the only place where it says what it ignores."""
    said: list[str] = []
    kept = os.dup(2)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            yield said
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            file.seek(0)
            for line in file.read(1 << 16).decode(errors="replace").splitlines():
                text = _PLACE.sub("", line)
                if _WARNING.match(text):
                    said.append(clean(_WARNING.sub("", text)))
            said[:] = list(dict.fromkeys(said))
