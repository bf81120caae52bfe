"""What the text of an answer has to be: a JSON document, a match of a regular expression, a sentence of a grammar, one of some choices.

Owns: `StructuredOutputs` and checks of types. Never touches: schemas' meaning (`deepinfer.structured.screen`), compilation. A leaf: any
layer may import it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from deepinfer.errors import SamplingParamsError

KINDS = ("json", "json_object", "regex", "grammar", "choice", "structural_tag")


@dataclass(frozen=True, slots=True)
class StructuredOutputs:
    """The form of an answer; exactly one of the first six is given. Tokens that would leave the form are never drawn.

    Args:
        json: a JSON schema as a mapping, as text, or as a class with ``model_json_schema()`` (a pydantic model).
        json_object: any JSON object.
        regex: the whole answer matches it.
        grammar: EBNF in the style of llama.cpp, beginning at the rule ``root``.
        choice: the answer is one of these texts.
        structural_tag: free text with tagged parts in it, each of a form of its own, as a mapping or JSON text (xgrammar's format);
            `deepinfer.structured.tool_tag` makes one for tool calls.
        strict: refuse a schema with keywords that would not be held to; otherwise they are only reported.
        any_order: properties of an object may come in any order. Which of them are there, and that none comes twice, is then not held to.
        any_whitespace: allow blanks and line breaks between JSON tokens; else ``", "`` and ``": "`` and nothing more.
        max_whitespace: most of them at one place; ``None`` = no limit.

    Objects of a schema have no properties but those it names, unless it says so itself (``additionalProperties``). Strings with
    ``minLength`` or ``maxLength`` have no quotes, backslashes or line breaks in them.
    """

    json: Mapping[str, Any] | str | bool | None = None
    json_object: bool = False
    regex: str | None = None
    grammar: str | None = None
    choice: Iterable[str] | None = None
    structural_tag: Mapping[str, Any] | str | None = None
    strict: bool = False
    any_order: bool = False
    any_whitespace: bool = True
    max_whitespace: int | None = None

    def __post_init__(self) -> None:
        put = object.__setattr__
        if callable(make := getattr(self.json, "model_json_schema", None)):
            put(self, "json", make())
        if self.json is not None and not isinstance(self.json, Mapping | str | bool):
            raise SamplingParamsError(f"json must be a JSON schema as a mapping or as text, got {type(self.json).__name__}")
        for name in ("regex", "grammar"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise SamplingParamsError(f"{name} must be a text, got {type(value).__name__}")
        if self.structural_tag is not None and not isinstance(self.structural_tag, Mapping | str):
            raise SamplingParamsError(f"structural_tag must be a mapping or JSON text, got {type(self.structural_tag).__name__}")
        if self.choice is not None:
            put(self, "choice", _choices(self.choice))
        for name in ("json_object", "strict", "any_order", "any_whitespace"):
            if not isinstance(getattr(self, name), bool):
                raise SamplingParamsError(f"{name} must be True or False, got {getattr(self, name)!r}")
        most = self.max_whitespace
        if most is not None and (not isinstance(most, int) or isinstance(most, bool) or not 1 <= most <= 1000):
            raise SamplingParamsError(f"max_whitespace must be an integer between 1 and 1000, got {most!r}; leave it out for no limit")
        given = [name for name in KINDS if getattr(self, name) is not None and getattr(self, name) is not False]
        if self.json is False:
            raise SamplingParamsError("the JSON schema false allows no answer; give another one")
        if len(given) != 1:
            raise SamplingParamsError(f"structured outputs need exactly one of {', '.join(KINDS)}, got {', '.join(given) or 'none'}")

    @property
    def kind(self) -> str:
        """Which of the forms is given."""
        return next(name for name in KINDS if getattr(self, name) is not None and getattr(self, name) is not False)

    @property
    def choices(self) -> tuple[str, ...]:
        """``choice`` as the tuple it is stored as."""
        return self.choice  # type: ignore[return-value]

    @classmethod
    def of(cls, value: StructuredOutputs | Mapping[str, Any] | None) -> StructuredOutputs | None:
        """From its fields as a mapping, as requests in JSON have them.

        Raises:
            SamplingParamsError: another type, or an unknown field.
        """
        if value is None or isinstance(value, StructuredOutputs):
            return value
        if not isinstance(value, Mapping):
            raise SamplingParamsError(
                f"structured_outputs must be StructuredOutputs or a mapping of its fields, got {type(value).__name__}"
            )
        known = {f.name for f in fields(cls)}
        unknown = sorted(str(name) for name in value if name not in known)
        if unknown:
            raise SamplingParamsError(f"structured_outputs has no {', '.join(unknown)}; known are {', '.join(f.name for f in fields(cls))}")
        flags = {f.name for f in fields(cls) if isinstance(f.default, bool)}
        return cls(**{name: v for name, v in value.items() if v is not None or name not in flags})


def _choices(value: Iterable[str]) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise SamplingParamsError(f"choice must be a list of texts, got {value!r}")
    items = tuple(value)
    for item in items:
        if not isinstance(item, str) or not item:
            raise SamplingParamsError(f"choice must hold texts that are not empty, got {item!r}")
    if not items:
        raise SamplingParamsError("choice must name at least one text")
    return tuple(dict.fromkeys(items))
