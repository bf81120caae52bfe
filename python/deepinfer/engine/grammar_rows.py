"""The matchers of running answers: told what the core kept, asked for masks before the next token is drawn.

Owns: one matcher an answer, by sequence handle, and what ends an answer whose matcher fails. Never touches: the masks' way to the
device, and how grammars are made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from deepinfer import _core
from deepinfer.engine.step_loop import Launched
from deepinfer.worker.grammar import NO_TOKEN, DeadEndError, Grammar, fill_masks, mask_words
from deepinfer.worker.runner import ModelRunner

MakeGrammar = Callable[[], Grammar]


class GrammarRows:
    """Nothing that a matcher does or raises leaves its own answer.

    Args:
        core, runner: the engine's.
    """

    def __init__(self, core: _core.Core, runner: ModelRunner) -> None:
        self._core, self._runner = core, runner
        self._matchers: dict[int, Grammar] = {}
        self._errors: dict[int, str] = {}
        self._kept: dict[int, int] = {}

    def add(self, handle: int, make: MakeGrammar, produced: Sequence[int] = ()) -> None:
        """Makes the matcher of a sequence, moves it over what was produced elsewhere, and lets the core run the sequence, or end it."""
        self._runner.masks.prepare()
        try:
            matcher = make()
            refused = next((token for token in produced if not matcher.accept(token)), None)
            if refused is None:
                self._matchers[handle] = matcher
            else:
                self._errors[handle] = f"the grammar refuses token {refused}, which another engine made"
        except Exception as e:
            self._errors[handle] = f"the grammar cannot be used: {type(e).__name__}: {e}"
        self._core.grammar_ready(handle, handle in self._matchers)

    def forget(self, handle: int) -> None:
        """A sequence has ended."""
        self._matchers.pop(handle, None)
        self._errors.pop(handle, None)
        self._kept.pop(handle, None)

    def error_of(self, handle: int) -> str | None:
        """Why a sequence ended, if its grammar ended it."""
        return self._errors.get(handle)

    def kept(self, handle: int) -> int | None:
        """Output tokens of a sequence that its grammar has ended; what the core has beyond them was drawn before it could know."""
        return self._kept.get(handle)

    def move(self, handle: int, count: int, tokens: Callable[[], Sequence[int]]) -> None:
        """Tells a matcher the ``count`` newest tokens of its sequence, which the core has kept; one that refuses ends the sequence."""
        matcher = self._matchers.get(handle)
        if matcher is None:
            return
        accepted, new = 0, tokens()
        try:
            while accepted < count and matcher.accept(new[accepted]):
                accepted += 1
            why = "" if accepted == count else self._refusal(matcher, new[accepted])
        except Exception as e:
            why = f"the grammar failed with {type(e).__name__}: {e}"
        if why:
            self._end(handle, count - accepted, why)

    def _refusal(self, matcher: Grammar, token: int) -> str:
        """Behind a draft after which nothing may follow, a token has been drawn without a mask."""
        row = np.zeros(mask_words(self._runner.model.vocab_size), np.int32)
        matcher.fill_mask(row)
        return f"the grammar refuses token {token}" if row.any() else NO_TOKEN

    def fill(self, launched: Launched) -> None:
        """Writes the masks of a launched step's grammar rows. The step before it has completed."""
        fields = self._runner.ring.slots[launched.slot].a
        masks = self._runner.masks.host(launched.slot)
        at = 0
        for i in launched.grammars:
            first, end = int(launched.sample_off[i]), int(launched.sample_off[i + 1])
            rows = masks[at : at + end - first]
            at += end - first
            handle = int(launched.handles[i])
            matcher = self._matchers.get(handle)
            if matcher is None or not len(rows):
                rows[:] = -1  # a sequence that has ended meanwhile: nothing of its rows is kept
                continue
            drafts = fields["ids"][fields["sample_row"][first + 1 : end]].tolist()
            try:
                fill_masks(matcher, rows, drafts)
            except Exception as e:
                rows[:] = -1
                self._end(handle, 0, str(e) if isinstance(e, DeadEndError) else f"the grammar failed with {type(e).__name__}: {e}")

    def _end(self, handle: int, beyond: int, why: str) -> None:
        """Ends one sequence, and no other, without its last ``beyond`` tokens."""
        del self._matchers[handle]
        self._errors[handle] = why
        if (info := self._core.info(handle)) is not None:
            self._kept[handle] = info["output_tokens"] - beyond
            self._core.stop_at(handle, self._kept[handle], "error")
