"""Text of an answer on its way through the parsers, with the log-probabilities of the tokens that made it.

Owns: the pieces of text, the marks between them, and holding back what may become a mark. Never touches: what a mark means.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from deepinfer.server.conversation import TokenLogprob


@dataclass(frozen=True, slots=True)
class Bit:
    """Some text, and the tokens whose first character is in it."""

    text: str
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Mark:
    """A word that divides an answer, such as ``</think>``. With an ``id`` only that token is the mark, never its spelling."""

    text: str
    id: int | None = None


class Held:
    """Bits that wait, seen as one text."""

    def __init__(self) -> None:
        self._bits: deque[Bit] = deque()
        self.text = ""

    def add(self, bit: Bit) -> None:
        """Puts a bit at the end."""
        self._bits.append(bit)
        self.text += bit.text

    def take(self, count: int) -> list[Bit]:
        """The first ``count`` characters; a bit that is cut gives its log-probabilities to its first part."""
        taken: list[Bit] = []
        left = count
        while left > 0:
            bit = self._bits.popleft()
            if len(bit.text) > left:
                taken.append(Bit(bit.text[:left], bit.logprobs))
                self._bits.appendleft(Bit(bit.text[left:]))
                left = 0
            else:
                taken.append(bit)
                left -= len(bit.text)
        self.text = self.text[count:]
        return taken

    def take_all(self) -> list[Bit]:
        """Everything, bits without text included."""
        taken = list(self._bits)
        self._bits.clear()
        self.text = ""
        return taken

    def drop_leading(self, characters: str | None) -> None:
        """Throws away ``characters`` (``None`` = any white space) from the front."""
        bare = self.text.lstrip(characters)
        self.take(len(self.text) - len(bare))


def open_end(text: str, mark: str) -> int:
    """Length of the longest end of ``text`` that is a beginning of ``mark``, but not all of it."""
    for length in range(min(len(text), len(mark) - 1), 0, -1):
        if mark.startswith(text[-length:]):
            return length
    return 0
