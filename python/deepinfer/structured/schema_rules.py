"""What of a JSON schema is held to: xgrammar reads more keywords than it enforces, and of some says nothing.

Owns: the walk over a schema, its limits, and one sentence for each keyword that an answer may break. Never touches: other forms.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deepinfer.errors import GrammarError

MOST_ENUM = 2000
MOST_PROPERTIES = 500
MOST_SCHEMAS = 20_000
MOST_EXPRESSION = 4 << 10

# Read and not obeyed (found by giving it documents that break them).
_IGNORED = (
    "not",
    "if",
    "then",
    "else",
    "uniqueItems",
    "contains",
    "minContains",
    "maxContains",
    "dependentRequired",
    "dependentSchemas",
    "dependencies",
    "nullable",
    "$dynamicRef",
    "$recursiveRef",
)
_CALM = {"uniqueItems": (False,), "minContains": (0,), "nullable": (False,), "not": (False,)}  # values that ask for nothing
# A keyword of a type does nothing in a schema that does not name the type.
_OF_TYPE = {
    "minLength": ("string",),
    "maxLength": ("string",),
    "pattern": ("string",),
    "format": ("string",),
    "minimum": ("integer", "number"),
    "maximum": ("integer", "number"),
    "exclusiveMinimum": ("integer", "number"),
    "exclusiveMaximum": ("integer", "number"),
    "multipleOf": ("integer", "number"),
    "items": ("array",),
    "prefixItems": ("array",),
    "minItems": ("array",),
    "maxItems": ("array",),
    "unevaluatedItems": ("array",),
    "required": ("object",),
    "minProperties": ("object",),
    "maxProperties": ("object",),
    "propertyNames": ("object",),
}
_MEAN_OBJECT = ("properties", "patternProperties", "additionalProperties", "unevaluatedProperties")
_FORMATS = frozenset(
    (
        *("date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid"),
        *("uri", "uri-reference", "uri-template", "json-pointer", "relative-json-pointer"),
    )
)
_ANNOTATIONS = frozenset(
    (
        *("title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly", "discriminator", "strict"),
        *("$schema", "$id", "$comment", "$defs", "definitions"),
    )
)
# Beside one of these every other keyword is passed over.
_WHOLE = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")
_NEEDLESS = {"const": ("type",), "enum": ("type",), "$ref": (), "anyOf": (), "oneOf": (), "allOf": ()}
# Where schemas are, below a schema.
_ONE = (
    "items",
    "additionalProperties",
    "unevaluatedItems",
    "unevaluatedProperties",
    "propertyNames",
    "contains",
    "not",
    "if",
    "then",
    "else",
)
_SEVERAL = ("anyOf", "oneOf", "allOf", "prefixItems")
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")


def look_at_schema(schema: Mapping[str, Any] | bool) -> list[str]:
    """What an answer may break although the schema says it, one sentence each and each once.

    Raises:
        GrammarError: a limit is exceeded, or a ``$ref`` leads out of the schema.
    """
    reports: dict[str, None] = {}
    pending: list[tuple[Any, str]] = [(schema, "")]
    schemas = enums = 0
    while pending:
        part, path = pending.pop()
        if not isinstance(part, dict):
            continue  # true, false, or malformed: the compiler says so
        schemas += 1
        if schemas > MOST_SCHEMAS:
            raise GrammarError(f"the JSON schema has more than {MOST_SCHEMAS} schemas in it; make it smaller")
        enums += len(part["enum"]) if isinstance(part.get("enum"), list) else 0
        if enums > MOST_ENUM:
            raise GrammarError(f"the JSON schema has more than {MOST_ENUM} values in its enums; name fewer, or use a pattern")
        reports.update(dict.fromkeys(f"{_where(path)}{said}" for said in _broken(part)))
        pending += _below(part, path)
    return list(reports)


def _where(path: str) -> str:
    return f"at {path[:80]} " if path else ""


def _below(part: dict[str, Any], path: str) -> list[tuple[Any, str]]:
    found = [(part[name], f"{path}/{name}") for name in _ONE if name in part]
    for name in _SEVERAL:
        if isinstance(part.get(name), list):
            found += [(inner, f"{path}/{name}/{i}") for i, inner in enumerate(part[name])]
    for name in _NAMED:
        if isinstance(part.get(name), dict):
            if name.endswith("roperties") and len(part[name]) > MOST_PROPERTIES:
                raise GrammarError(f"{_where(path)}the JSON schema has {len(part[name])} {name}, above {MOST_PROPERTIES}; name fewer")
            found += [(inner, f"{path}/{name}/{key}") for key, inner in part[name].items()]
    return found[::-1]


def _broken(part: dict[str, Any]) -> list[str]:
    said = [f"{name} is not held to" for name in _IGNORED if name in part and part[name] not in _CALM.get(name, ())]
    said += _references(part)
    said += _types(part)
    if "anyOf" not in part and "$ref" not in part and isinstance(part.get("allOf"), list) and len(part["allOf"]) > 1:
        said.append("allOf with several parts is not held to")
    whole = next((name for name in _WHOLE if name in part), None)
    if whole is not None:
        lost = [n for n in part if n != whole and n not in _ANNOTATIONS and n not in _IGNORED and n not in _NEEDLESS[whole]]
        if lost:
            said.append(f"{', '.join(lost)} beside {whole} is not held to")
    form = part.get("format")
    if isinstance(form, str) and form not in _FORMATS:
        said.append(f"format {form[:40]!r} is not held to")
    for source, name in ((part.get("pattern"), "pattern"), *((p, "patternProperties") for p in part.get("patternProperties") or ())):
        if isinstance(source, str):
            said += check_expression(source, name)
    return said


def _references(part: dict[str, Any]) -> list[str]:
    target = part.get("$ref")
    if isinstance(target, str) and target != "#" and not target.startswith("#/"):
        raise GrammarError(f"$ref {target[:80]!r} leads out of the schema; only '#' and '#/...' are followed: put its target into $defs")
    return []


def _types(part: dict[str, Any]) -> list[str]:
    if any(name in part for name in _WHOLE):
        return []
    named = part.get("type")
    types = [named] if isinstance(named, str) else named if isinstance(named, list) else []
    if not types and any(name in part for name in _MEAN_OBJECT):
        types = ["object"]
    said = [
        f"{name} is only held to beside type: {of[-1]}" for name, of in _OF_TYPE.items() if name in part and not any(t in types for t in of)
    ]
    required, known = part.get("required"), part.get("properties")
    if isinstance(required, list) and "object" in types:
        missing = [str(r) for r in required if not isinstance(known, dict) or r not in known]
        if missing:
            said.append(f"required {', '.join(missing)[:80]} is not among the properties, and not held to")
    if "propertyNames" in part and known:
        said.append("propertyNames beside properties is not held to")
    if "pattern" in part and ("minLength" in part or "maxLength" in part):
        said.append("minLength and maxLength beside pattern are not held to")
    return said


def check_expression(text: str, what: str) -> list[str]:
    """Checks a regular expression's size; says what of it is not held to.

    Raises:
        GrammarError: it is too large, or not valid Unicode.
    """
    try:
        size = len(text.encode())
    except UnicodeEncodeError as e:
        raise GrammarError(f"{what} is not valid Unicode at character {e.start}: a lone surrogate; remove it") from None
    if size > MOST_EXPRESSION:
        raise GrammarError(f"{what} has {size} bytes, above {MOST_EXPRESSION}; make it smaller, or use a grammar")
    return [f"lookahead in {what} is not held to"] if _has_lookahead(text) else []


def _has_lookahead(text: str) -> bool:
    """Whether ``(?=`` stands outside of escapes and character classes."""
    at, in_class = 0, False
    while at < len(text):
        c = text[at]
        if c == "\\":
            at += 1
        elif in_class:
            in_class = c != "]"
        elif c == "[":
            in_class = True
        elif text.startswith("(?=", at):
            return True
        at += 1
    return False
