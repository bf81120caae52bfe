"""What a user may set of drafting, checked once."""

from __future__ import annotations

from dataclasses import dataclass

from deepinfer.errors import ConfigError

METHODS = ("ngram",)
_MOST_DRAFTS = 64
_MOST_NGRAM = 64


@dataclass(frozen=True)
class SpeculativeSettings:
    """Which drafter and how much of it.

    Args:
        method: a name in ``METHODS``.
        num_draft_tokens: most drafts of a sequence and step.
        ngram_min: fewest of the newest tokens that must have occurred before.
        ngram_max: most of them that are compared; a longer match does not count more.
        draft_budget: most draft rows of one step over all sequences; ``None`` = found from the times of completed steps.

    Raises:
        ConfigError: a value is out of range; the message says what to change.
    """

    method: str
    num_draft_tokens: int = 4
    ngram_min: int = 2
    ngram_max: int = 4
    draft_budget: int | None = None

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ConfigError(f"speculative must be {' or '.join(map(repr, METHODS))}, or left out for no drafts, got {self.method!r}")
        _within("num_draft_tokens", self.num_draft_tokens, 1, _MOST_DRAFTS)
        _within("ngram_min", self.ngram_min, 1, _MOST_NGRAM)
        _within("ngram_max", self.ngram_max, 1, _MOST_NGRAM)
        if self.ngram_max < self.ngram_min:
            raise ConfigError(f"ngram_max ({self.ngram_max}) is below ngram_min ({self.ngram_min}); raise it")
        if self.draft_budget is not None:
            _within("draft_budget", self.draft_budget, 0, (1 << 24) - 1)


def _within(name: str, value: int, least: int, most: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise ConfigError(f"{name} must be an integer from {least} to {most}, got {value!r}")
