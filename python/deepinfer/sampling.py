"""How one request wants its tokens drawn, and when it ends.

Owns: `SamplingParams`, its checks, its defaults from `generation_config.json`, the seeds of several answers.
Never touches: tensors (the sampler is in `deepinfer.worker`), tokenizers, engine state. A leaf: any layer may import it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args

from deepinfer.errors import SamplingParamsError
from deepinfer.structured_outputs import StructuredOutputs

TrafficClass = Literal["agent", "chat"]

MAX_ANSWERS = 1 << 14
"""Most answers to one prompt."""

GREEDY_BELOW = 1e-5
"""A temperature below this is treated as 0: always the most likely token."""

_MASK = (1 << 64) - 1
_SEED_MASK = (1 << 63) - 1
_GENERATION_CONFIG_FIELDS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}


def _mix(x: int) -> int:
    """The SplitMix64 finaliser (Steele, Lea, Flood 2014): a bijection of 64-bit integers."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def derive_seed(seed: int, index: int) -> int:
    """Seed of answer ``index`` of a request seeded with ``seed``; always in ``[0, 2**63)``.

    Answer 0 uses the seed itself, so ``n=3`` starts with the answer that ``n=1`` gives. Answer ``i > 0`` uses
    ``mix64(seed + i * 0x9E3779B97F4A7C15) mod 2**63`` with SplitMix64's finaliser as ``mix64``.
    """
    if index == 0:
        return seed & _SEED_MASK
    return _mix((seed + index * 0x9E3779B97F4A7C15) & _MASK) & _SEED_MASK


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling values of one request; immutable, use :meth:`clone` for a changed copy.

    Every value is checked when the object is made; :class:`~deepinfer.errors.SamplingParamsError` says what to change.

    Args:
        n: answers to one prompt, 1 to 16384. More than one needs ``temperature > 0``. Seeds: :func:`derive_seed`.
        temperature: 0 takes the most likely token.
        top_p: keep the smallest set of tokens whose probability reaches this, in (0, 1].
        top_k: keep the k most likely tokens; 0 or −1 keeps all.
        min_p: drop tokens below this share of the most likely one's probability, in [0, 1].
        presence_penalty: subtracted from logits of tokens already generated, in [−2, 2].
        frequency_penalty: the same, times how often each was generated, in [−2, 2].
        repetition_penalty: divides positive and multiplies negative logits of tokens in prompt or output; above 0, 1 = off.
        seed: makes the draws repeatable, in [0, 2**63). ``None``: derived from the engine's own seed and the request's number.
        max_tokens: most tokens to generate, at least 1; ``None``: up to the model's length.
        min_tokens: no end-of-sequence token, stop id or stop string takes effect before this many tokens.
        stop: strings that end the text; the text is cut before the match.
        include_stop_str_in_output: cut after the stop string (or stop token's text) instead.
        stop_token_ids: further ids that end a sequence.
        ignore_eos: go on after the model's end-of-sequence ids.
        logprobs: also give the log-probabilities of this many most likely tokens per position; −1 = whole vocabulary.
        prompt_logprobs: the same for prompt positions.
        logit_bias: added to the logits of these token ids, each in [−100, 100].
        bad_words: strings that must not be generated.
        skip_special_tokens: leave special tokens out of the text.
        spaces_between_special_tokens: put a space between special tokens that are shown.
        detokenize: make text; ``False`` gives ids only.
        truncate_prompt_tokens: keep only the last so many prompt tokens; −1 = as many as fit beside ``max_tokens``.
        priority: smaller is served first.
        cache_salt: prompts share cached prefixes only with prompts under the same salt.
        traffic_class: ``"chat"`` or ``"agent"``; a hint for prefix-cache retention and scheduling.
        structured_outputs: the form that the answer has to have, see :class:`~deepinfer.structured_outputs.StructuredOutputs`; also its
            fields as a mapping. The model's end-of-sequence ids are drawn only where the text is whole.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | Iterable[str] | None = ()
    include_stop_str_in_output: bool = False
    stop_token_ids: Iterable[int] | None = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: Mapping[int, float] | None = None
    bad_words: Iterable[str] | None = ()
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    detokenize: bool = True
    truncate_prompt_tokens: int | None = None
    priority: int = 0
    cache_salt: str | None = None
    traffic_class: TrafficClass = "chat"
    structured_outputs: StructuredOutputs | Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        put = object.__setattr__
        put(self, "stop", _strings("stop", self.stop))
        put(self, "bad_words", _strings("bad_words", self.bad_words))
        put(self, "stop_token_ids", _token_ids(self.stop_token_ids))
        put(self, "logit_bias", _logit_bias(self.logit_bias))
        put(self, "structured_outputs", StructuredOutputs.of(self.structured_outputs))
        self._check_ranges()
        self._check_conflicts()

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken instead of a draw."""
        return self.temperature < GREEDY_BELOW

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """``stop`` as the tuple it is stored as."""
        return self.stop  # type: ignore[return-value]

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """``stop_token_ids`` as the tuple it is stored as."""
        return self.stop_token_ids  # type: ignore[return-value]

    @property
    def banned_strings(self) -> tuple[str, ...]:
        """``bad_words`` as the tuple it is stored as."""
        return self.bad_words  # type: ignore[return-value]

    @property
    def form(self) -> StructuredOutputs | None:
        """``structured_outputs`` as it is stored."""
        return self.structured_outputs  # type: ignore[return-value]

    def clone(self, **changes: Any) -> SamplingParams:
        """A copy with some values changed, checked again."""
        return replace(self, **changes)

    def seeds(self, fallback: int) -> tuple[int, ...]:
        """Seeds of the ``n`` answers; ``fallback`` stands in when no seed was given."""
        seed = fallback if self.seed is None else self.seed
        return tuple(derive_seed(seed, i) for i in range(self.n))

    @classmethod
    def from_generation_config(cls, config: Mapping[str, Any] | None, **values: Any) -> SamplingParams:
        """Defaults of a model's ``generation_config.json``, overridden by ``values``.

        ``do_sample: false`` (or absent, with no sampling value set) does not force temperature 0: as in other engines the
        file gives temperature, top_p, top_k, min_p, repetition_penalty and max_new_tokens, nothing else.
        """
        merged = {ours: config[theirs] for theirs, ours in _GENERATION_CONFIG_FIELDS.items() if config and config.get(theirs) is not None}
        return cls(**{**merged, **values})

    def __repr__(self) -> str:
        shown = [f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if getattr(self, f.name) != f.default]
        return f"SamplingParams({', '.join(shown)})"

    def _check_ranges(self) -> None:
        _integer("n", self.n, 1)
        if self.n > MAX_ANSWERS:
            raise SamplingParamsError(f"n must be at most {MAX_ANSWERS}, got {self.n}; send the prompt several times instead")
        _number("temperature", self.temperature, 0.0, math.inf)
        _number("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _integer("top_k", self.top_k, -1)
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _number("repetition_penalty", self.repetition_penalty, 0.0, math.inf, open_low=True)
        if self.seed is not None:
            _integer("seed", self.seed, 0, _SEED_MASK)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1, hint="; leave it out (None) to generate up to the model's length")
        _integer("min_tokens", self.min_tokens, 0)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _integer(name, getattr(self, name), -1, hint=" (-1 = whole vocabulary, None = off)")
        if self.truncate_prompt_tokens is not None:
            _integer("truncate_prompt_tokens", self.truncate_prompt_tokens, -1, hint=" (-1 = as many as fit)")
            if self.truncate_prompt_tokens == 0:
                raise SamplingParamsError("truncate_prompt_tokens is 0, which leaves no prompt; use a positive number, -1 or None")
        _integer("priority", self.priority, -(2**31), 2**31 - 1)
        if self.cache_salt is not None and (not isinstance(self.cache_salt, str) or not self.cache_salt):
            raise SamplingParamsError(f"cache_salt must be a non-empty string or None, got {self.cache_salt!r}")
        if self.cache_salt and any("\ud800" <= c <= "\udfff" for c in self.cache_salt):
            raise SamplingParamsError(f"cache_salt must be valid Unicode, got {self.cache_salt!r}")
        if self.traffic_class not in get_args(TrafficClass):
            raise SamplingParamsError(f"traffic_class must be one of {', '.join(get_args(TrafficClass))}, got {self.traffic_class!r}")
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "spaces_between_special_tokens", "detokenize"):
            if not isinstance(getattr(self, name), bool):
                raise SamplingParamsError(f"{name} must be True or False, got {getattr(self, name)!r}")

    def _check_conflicts(self) -> None:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise SamplingParamsError(
                f"min_tokens ({self.min_tokens}) is above max_tokens ({self.max_tokens}); lower min_tokens or raise max_tokens"
            )
        if self.stop_strings and not self.detokenize:
            raise SamplingParamsError("stop strings are matched in text, which detokenize=False leaves out; use stop_token_ids instead")
        if self.n > 1 and self.greedy:
            raise SamplingParamsError(
                f"n={self.n} with temperature 0 would give the same answer {self.n} times; use n=1 or raise the temperature"
            )


def _number(name: str, value: Any, low: float, high: float, *, open_low: bool = False) -> None:
    good = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
    if not good or not (low < value if open_low else low <= value) or value > high:
        span = f"{'(' if open_low else '['}{low:g}, {'inf)' if math.isinf(high) else f'{high:g}]'}"
        raise SamplingParamsError(f"{name} must be a number in {span}, got {value!r}")


def _integer(name: str, value: Any, low: int, high: int | None = None, *, hint: str = "") -> None:
    good = isinstance(value, int) and not isinstance(value, bool)
    if not good or value < low or (high is not None and value > high):
        span = f"at least {low}" if high is None else f"between {low} and {high}"
        raise SamplingParamsError(f"{name} must be an integer of {span}, got {value!r}{hint}")


def _items(name: str, value: Iterable[Any] | None) -> tuple[Any, ...]:
    if value is not None and not isinstance(value, Iterable):
        raise SamplingParamsError(f"{name} must be a list or None, got {value!r}")
    return () if value is None else tuple(value)


def _strings(name: str, value: str | Iterable[str] | None) -> tuple[str, ...]:
    items = (value,) if isinstance(value, str) else _items(name, value)
    for item in items:
        if not isinstance(item, str) or not item:
            raise SamplingParamsError(f"{name} must hold non-empty strings, got {item!r}; leave the entry out")
    return tuple(dict.fromkeys(items))


def _token_ids(value: Iterable[int] | None) -> tuple[int, ...]:
    items = _items("stop_token_ids", value)
    for item in items:
        _integer("stop_token_ids", item, 0, 2**31 - 1, hint=" among its entries")
    return tuple(dict.fromkeys(items))


def _logit_bias(value: Mapping[int, float] | None) -> dict[int, float] | None:
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise SamplingParamsError(f"logit_bias must map token ids to numbers, got {value!r}")
    bias: dict[int, float] = {}
    for key, number in value.items():
        if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) <= 10:
            key = int(key)  # JSON objects have string keys
        _integer("logit_bias key", key, 0, 2**31 - 1)
        _number(f"logit_bias[{key}]", number, -100.0, 100.0)
        bias[key] = float(number)
    return bias or None
