"""Where a model's reasoning ends and its answer begins.

Owns: the two marks around reasoning and the layout that belongs to them. Never touches: tool calls, tokens, templates.

A mark that is a token counts wherever it comes, and its spelling never does. One that the vocabulary only spells counts where it can
be meant: the opening one at the start of an answer, the closing one within reasoning. Line breaks right behind a mark are the layout
of the template and are left out. The beginning of a tool call ends reasoning too, if it is a token: some models do not close first.
"""

from __future__ import annotations

from collections.abc import Sequence

from deepinfer.server.chat.bits import Bit, Held, Mark, open_end
from deepinfer.server.conversation import Reasoning


class ReasoningParser:
    """Takes reasoning out of one answer.

    Args:
        opening, closing: the marks.
        inside: the prompt ends within reasoning.
        ending: further marks that end reasoning; they are passed on.
    """

    def __init__(self, opening: Mark, closing: Mark, *, inside: bool, ending: Sequence[Mark] = ()) -> None:
        self._opening, self._closing, self._ending = opening, closing, tuple(ending)
        self.inside = inside
        self._may_open = not inside
        self._after_mark = inside
        self._held = Held()

    def feed(self, item: Bit | Mark) -> list[Reasoning | Bit | Mark]:
        """Reasoning, and what is not reasoning as it came."""
        if isinstance(item, Mark):
            return self._mark(item)
        self._held.add(item)
        found: list[Reasoning | Bit | Mark] = []
        while self._held.text and self._step(found):
            pass
        return found

    def flush(self) -> list[Reasoning | Bit | Mark]:
        """What was held back, at the end of the answer."""
        return self._out(self._held.take_all())

    def _mark(self, mark: Mark) -> list[Reasoning | Bit | Mark]:
        found = self.flush()
        if mark in (self._opening, self._closing):
            self._turn(mark is self._opening or mark == self._opening)
        else:
            if mark in self._ending and self.inside:
                self._turn(False)
            self._may_open = self._after_mark = False
            found.append(mark)
        return found

    def _turn(self, inside: bool) -> None:
        self.inside, self._after_mark, self._may_open = inside, True, False

    def _step(self, found: list[Reasoning | Bit | Mark]) -> bool:
        """Moves on in what is held; False when more is needed."""
        held = self._held
        if self._after_mark:
            held.drop_leading("\n")
            if not held.text:
                return False
            self._after_mark = False
        if self.inside:
            return self._search(self._closing, found)
        if self._may_open and self._opening.id is None:
            bare = held.text.lstrip()
            if bare.startswith(self._opening.text):
                held.take(len(held.text) - len(bare) + len(self._opening.text))
                self._turn(True)
                return True
            if self._opening.text.startswith(bare):
                return False  # white space, or the beginning of the mark
        self._may_open = self._may_open and self._opening.id is None and not held.text.strip()
        found += held.take_all()
        return False

    def _search(self, mark: Mark, found: list[Reasoning | Bit | Mark]) -> bool:
        held = self._held
        if mark.id is not None:
            found += self._out(held.take_all())
            return False
        at = held.text.find(mark.text)
        if at < 0:
            found += self._out(held.take(len(held.text) - open_end(held.text, mark.text)))
            return False
        found += self._out(held.take(at))
        held.take(len(mark.text))
        self._turn(False)
        return True

    def _out(self, bits: list[Bit]) -> list[Reasoning | Bit | Mark]:
        return [Reasoning(b.text, b.logprobs) for b in bits] if self.inside else list(bits)
