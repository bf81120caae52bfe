"""Matchers over compiled grammars: what they allow, where they stand, and which tokens never stand in an answer."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import grammar_kit
import text_kit
from deepinfer import StructuredOutputs
from deepinfer.engine.tokenizer import Tokenizer
from deepinfer.errors import GrammarError
from deepinfer.structured.matcher import SHELF, Matcher, ReadyGrammar, Shelf
from deepinfer.structured.service import GrammarService
from deepinfer.structured.vocabulary import Vocabulary
from grammar_kit import CONTROL, EOS, SIZE, accepts, matcher


@pytest.fixture(scope="module")
def service() -> Iterator[GrammarService]:
    with grammar_kit.service() as made:
        yield made


def allowed(at: Matcher, size: int = SIZE) -> set[int]:
    row = np.zeros(-(-size // 32), np.int32)
    at.fill_mask(row)
    return set(np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")[:size]).tolist())


def test_each_kind_allows_what_it_says(service: GrammarService) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "array", "items": {"type": "boolean"}}},
        "required": ["a"],
    }
    strange = ['say "hi"\\', "line\nbreak\t\0", "é 😀", "root ::= x", "]-[^"]
    tag = {
        "type": "structural_tag",
        "format": {"type": "tag", "begin": "<n>", "content": {"type": "regex", "pattern": "[0-9]+"}, "end": "</n>"},
    }
    cases: list[tuple[dict[str, Any], list[Any], list[Any]]] = [
        (
            {"json": schema},
            [{"a": 1}, {"a": 1, "b": [True]}, '{ "a"\n:  1}'],
            [{"b": []}, {"a": "1"}, {"a": 1, "c": 2}, {"b": [], "a": 1}, "1"],
        ),
        ({"json": schema, "any_whitespace": False}, ['{"a": 1}'], ['{"a":1}', '{"a":  1}']),
        ({"json": schema, "max_whitespace": 2}, ['{"a":  1}'], ['{"a":   1}']),
        ({"json": schema, "any_order": True}, [{"b": [], "a": 1}], [{"a": "1"}]),
        ({"json": {"type": "object", "additionalProperties": True}}, [{"z": 1}], []),
        ({"json": "true"}, [1, [], "null"], ["x"]),
        ({"json_object": True}, [{}, {"a": [1, {"b": None}], "é": "x"}], [[], "1", '{"a"}']),
        ({"regex": "[a-c]{2}(x|yz)?"}, ["ab", "abx", "ccyz"], ["a", "abz", "abxx"]),
        ({"grammar": 'root ::= "a" item*\nitem ::= "," [0-9]'}, ["a", "a,1,2"], ["", "a,", "a1"]),
        ({"choice": strange}, strange, ["say", *(s + "x" for s in strange), *(s[:-1] for s in strange)]),
        ({"structural_tag": tag}, ["<n>12</n>"], ["12", "<n></n>"]),
    ]
    for values, good, bad in cases:
        prepared = service.compile(StructuredOutputs(**values))
        assert [t for t in good if not accepts(prepared, t)] == [], values
        assert [t for t in bad if accepts(prepared, t)] == [], values


def test_strings_of_bounded_length_are_json(service: GrammarService) -> None:
    """The compiler itself would let control characters in. It takes no escapes there."""
    short = {"type": "string", "minLength": 1, "maxLength": 3}
    schemas: list[tuple[Any, str]] = [
        (short, '"{}"'),
        ({"type": "object", "properties": {"a": {"anyOf": [{"type": "null"}, short]}}, "required": ["a"]}, '{{"a": "{}"}}'),
        ({"type": "object", "propertyNames": short, "additionalProperties": {"type": "integer"}}, '{{"{}": 1}}'),
    ]
    good = ["a", "é😀", "a/b", "\x7f"]
    bad = ["", "abcd", "\x1b", "\t", "\n", '"', "\\", r"\n", r"\""]
    for schema, around in schemas:
        tag = {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": schema}}
        for form in (StructuredOutputs(json=schema), StructuredOutputs(structural_tag=tag)):
            prepared = service.compile(form)
            for text in good:
                assert accepts(prepared, around.format(text)) and json.loads(around.format(text)), (schema, text)
            assert [text for text in bad if accepts(prepared, around.format(text))] == [], schema


def test_what_is_reported_is_indeed_not_held_to(service: GrammarService) -> None:
    """Each keyword with a document that breaks it: when one of them is held to some day, its report is to go."""
    cases: list[tuple[Any, Any]] = [
        ({"not": {"type": "integer"}}, 1),
        ({"type": "array", "items": {}, "uniqueItems": True}, [1, 1]),
        ({"type": "array", "items": {}, "contains": {"type": "integer"}}, ["a"]),
        ({"type": "object", "properties": {"a": {}}, "dependentRequired": {"a": ["b"]}}, {"a": 1}),
        ({"type": "string", "format": "iri"}, "no iri\u0000"),
        ({"type": "object", "required": ["z"]}, {}),
        ({"minimum": 3}, 1),
        ({"$defs": {"x": {"type": "integer"}}, "$ref": "#/$defs/x", "minimum": 5}, 1),
        ({"type": "object", "properties": {"a": {}}, "required": ["a"], "anyOf": [{"type": "object"}]}, {}),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, 1),
        ({"type": "number", "multipleOf": 0.5}, 0.3),
    ]
    for schema, document in cases:
        prepared = service.compile(StructuredOutputs(json=schema))
        assert prepared.reports and accepts(prepared, json.dumps(document)), schema
        with pytest.raises(GrammarError, match="strict"):
            service.compile(StructuredOutputs(json=schema, strict=True))


def test_position_rollback_and_end(service: GrammarService) -> None:
    at = matcher(service.compile(StructuredOutputs(regex="ab?")))
    assert (at.position, at.complete, allowed(at)) == (0, False, {ord("a")})
    assert not at.accept(ord("b")) and at.position == 0
    assert at.accept(ord("a")) and at.complete and allowed(at) == {ord("b"), EOS}
    assert at.accept(ord("b")) and allowed(at) == {EOS}
    assert at.accept(EOS) and at.position == 3 and at.complete and allowed(at) == set()
    assert not at.accept(EOS) and at.position == 3, "nothing follows the end"
    at.rollback(0)
    at.rollback(2)
    assert at.position == 1 and allowed(at) == {ord("b"), EOS}
    for count in (2, -1):
        with pytest.raises(ValueError, match="cannot be taken back"):
            at.rollback(count)
    assert not any(at.accept(token) for token in (-1, SIZE, SIZE + 5, *CONTROL, 299))
    assert at.position == 1 and at.accept(EOS)


def test_matchers_of_one_grammar_are_apart_and_it_pickles(service: GrammarService) -> None:
    prepared = service.compile(StructuredOutputs(regex="[ab]+"))
    SHELF.learn(grammar_kit.vocabulary())
    again = pickle.loads(pickle.dumps(prepared.grammar))
    one, two = again(), prepared.grammar()
    assert one.accept(ord("a")) and (one.position, two.position) == (1, 0)


def test_a_process_without_the_vocabulary_says_so(service: GrammarService) -> None:
    grammar = service.compile(StructuredOutputs(regex="a")).grammar
    shelf = Shelf()
    with pytest.raises(GrammarError, match="does not know the vocabulary"):
        shelf.matcher(grammar)
    shelf.learn(grammar_kit.vocabulary())
    assert shelf.matcher(grammar).accept(ord("a"))
    for data in (b"{}", b"\xff", grammar.data[: len(grammar.data) // 2]):
        with pytest.raises(GrammarError, match="cannot be read"):
            shelf.warm(ReadyGrammar("other", grammar.vocabulary, data))


def test_columns_without_a_token_are_never_allowed(service: GrammarService) -> None:
    """Where everything may come: all bytes, the end, and nothing else."""
    at = matcher(service.compile(StructuredOutputs(structural_tag={"type": "structural_tag", "format": {"type": "any_text"}})))
    assert allowed(at) <= {*range(256), EOS}
    assert {ord("a"), EOS} <= allowed(at)


@pytest.mark.parametrize("make", [text_kit.byte_level, text_kit.byte_fallback], ids=["byte-level", "byte-fallback"])
def test_control_tokens_never_stand_inside_a_string(make: Any) -> None:
    tokenizer: Tokenizer = make()
    eos = tokenizer.special_id("eos_token")
    assert eos is not None
    size = tokenizer.vocab_size + 37
    made = Vocabulary.of(tokenizer.token_bytes, tokenizer.vocab_size, size, tokenizer.control_tokens.values(), [eos])
    service = GrammarService(lambda: made, 1, 20.0, 0)
    try:
        grammar = service.compile(StructuredOutputs(json={"type": "string"})).grammar
    finally:
        service.close()
    SHELF.learn(made)
    control = set(tokenizer.control_tokens.values())
    at, quote = grammar(), tokenizer.encode_plain('"')[-1]
    for token in (quote, *tokenizer.encode_plain("the quick <think> fox é 안녕 ")):
        assert not allowed(at, size) & control
        assert at.accept(token)
    inside = allowed(at, size)
    assert inside and not inside & control and max(inside) < tokenizer.vocab_size
    assert not any(at.accept(token) for token in control)
    assert at.accept(quote) and eos in allowed(at, size) and allowed(at, size) & control == {eos}
