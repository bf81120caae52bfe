"""What the step loop asks of a drafter, the one built on prompt lookup in the core, and the model's own."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from deepinfer import _core
from deepinfer.speculative.settings import SpeculativeSettings


class Drafting(Protocol):
    """Proposes drafts and hears how they fared; called by the step loop only."""

    def propose(self) -> None:
        """Hands proposals for the next step to the core; called before each plan."""

    def completed(self, rows: NDArray[np.int32], accepted: NDArray[np.int32], step_rows: int, forward_ms: float, sampler_ms: float) -> None:
        """A step of decoding sequences alone has completed.

        Args:
            rows: int32 ``[n]``, rows of each sequence that were verified, drafts and one more.
            accepted: int32 ``[n]``, tokens that each has made.
            step_rows: rows of the step, as it was padded.
            forward_ms, sampler_ms: device times of its two halves.
        """


class _Budgeted:
    """A budget of draft rows that follows the measured times of completed steps, unless it is fixed.

    Attributes:
        runtime: gives the budget; ``None`` when it is fixed.
    """

    def __init__(self, core: _core.Core, settings: SpeculativeSettings, most_rows: int) -> None:
        assert settings.num_draft_tokens is not None, "settings are resolved for a model first"
        self._core, self._most = core, settings.num_draft_tokens
        self.runtime: _core.MtpRuntime | None = None
        if settings.draft_budget is None:
            self.runtime = _core.MtpRuntime(self._most, rows=most_rows)
        else:
            core.set_draft_budget(settings.draft_budget)

    def completed(self, rows: NDArray[np.int32], accepted: NDArray[np.int32], step_rows: int, forward_ms: float, sampler_ms: float) -> None:
        """See :class:`Drafting`."""
        if self.runtime is None:
            return
        if step_rows > len(rows):
            self.runtime.note_accepted(longer_than(rows - 1, self._most), longer_than(accepted - 1, self._most))
        self._core.set_draft_budget(self.runtime.update(len(rows), step_rows, forward_ms, sampler_ms))


class NgramDrafting(_Budgeted):
    """Prompt lookup in the core.

    Args:
        core: proposes and plans.
        settings: as checked and resolved.
        most_rows: rows of the largest step.
    """

    def __init__(self, core: _core.Core, settings: SpeculativeSettings, most_rows: int) -> None:
        super().__init__(core, settings, most_rows)
        core.set_ngram(self._most, shortest=settings.ngram_min, longest=settings.ngram_max)

    def propose(self) -> None:
        """See :class:`Drafting`."""
        self._core.propose_ngram()


class ModelDrafting(_Budgeted):
    """Drafts of the model's own stages: they never leave the device, so that the budget is all there is to do here."""

    def propose(self) -> None:
        """See :class:`Drafting`."""


def longer_than(lengths: NDArray[np.int32], most: int) -> list[int]:
    """How many lengths are above 0, 1, … ``most − 1``."""
    counts = np.bincount(np.clip(lengths, 0, most), minlength=most + 1)
    above: list[int] = counts[::-1].cumsum()[::-1][1:].tolist()
    return above
