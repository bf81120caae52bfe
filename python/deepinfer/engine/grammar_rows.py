"""The matchers of running answers: told what the core kept, asked for masks before the next token is drawn.

Owns: one matcher an answer, by sequence handle, and how an answer ends whose matcher fails or has nothing left to allow. Never touches:
the masks' way to the device, and how grammars are made.

A matcher that allows no token although its text is whole (the model has no end-of-sequence id, or may not draw it yet) ends its answer
as complete; any other that fails, contradicts the core or is too slow ends it as failed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np

from deepinfer import _core
from deepinfer.engine.step_loop import Launched
from deepinfer.worker.grammar import NO_TOKEN, DeadEndError, Grammar, MaskClock, SlowMaskError, fill_masks, mask_words
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
        self._whole: set[int] = set()
        self._clock = MaskClock()
        self._failed = 0

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
        self._failed += handle in self._errors
        self._core.grammar_ready(handle, handle in self._matchers)

    def forget(self, handle: int) -> None:
        """A sequence has ended."""
        self._matchers.pop(handle, None)
        self._errors.pop(handle, None)
        self._kept.pop(handle, None)
        self._whole.discard(handle)

    def counts(self) -> dict[str, float]:
        """Since the start: masks written (``fills``, ``fill_seconds``), those that held a step up (``slow_fills``), and answers that ended
        because of their grammar (``so_failed``)."""
        c = self._clock
        return {"fills": c.fills, "fill_seconds": c.seconds, "slow_fills": c.slow, "so_failed": self._failed}

    def error_of(self, handle: int) -> str | None:
        """Why a sequence ended, if its grammar ended it."""
        return self._errors.get(handle)

    def finish_of(self, handle: int) -> Literal["stop", "so_failed"] | None:
        """How a grammar ended a sequence; ``None`` if it did not."""
        return "stop" if handle in self._whole else "so_failed" if handle in self._errors else None

    def kept(self, handle: int) -> int | None:
        """Output tokens of a sequence that its grammar has ended; what the core has beyond them was drawn before it could know."""
        return self._kept.get(handle)

    def move(self, handle: int, count: int, tokens: Callable[[], Sequence[int]]) -> None:
        """Tells a matcher the ``count`` newest tokens of its sequence, which the core has kept; one that refuses ends the sequence."""
        matcher = self._matchers.get(handle)
        if matcher is None:
            return
        accepted, new, at_end = 0, tokens(), False
        try:
            while accepted < count and matcher.accept(new[accepted]):
                accepted += 1
            if accepted == count:
                return
            why, at_end = self._refusal(matcher, new[accepted]), True
        except Exception as e:
            why = str(e) if isinstance(e, SlowMaskError) else f"the grammar failed with {type(e).__name__}: {e}"
        self._end(handle, count - accepted, why, at_end)

    def _refusal(self, matcher: Grammar, token: int) -> str:
        """Why a token that was drawn is not allowed. Behind a draft after which nothing may follow, it was drawn without a mask; where
        other settings forbid all that the grammar allows, in spite of it."""
        row = np.zeros(mask_words(self._runner.model.vocab_size), np.int32)
        self._clock.fill(matcher, row)
        if not row.any():
            return NO_TOKEN
        return f"the grammar refuses token {token}; do logit_bias, bad_words or min_tokens forbid all that it allows?"

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
                fill_masks(matcher, rows, drafts, self._clock)
            except Exception as e:
                rows[:] = -1
                plain = isinstance(e, DeadEndError | SlowMaskError)
                self._end(handle, 0, str(e) if plain else f"the grammar failed with {type(e).__name__}: {e}", isinstance(e, DeadEndError))

    def _end(self, handle: int, beyond: int, why: str, at_end: bool) -> None:
        """Ends one sequence, and no other, without its last ``beyond`` tokens; ``at_end``: because no token of the grammar follows."""
        matcher = self._matchers.pop(handle)
        if at_end and _is_complete(matcher):
            self._whole.add(handle)
        else:
            self._errors[handle] = why
            self._failed += 1
        if (info := self._core.info(handle)) is not None:
            self._kept[handle] = info["output_tokens"] - beyond
            self._core.stop_at(handle, self._kept[handle], "error" if handle in self._errors else "stop")


def _is_complete(matcher: Grammar) -> bool:
    try:
        return matcher.complete
    except Exception:
        return False
