"""What a user may set of drafting, checked once."""

from __future__ import annotations

from dataclasses import dataclass, replace

from deepinfer.errors import ConfigError

METHODS = ("ngram", "dspark")
OFF = "off"
_MOST_DRAFTS = 64
_NGRAM_DRAFTS = 4
_MOST_NGRAM = 64


@dataclass(frozen=True)
class SpeculativeSettings:
    """Which drafter and how much of it.

    Args:
        method: a name in ``METHODS``.
        num_draft_tokens: most drafts of a sequence and step; ``None`` = 4 of ``ngram``, all that the stages of ``dspark`` make.
        ngram_min: fewest of the newest tokens that must have occurred before.
        ngram_max: most of them that are compared; a longer match does not count more.
        draft_budget: most draft rows of one step over all sequences; ``None`` = found from the times of completed steps.
        temperatures: of ``dspark``: what the confidence in each draft is divided by; empty = 1.

    Raises:
        ConfigError: a value is out of range; the message says what to change.
    """

    method: str
    num_draft_tokens: int | None = None
    ngram_min: int = 2
    ngram_max: int = 4
    draft_budget: int | None = None
    temperatures: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ConfigError(
                f"speculative must be {' or '.join(map(repr, METHODS))}, or {OFF!r} or left out for no drafts, got {self.method!r}"
            )
        if self.num_draft_tokens is not None:
            _within("num_draft_tokens", self.num_draft_tokens, 1, _MOST_DRAFTS)
        _within("ngram_min", self.ngram_min, 1, _MOST_NGRAM)
        _within("ngram_max", self.ngram_max, 1, _MOST_NGRAM)
        if self.ngram_max < self.ngram_min:
            raise ConfigError(f"ngram_max ({self.ngram_max}) is below ngram_min ({self.ngram_min}); raise it")
        if self.draft_budget is not None:
            _within("draft_budget", self.draft_budget, 0, (1 << 24) - 1)

    def resolved(self, model: str, can_draft: int) -> SpeculativeSettings:
        """The same with the number of drafts filled in, for a model whose own stages make ``can_draft`` (0 = it has none).

        Raises:
            ConfigError: ``dspark`` of a model without stages, more drafts than they make, or as many temperatures as nobody needs.
        """
        if self.method == "ngram":
            return self if self.num_draft_tokens is not None else replace(self, num_draft_tokens=_NGRAM_DRAFTS)
        if not can_draft:
            raise ConfigError(f"speculative='dspark' needs a model with draft stages, and {model} has none; use 'ngram' or leave it out")
        count = can_draft if self.num_draft_tokens is None else self.num_draft_tokens
        if count > can_draft:
            raise ConfigError(f"num_draft_tokens {count} is above the {can_draft} drafts that the stages of {model} make; lower it")
        if self.temperatures and len(self.temperatures) != count:
            raise ConfigError(
                f"DFLASH_CONFIDENCE_HEAD_TEMPERATURE lists {len(self.temperatures)} temperatures for {count} drafts; give one for each"
            )
        return replace(self, num_draft_tokens=count)


def _within(name: str, value: int, least: int, most: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise ConfigError(f"{name} must be an integer from {least} to {most}, got {value!r}")
