"""DeepSeek's tool calls as structural tags.

Owns: the tags of V4's and V4.1's calls. Never touches: prompts, parsing (the `recipe` package's).

xgrammar knows these calls too (``get_model_structural_tag("deepseek_v4_1", ...)``; a test holds both to the same texts), but as text: a
model could spell their mark, which whoever reads the answer would take for text. Here the mark is its token, which leaves arguments free
to contain anything else. Every part of a call begins or ends with the mark, so that what may be text and what not is never in doubt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from deepinfer.server.conversation import Tool, ToolChoice

Format = dict[str, Any]
_TEXT: Format = {"type": "regex", "pattern": "(.|\\n)*"}
_SCHEMA_NAMES = ("$defs", "definitions")


class DsmlFormats:
    """The tags of one version.

    Args:
        version: of the calls.
        mark: the token ``｜DSML｜``.
    """

    def __init__(self, version: Literal["v4", "v4_1"], mark: int) -> None:
        self._gap = " " if version == "v4_1" else ""
        self._calls = "calls" if version == "v4_1" else "tool_calls"
        self._mark: Format = {"type": "token", "token": mark}

    def answer(self, tools: Sequence[Tool], choice: ToolChoice) -> Format:
        """Tool calls, and free text before them where they are not required. Arguments are held to a tool's schema if it is strict or a
        call is required."""
        forced = choice.mode == "required"
        invokes = [self._invoke(t, held=forced or t.strict) for t in tools if choice.name in (None, t.name)]
        one: Format = invokes[0] if len(invokes) == 1 else {"type": "or", "elements": invokes}
        inner = one if not choice.parallel or choice.name is not None else {"type": "plus", "content": one}
        block = self._between(f"{self._calls}>\n", [inner], f"{self._calls}>")
        if forced:
            return _sequence([_const("\n\n"), block])
        return _sequence([_TEXT, {"type": "optional", "content": block}])

    def _between(self, begin: str, parts: Sequence[Format], end: str) -> Format:
        """``<MARK begin`` parts ``</MARK end``."""
        return _sequence([_const("<"), self._mark, _const(self._gap + begin), *parts, _const("</"), self._mark, _const(self._gap + end)])

    def _invoke(self, tool: Tool, *, held: bool) -> Format:
        parameters = self._parameters(tool.parameters) if held and tool.parameters else [self._anything()]
        return self._between(f'invoke name="{tool.name}">\n', parameters, "invoke>\n")

    def _anything(self) -> Format:
        """Any parameters."""
        begin = {"type": "regex", "pattern": f'{self._gap}parameter name="[^"<>]+" string="(true|false)">'}
        one = _sequence([_const("<"), self._mark, begin, _TEXT, _const("</"), self._mark, _const(f"{self._gap}parameter>\n")])
        return {"type": "star", "content": one}

    def _parameters(self, schema: Mapping[str, Any]) -> list[Format]:
        """Those of an object's schema, in its order; others only if it says so."""
        properties = schema.get("properties") or {}
        required = schema.get("required") or ()
        shared = {name: schema[name] for name in _SCHEMA_NAMES if name in schema}
        made = []
        for name, part in properties.items() if isinstance(properties, Mapping) else ():
            one = self._parameter(name, part, shared)
            made.append(one if name in required else {"type": "optional", "content": one})
        if schema.get("additionalProperties") not in (None, False):
            made.append(self._anything())
        return made

    def _parameter(self, name: str, schema: Any, shared: Mapping[str, Any]) -> Format:
        """One parameter: a string as it is, everything else as JSON; either where the schema allows for both."""
        said: Mapping[str, Any] = schema if isinstance(schema, Mapping) else {}
        kinds = [said["type"]] if isinstance(said.get("type"), str) else said.get("type")
        options = [said["const"]] if "const" in said else said.get("enum")
        forms = []
        if (kinds is None or "string" in kinds) and (options is None or any(isinstance(o, str) for o in options)):
            forms.append(self._value(name, "true", _string(said, options)))
        if (kinds is None or any(k != "string" for k in kinds)) and (options is None or not all(isinstance(o, str) for o in options)):
            others = {} if kinds is None or len(kinds) == 1 else {"type": [k for k in kinds if k != "string"]}
            forms.append(self._value(name, "false", {"type": "json_schema", "json_schema": {**said, **shared, **others} or True}))
        return forms[0] if len(forms) == 1 else {"type": "or", "elements": forms}

    def _value(self, name: str, string: str, value: Format) -> Format:
        return self._between(f'parameter name="{name}" string="{string}">', [value], "parameter>\n")


def _string(schema: Mapping[str, Any], options: Sequence[Any] | None) -> Format:
    """What a string may be, as far as its schema says more than that."""
    if options is not None:
        return {"type": "or", "elements": [_const(o) for o in options if isinstance(o, str)]}
    return {"type": "regex", "pattern": schema["pattern"]} if isinstance(schema.get("pattern"), str) else _TEXT


def _const(text: str) -> Format:
    return {"type": "const_string", "value": text}


def _sequence(parts: Sequence[Format]) -> Format:
    return {"type": "sequence", "elements": list(parts)}
