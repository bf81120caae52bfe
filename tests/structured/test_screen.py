"""The cheap look at structured outputs: what is refused before anything is compiled, and what is reported."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

import grammar_kit
from deepinfer import StructuredOutputs
from deepinfer.errors import GrammarError, SamplingParamsError
from deepinfer.structured.screen import screen


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({}, "exactly one of .* got none"),
        ({"regex": "a", "json": {}}, "got json, regex"),
        ({"regex": 5}, "regex must be a text"),
        ({"json": 5}, "json must be a JSON schema"),
        ({"json": False}, "allows no answer"),
        ({"choice": []}, "at least one"),
        ({"choice": "ab"}, "list of texts"),
        ({"choice": ["a", ""]}, "not empty"),
        ({"structural_tag": 3}, "structural_tag must be"),
        ({"json_object": True, "strict": 1}, "strict must be"),
        ({"json_object": True, "max_whitespace": 0}, "max_whitespace must be"),
        ({"json_object": True, "colour": "red"}, "no colour"),
    ],
)
def test_values_of_wrong_types_are_refused_where_they_are_written(values: dict[str, Any], said: str) -> None:
    with pytest.raises(SamplingParamsError, match=said):
        StructuredOutputs.of(values)


def test_a_class_with_a_schema_is_that_schema() -> None:
    class Person:
        @staticmethod
        def model_json_schema() -> dict[str, Any]:
            return {"type": "object"}

    assert StructuredOutputs(json=Person).json == {"type": "object"}  # type: ignore[arg-type]


def test_one_schema_has_one_source_however_it_comes() -> None:
    schema = {"type": "object", "properties": {"b": {"const": "é"}, "a": {"type": "integer"}}}
    jobs = {screen(StructuredOutputs(json=form)) for form in (schema, json.dumps(schema, indent=3), json.dumps(schema, ensure_ascii=False))}
    assert len(jobs) == 1
    other = {"type": "object", "properties": dict(reversed(schema["properties"].items()))}  # type: ignore[attr-defined]
    assert screen(StructuredOutputs(json=other)) not in jobs, "the order of properties is the order in the answer"


def _cycle() -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object"}
    schema["properties"] = {"a": schema}
    return schema


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"json": grammar_kit.nested("[", "", "]", 100_000)}, "more than 64 levels"),
        ({"json": '{"a": "' + "[" * 100 + '"'}, "is no JSON"),
        ({"json": _cycle()}, "64 levels"),
        ({"json": {"const": "x" * 300_000}}, "bytes, above 262144"),
        ({"json": {"enum": list(range(2001))}}, "2000 values in its enums"),
        ({"json": {"properties": {f"p{i}": {} for i in range(501)}}}, "501 properties, above 500"),
        ({"json": {"$defs": {"a": {"properties": {f"p{i}": {} for i in range(501)}}}}}, "/.defs/a"),
        ({"json": {"pattern": "a" * 5000}}, "pattern has 5000 bytes"),
        ({"json": {"$ref": "http://example.com"}}, "leads out"),
        ({"json": {"$ref": "#anchor"}}, "leads out"),
        ({"json": {"minimum": float("nan")}}, "JSON cannot say"),
        ({"json": '{"minimum": NaN}'}, "no JSON number"),
        ({"json": {"minimum": 2**70}}, "64 bits"),
        ({"json": {1: 2}}, "key that is no text"),
        ({"json": {"a": {1, 2}}}, "JSON cannot say: set"),
        ({"json": {"const": "\ud800"}}, "lone surrogate"),
        ({"json": "[]"}, "is an object"),
        ({"json": "false"}, "allows no answer"),
        ({"regex": "a" * 5000}, "5000 bytes, above 4096"),
        ({"regex": "\ud800"}, "lone surrogate"),
        ({"grammar": "  "}, "is empty"),
        ({"grammar": 'root ::= "a"' + " " * 40_000}, "above 32768"),
        ({"grammar": 'root ::= "a"\n' + "\n".join(f'a{i}::="b"' for i in range(2200))}, "2201 rules, above 2000"),
        ({"grammar": "\ud800"}, "lone surrogate"),
        ({"choice": [str(i) for i in range(2001)]}, "2001 texts"),
        ({"choice": ["x" * 300_000]}, "above 262144"),
        ({"structural_tag": {}}, "a structural tag is"),
        ({"structural_tag": {"type": "structural_tag", "format": {"type": "x", "tags": [{}] * 501}}}, "501 tags"),
        (
            {"structural_tag": {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": {"$ref": "file:///x"}}}},
            "leads out",
        ),
        ({"structural_tag": {"type": "structural_tag", "format": {"type": "regex", "pattern": "a" * 5000}}}, "5000 bytes"),
    ],
)
def test_absurd_ones_are_refused_at_once(values: dict[str, Any], said: str) -> None:
    start = time.thread_time()
    with pytest.raises(GrammarError, match=said):
        screen(StructuredOutputs(**values))
    assert time.thread_time() - start < 2


REPORTED: list[tuple[dict[str, Any], str]] = [
    ({"not": {"type": "string"}}, "not is not held to"),
    ({"if": {"const": 1}, "then": {"const": 1}}, "if is not held to"),
    ({"type": "array", "items": {}, "uniqueItems": True}, "uniqueItems"),
    ({"type": "array", "items": {}, "contains": {"const": 1}}, "contains"),
    ({"type": "object", "dependentRequired": {"a": ["b"]}}, "dependentRequired"),
    ({"allOf": [{"type": "integer"}, {"minimum": 3}]}, "allOf with several parts"),
    ({"type": "object", "properties": {"a": {}}, "required": ["a"], "anyOf": [{"required": ["a"]}]}, "properties, required beside anyOf"),
    ({"$defs": {"x": {"type": "integer"}}, "$ref": "#/$defs/x", "minimum": 5}, "minimum beside [$]ref"),
    ({"type": "object", "required": ["z"]}, "required z is not among"),
    ({"minimum": 3}, "minimum is only held to beside type: number"),
    ({"items": {"type": "integer"}}, "items is only held to beside type: array"),
    ({"type": "string", "format": "iri"}, "format 'iri'"),
    ({"type": "string", "nullable": True}, "nullable"),
    ({"type": "string", "pattern": "^(?=a)b$"}, "lookahead in pattern"),
    ({"type": "string", "pattern": "^a+$", "maxLength": 2}, "beside pattern"),
    ({"type": "object", "properties": {"a": {"type": "object", "properties": {"b": {"not": {}}}}}}, "at /properties/a/properties/b not is"),
]


@pytest.mark.parametrize(("schema", "said"), REPORTED, ids=lambda v: v if isinstance(v, str) else "")
def test_what_is_not_held_to_is_reported_or_refused(schema: dict[str, Any], said: str) -> None:
    reports = screen(StructuredOutputs(json=schema)).reports
    assert any(__import__("re").search(said, r) for r in reports), reports
    with pytest.raises(GrammarError, match="strict was asked for, and .*" + said):
        screen(StructuredOutputs(json=schema, strict=True))


def test_what_is_held_to_is_not_reported() -> None:
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Order",
        "type": "object",
        "description": "not, if and uniqueItems are words here",
        "$defs": {"line": {"type": "object", "properties": {"sku": {"type": "string", "pattern": "^[(?=)]+$"}, "n": {"type": "integer"}}}},
        "properties": {
            "not": {"type": "string", "minLength": 1, "format": "date-time"},
            "kind": {"type": "string", "enum": ["a", "b"]},
            "lines": {"type": "array", "items": {"$ref": "#/$defs/line"}, "minItems": 1, "uniqueItems": False},
            "who": {"anyOf": [{"type": "null"}, {"type": "string"}], "title": "Who", "default": None},
            "price": {"type": "number", "minimum": 0, "exclusiveMaximum": 10},
        },
        "required": ["not", "lines"],
        "additionalProperties": False,
    }
    job = screen(StructuredOutputs(json=schema, strict=True))
    assert job.reports == () and json.loads(job.source) == schema
