"""A vocabulary of bytes, and what clients have sent to make a compiler of grammars fall over."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, TypeVar, cast

import pytest

from deepinfer.structured.matcher import SHELF, Matcher
from deepinfer.structured.service import GrammarService, PreparedGrammar
from deepinfer.structured.vocabulary import Vocabulary

Test = TypeVar("Test", bound=Callable[..., None])
CONTROL, EOS, SIZE = (257, 258), 256, 300
ENDLESS = {"grammar": "root ::= " + '"a"? ' * 3000 + '"a" ' * 3000}
"""Passes the screen, and takes half a minute of processor time."""


@cache
def vocabulary() -> Vocabulary:
    """256 bytes, an end, two control tokens, and columns of logits without a token."""
    return Vocabulary.of(lambda i: bytes([i]) if i < 256 else b"<control>", 259, SIZE, CONTROL, [EOS])


@contextmanager
def service(workers: int = 1, seconds: float = 20.0, cache_bytes: int = 1 << 30, **settings: Any) -> Iterator[GrammarService]:
    """A service over that vocabulary, ended at the end."""
    made = GrammarService(vocabulary, workers, seconds, cache_bytes, **settings)
    try:
        yield made
    finally:
        made.close()


def matcher(prepared: PreparedGrammar) -> Matcher:
    """At the beginning of an answer."""
    SHELF.learn(vocabulary())
    return prepared.grammar()


def accepts(prepared: PreparedGrammar, text: Any) -> bool:
    """Whether a text (other values: their JSON) is a whole answer."""
    at = matcher(prepared)
    data = (text if isinstance(text, str) else json.dumps(text)).encode()
    return all(at.accept(byte) for byte in data) and at.accept(EOS)


def nested(open_: str, middle: str, close: str, count: int) -> str:
    """``middle`` in so many brackets."""
    return open_ * count + middle + close * count


def _objects(count: int, required: bool = False) -> dict[str, Any]:
    names = [f"p{i}" for i in range(count)]
    return {"type": "object", "properties": {name: {"type": "integer"} for name in names}, **({"required": names} if required else {})}


def _refs(count: int) -> dict[str, Any]:
    chain = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(count)}
    return {"$defs": {**chain, f"d{count}": {"type": "integer"}}, "$ref": "#/$defs/d0"}


def _fan(depth: int) -> dict[str, Any]:
    levels = {
        f"d{i}": {"type": "object", "properties": {"a": {"$ref": f"#/$defs/d{i + 1}"}, "b": {"$ref": f"#/$defs/d{i + 1}"}}}
        for i in range(depth)
    }
    return {"$defs": {**levels, f"d{depth}": {"type": "integer"}}, "$ref": "#/$defs/d0"}


def hostile() -> dict[str, tuple[str, str]]:
    """Kind and source by name: large, deep, ambiguous, exponential, malformed, and harmless ones that look like it."""
    j = json.dumps
    schema = {
        "enum of 1,000": j({"enum": [f"v{i}" for i in range(1000)]}),
        "enum of 10,000": j({"enum": [f"v{i}" for i in range(10_000)]}),
        "enum of 100,000": j({"enum": [f"v{i}" for i in range(100_000)]}),
        "200 properties": j(_objects(200)),
        "2,000 properties": j(_objects(2000)),
        "2,000 required properties": j(_objects(2000, True)),
        "anyOf of 500": j({"anyOf": [_objects(2) for _ in range(500)]}),
        "objects nested 60 deep": nested('{"type":"object","properties":{"a":', '{"type":"integer"}', "}}", 30),
        "objects nested 300 deep": nested('{"type":"object","properties":{"a":', '{"type":"integer"}', "}}", 300),
        "objects nested 1,500 deep": nested('{"type":"object","properties":{"a":', '{"type":"integer"}', "}}", 1500),
        "arrays nested 5,000 deep": nested('{"type":"array","items":', '{"type":"integer"}', "}", 5000),
        "arrays nested 100,000 deep": nested('{"type":"array","items":', '{"type":"integer"}', "}", 100_000),
        "anyOf nested 2,000 deep": nested('{"anyOf":[', '{"type":"integer"}', "]}", 2000),
        "allOf nested 2,000 deep": nested('{"allOf":[', '{"type":"integer"}', "]}", 2000),
        "reference to itself": j({"$ref": "#"}),
        "references in a circle": j({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}),
        "a tree by reference": j({"type": "object", "properties": {"l": {"$ref": "#"}, "r": {"$ref": "#"}}}),
        "a chain of 20,000 references": j(_refs(20_000)),
        "2^30 ways by reference": j(_fan(30)),
        "a reference to nothing": j({"$ref": "#/$defs/x"}),
        "a reference elsewhere": j({"$ref": "http://127.0.0.1:9/x.json"}),
        "minLength 1e5": j({"type": "string", "minLength": 100_000}),
        "maxLength 1e9": j({"type": "string", "maxLength": 10**9}),
        "minItems 1e6": j({"type": "array", "items": {"type": "integer"}, "minItems": 10**6}),
        "a const of 5 MB": j({"const": "x" * 5_000_000}),
        "a const nested 4,000 deep": '{"const":' + nested("[", "1", "]", 4000) + "}",
        "pattern never closed": j({"type": "string", "pattern": "(a"}),
        "pattern with lookahead": j({"type": "string", "pattern": "(?=a)b"}),
        "pattern of nested repeats": j({"type": "string", "pattern": "^((a{1,100}){1,100}){1,100}$"}),
        "no JSON": "{",
        "an array": "[]",
        "false": "false",
        "a lone surrogate": '{"const": "\\ud800"}',
        "an integer beyond 64 bits": j({"type": "integer", "minimum": 10**30}),
        "minimum above maximum": j({"type": "integer", "minimum": 5, "maximum": 1}),
        "a type that is none": j({"type": "thing"}),
        "NUL in an enum": j({"enum": ["a\0b"]}),
        "a huge range": j({"type": "integer", "minimum": -(10**18), "maximum": 10**18}),
        "a range of floats": j({"type": "number", "minimum": 0.1, "maximum": 0.30000001}),
        "not": j({"not": {"type": "string"}}),
        "if and then": j({"if": {"type": "string"}, "then": {"minLength": 3}}),
        "uniqueItems": j({"type": "array", "items": {}, "uniqueItems": True}),
        "allOf of two": j({"allOf": [_objects(1, True), _objects(2, True)]}),
        "oneOf of overlapping ones": j({"oneOf": [{"type": "integer"}, {"type": "number"}]}),
        "required and unknown": j({"type": "object", "required": ["a"]}),
        "minProperties above what there is": j({**_objects(1), "additionalProperties": False, "minProperties": 4}),
    }
    regex = {
        "never closed": "(a",
        "a back-reference": "(a)\\1",
        "a property of characters": "\\p{L}+",
        "a negative lookahead": "(?!a)b",
        "nested pluses": "(a+)+b",
        "dots and stars": "(.*a){20}",
        "a{1000000}": "a{1000000}",
        "[a-z]{10000}": "[a-z]{10000}",
        "nested repeats": "((a{1,100}){1,100}){1,100}",
        "optional ones and as many": "a?" * 1000 + "a" * 1000,
        "900 nested groups": nested("(", "a", ")+", 900),
        "far apart": ".{0,5000}x.{0,5000}",
        "20,000 alternatives": "|".join(f"w{i}" for i in range(20_000)),
        "20,000 nested parentheses": nested("(", "a", ")", 20_000),
        "a range turned round": "[z-a]",
        "nothing to repeat": "*a",
        "empty": "",
    }
    grammar = {
        "50,000 nested parentheses": "root ::= " + nested("(", '"a"', ")", 50_000),
        "an undefined rule": "root ::= x",
        "no body": "root ::= ",
        "no root": 'a ::= "b"',
        "left recursion": 'root ::= root "a" | "b"',
        "an empty loop": 'root ::= (""*)* "a"',
        "ambiguous": 'root ::= e\ne ::= e "+" e | e e | "a" | ""',
        "a chain of 20,000 rules": "root ::= r0\n" + "\n".join(f"r{i} ::= r{i + 1}" for i in range(20_000)) + '\nr20000 ::= "a"',
        "a chain of 200,000 rules": "root ::= r0\n" + "\n".join(f"r{i} ::= r{i + 1}" for i in range(200_000)) + '\nr200000 ::= "a"',
        "3,000 optional ones and as many": ENDLESS["grammar"],
        "no grammar": "hello ( world",
        "never closed": 'root ::= "a',
    }
    tag = {
        "unknown format": j({"type": "structural_tag", "format": {"type": "nonsense"}}),
        "no format": j({"type": "structural_tag"}),
        "trigger without tag": j({"type": "structural_tag", "format": {"type": "triggered_tags", "triggers": ["<a>"], "tags": []}}),
    }
    found = {}
    for kind, several in (("json_schema", schema), ("regex", regex), ("grammar", grammar), ("structural_tag", tag)):
        found |= {f"{kind}: {name}": (kind, source) for name, source in several.items()}
    return found


def is_busy() -> bool:
    """Whether more wants to run than there are processors."""
    return os.getloadavg()[0] > (os.cpu_count() or 1)


def despite_load(test: Test) -> Test:
    """Compiling processes have the lowest priority, so that on a machine that is busy with other things they may get too little of it for
    what a test expects of their limits: then the test is made again, twice at most, and skipped if the machine is busy still."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        for left in (2, 1, 0):
            try:
                return test(*args, **kwargs)
            except (AssertionError, pytest.fail.Exception) as e:
                if not is_busy():
                    raise
                if not left:
                    pytest.skip(f"others keep the processors busy: {e}")

    return cast("Test", run)
