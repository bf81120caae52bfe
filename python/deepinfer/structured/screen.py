"""The cheap look at what a request asks for, before any process compiles it.

Owns: limits on sizes, one canonical source for each form, and which keywords of a schema will not be held to. Never touches: xgrammar.

Nothing here recurses over what a client sent. What passes may still be too much to compile: the limits of the compiling process decide.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deepinfer.errors import GrammarError
from deepinfer.structured.schema_rules import check_expression, look_at_schema
from deepinfer.structured_outputs import StructuredOutputs

MOST_BYTES = 256 << 10
"""Of a schema, a structural tag, or all choices together."""
MOST_DEPTH = 64
MOST_EBNF = 32 << 10
MOST_RULES = 2000
MOST_CHOICES = 2000
MOST_TAGS = 500
_RULE = re.compile(r"^[ \t]*[A-Za-z_][\w.-]*[ \t]*(?:\(.*?\))?[ \t\r\n]*::=", re.MULTILINE)


@dataclass(frozen=True)
class Job:
    """What is to be compiled.

    Attributes:
        kind: ``json_schema``, ``regex``, ``grammar`` or ``structural_tag``.
        source: its text; two requests for the same have the same text.
        options: of the compiler.
        strict: whether what the compiler itself says it will ignore is an error.
        reports: what will not be held to.
    """

    kind: str
    source: str
    options: tuple[tuple[str, Any], ...] = ()
    strict: bool = False
    reports: tuple[str, ...] = ()


def screen(wanted: StructuredOutputs) -> Job:
    """Checks what is asked for; gives what is to be compiled.

    Raises:
        GrammarError: it is malformed in a way seen at once, too large, or strict and with keywords that would not be held to.
    """
    match wanted.kind:
        case "json":
            return _of_schema(wanted)
        case "json_object":
            return Job("json_schema", '{"type":"object","additionalProperties":true}', _options(wanted))
        case "regex":
            assert wanted.regex is not None
            return Job(
                "regex", wanted.regex, (), wanted.strict, _strictly(wanted, check_expression(wanted.regex, "the regular expression"))
            )
        case "grammar":
            assert wanted.grammar is not None
            _check_ebnf(wanted.grammar)
            return Job("grammar", wanted.grammar, (), wanted.strict)
        case "choice":
            return Job("grammar", _choices_as_ebnf(wanted.choices))
        case _:
            return _of_structural_tag(wanted)


def _options(wanted: StructuredOutputs) -> tuple[tuple[str, Any], ...]:
    return (
        ("any_order", wanted.any_order),
        ("any_whitespace", wanted.any_whitespace),
        ("max_whitespace_cnt", wanted.max_whitespace),
    )


def _strictly(wanted: StructuredOutputs, reports: Sequence[str]) -> tuple[str, ...]:
    if wanted.strict and reports:
        raise GrammarError(f"strict was asked for, and {reports[0]}; change that, or leave strict out")
    return tuple(reports)


def _of_schema(wanted: StructuredOutputs) -> Job:
    schema, text = _read(wanted.json, "the JSON schema")
    if not isinstance(schema, dict | bool):
        raise GrammarError(f"a JSON schema is an object, got {_kind_of(schema)}")
    if schema is False:
        raise GrammarError("the JSON schema false allows no answer; give another one")
    return Job("json_schema", text, _options(wanted), wanted.strict, _strictly(wanted, look_at_schema(schema)))


def _of_structural_tag(wanted: StructuredOutputs) -> Job:
    tag, text = _read(wanted.structural_tag, "the structural tag")
    if not isinstance(tag, dict) or tag.get("type") != "structural_tag" or not isinstance(tag.get("format"), dict):
        raise GrammarError('a structural tag is {"type": "structural_tag", "format": {...}}')
    reports: list[str] = []
    pending: list[Any] = [tag["format"]]
    seen = 0
    while pending:
        part = pending.pop()
        if isinstance(part, list):
            pending += part
            continue
        if not isinstance(part, dict):
            continue
        seen += 1
        if seen > MOST_TAGS * 4:
            raise GrammarError(f"the structural tag has more than {MOST_TAGS * 4} parts; name fewer tags")
        if isinstance(part.get("tags"), list) and len(part["tags"]) > MOST_TAGS:
            raise GrammarError(f"the structural tag has {len(part['tags'])} tags, above {MOST_TAGS}; name fewer")
        match part.get("type"):
            case "json_schema" | "qwen_xml_parameter" if isinstance(part.get("json_schema"), dict | bool):
                if part["json_schema"] is not False:
                    reports += look_at_schema(part["json_schema"])
            case "regex" if isinstance(part.get("pattern"), str):
                reports += check_expression(part["pattern"], "a regular expression of the structural tag")
            case "grammar" if isinstance(part.get("grammar"), str):
                _check_ebnf(part["grammar"])
            case _:
                pending += [value for name, value in part.items() if name != "json_schema"]
    return Job("structural_tag", text, (), wanted.strict, _strictly(wanted, list(dict.fromkeys(reports))))


# JSON


def _read(value: Any, what: str) -> tuple[Any, str]:
    """A value and its canonical text: as given, or parsed from a text."""
    if isinstance(value, str):
        _check_size(value, what)
        _check_depth_of_text(value, what)
        try:
            value = json.loads(value, parse_constant=_refuse_constant)
        except ValueError as e:
            raise GrammarError(f"{what} is no JSON: {e}") from None
        except RecursionError:
            raise GrammarError(f"{what} is nested too deeply; at most {MOST_DEPTH} levels are read") from None
    checked = _plain(value, what)
    text = json.dumps(checked, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    _check_size(text, what)
    return checked, text


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")


def _check_size(text: str, what: str) -> None:
    try:
        size = len(text.encode())
    except UnicodeEncodeError as e:
        raise GrammarError(f"{what} is not valid Unicode at character {e.start}: a lone surrogate; remove it") from None
    if size > MOST_BYTES:
        raise GrammarError(f"{what} has {size} bytes, above {MOST_BYTES}; make it smaller")


def _check_depth_of_text(text: str, what: str) -> None:
    """Counts brackets outside of strings; the parser itself recurses."""
    depth = 0
    for part in re.finditer(r'"(?:[^"\\]|\\.)*"|[\[{]|[\]}]', text, re.DOTALL):
        mark = part[0]
        if mark in "[{":
            depth += 1
            if depth > MOST_DEPTH:
                raise GrammarError(f"{what} is nested more than {MOST_DEPTH} levels deep; flatten it, or move parts to $defs")
        elif mark in "]}":
            depth -= 1


def _plain(value: Any, what: str) -> Any:
    """A copy of nothing but dicts, lists, texts, numbers, booleans and null; raises GrammarError where that cannot be."""
    top: list[Any] = [None]
    pending: list[tuple[Any, Any, Any, int]] = [(value, top, 0, 1)]  # what, where to, under which key, at which level
    left = MOST_BYTES  # every item takes at least a byte of text; cycles end here
    while pending:
        item, holder, key, level = pending.pop()
        left -= 1
        if left < 0:
            raise GrammarError(f"{what} has more than {MOST_BYTES} bytes; make it smaller")
        if isinstance(item, Mapping | list | tuple):
            if level > MOST_DEPTH:
                raise GrammarError(f"{what} is nested more than {MOST_DEPTH} levels deep; flatten it, or move parts to $defs")
            made: Any = dict.fromkeys(item) if isinstance(item, Mapping) else [None] * len(item)
            pairs: Iterator[tuple[Any, Any]] = iter(item.items()) if isinstance(item, Mapping) else enumerate(item)
            for name, inner in pairs:
                if isinstance(made, dict) and not isinstance(name, str):
                    raise GrammarError(f"{what} has a key that is no text: {name!r}")
                pending.append((inner, made, name, level + 1))
            holder[key] = made
        elif item is None or isinstance(item, str | bool):
            holder[key] = item
        elif isinstance(item, int):
            if not -(2**63) <= item < 2**63:
                raise GrammarError(f"{what} has an integer that does not fit 64 bits; use a smaller one")
            holder[key] = int(item)
        elif isinstance(item, float) and math.isfinite(item):
            holder[key] = float(item)
        else:
            raise GrammarError(f"{what} has a value that JSON cannot say: {type(item).__name__}")
    return top[0]


def _kind_of(value: Any) -> str:
    return {list: "an array", str: "a text", type(None): "null"}.get(type(value), "a number")


# Grammars


def _check_ebnf(text: str) -> None:
    try:
        size = len(text.encode())
    except UnicodeEncodeError as e:
        raise GrammarError(f"the grammar is not valid Unicode at character {e.start}: a lone surrogate; remove it") from None
    if not text.strip():
        raise GrammarError("the grammar is empty; it needs a rule root ::= ...")
    if "\0" in text:
        raise GrammarError("the grammar has a NUL character; write it as \\x00")
    if size > MOST_EBNF:
        raise GrammarError(f"the grammar has {size} bytes, above {MOST_EBNF}; make it smaller")
    rules = len(_RULE.findall(text))
    if rules > MOST_RULES:
        raise GrammarError(f"the grammar has {rules} rules, above {MOST_RULES}; make it smaller")


def _choices_as_ebnf(choices: Sequence[str]) -> str:
    if len(choices) > MOST_CHOICES:
        raise GrammarError(f"choice has {len(choices)} texts, above {MOST_CHOICES}; name fewer")
    _check_size("".join(choices), "choice")
    return "root ::= " + " | ".join(f'"{"".join(map(_ebnf_character, text))}"' for text in choices)


def _ebnf_character(c: str) -> str:
    return c if c.isascii() and c.isprintable() and c not in '"\\' else f"\\U{ord(c):08x}"
