"""OpenAI's ``response_format`` and its extensions as structured outputs.

Owns: the names in the protocol. Never touches: schemas' meaning, requests.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deepinfer.errors import GrammarError
from deepinfer.structured_outputs import StructuredOutputs


def from_response_format(value: Any) -> StructuredOutputs | None:
    """``None`` for plain text.

    Types: ``text``, ``json_object``, ``json_schema`` (``{"json_schema": {"schema", "strict"}}``, or these two beside the type, as the
    responses protocol has them), and beyond the protocol ``regex`` (``pattern`` or ``regex``), ``grammar`` (``grammar``) and
    ``structural_tag`` (``format``).

    Raises:
        GrammarError, SamplingParamsError: it is none of these, or lacks what its type needs.
    """
    if value is None:
        return None
    if not isinstance(value, Mapping) or not isinstance(value.get("type"), str):
        raise GrammarError('response_format must be an object with a type, such as {"type": "json_object"}')
    match value["type"]:
        case "text":
            return None
        case "json_object":
            return StructuredOutputs(json_object=True)
        case "json_schema":
            return _of_schema(value)
        case "regex":
            return StructuredOutputs(regex=_needed(value, "pattern", "regex"))
        case "grammar":
            return StructuredOutputs(grammar=_needed(value, "grammar"))
        case "structural_tag":
            return StructuredOutputs(structural_tag={"type": "structural_tag", "format": _needed(value, "format")})
        case other:
            raise GrammarError(f"response_format of type {other!r} is not known; use text, json_object, json_schema, regex or grammar")


def _of_schema(value: Mapping[str, Any]) -> StructuredOutputs:
    inner = value.get("json_schema", value)
    if not isinstance(inner, Mapping) or inner.get("schema") is None:
        raise GrammarError('response_format of type json_schema needs {"json_schema": {"name": ..., "schema": {...}}}')
    strict = inner.get("strict")
    return StructuredOutputs(json=inner["schema"], strict=False if strict is None else strict)


def _needed(value: Mapping[str, Any], *names: str) -> Any:
    found = next((value[name] for name in names if value.get(name) is not None), None)
    if found is None:
        raise GrammarError(f"response_format of type {value['type']} needs {' or '.join(names)}")
    return found
