"""Tool calls in the form that ChatML-style models are trained on: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``.

Owns: the marks around a call, and reading its JSON as it comes. Never touches: reasoning, tokens, whether a tool exists.

Arguments are given out as they are written, once the name is known; a call that is cut gives what came. A call that has no name to its
end was none: its text is part of the answer.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Literal

from deepinfer.server.chat.bits import Bit, Held, Mark, open_end
from deepinfer.server.conversation import Content, ToolCallArguments, ToolCallStart

OPENING, CLOSING = "<tool_call>", "</tool_call>"
_ARGUMENTS = ("arguments", "parameters")
_Part = Content | ToolCallStart | ToolCallArguments


class CallReader:
    """Reads one call's JSON object, a few characters at a time.

    Args:
        index: of the call within its answer.
        new_id: makes ids of calls.
    """

    def __init__(self, index: int, new_id: Callable[[], str]) -> None:
        self._index, self._new_id = index, new_id
        self._state: Literal["object", "key", "in_key", "colon", "value", "in_value", "done"] = "object"
        self._raw = ""  # of the key or value being read
        self._key = ""
        self._depth = 0
        self._in_string = self._escaped = False
        self.named = False
        self._waiting = ""  # arguments that came before the name
        self._any_arguments = False
        self.text = ""  # all of it, until the name is known

    @property
    def done(self) -> bool:
        """The object is closed."""
        return self._state == "done"

    @property
    def between(self) -> bool:
        """Outside of every string, where a mark can only be a mark."""
        return not self._in_string and self._state != "in_key"

    def feed(self, character: str) -> Iterable[_Part]:
        """Parts that one more character completes."""
        if not self.named:
            self.text += character
        return getattr(self, f"_in_{self._state}")(character) or ()

    def close(self) -> list[_Part]:
        """The end, complete or not."""
        if not self.named:
            return [Content(self.text)] if self.text.strip() else []
        rest: list[_Part] = []
        if self._state == "in_value" and self._key in _ARGUMENTS and self._raw[:1] == '"':
            rest += self._arguments(_unquoted(self._raw))  # cut within arguments that were written as a string
        if self.done and not self._any_arguments:
            rest += self._arguments("{}")
        return rest

    def _in_object(self, c: str) -> None:
        if c == "{":
            self._state = "key"

    def _in_key(self, c: str) -> None:
        if c == '"':
            self._state, self._raw = "in_key", c
        elif c == "}":
            self._state = "done"

    def _in_in_key(self, c: str) -> None:
        self._raw += c
        if self._string_ends(c):
            self._key, self._state = _unquoted(self._raw), "colon"

    def _in_colon(self, c: str) -> None:
        if c == ":":
            self._state, self._raw, self._depth = "value", "", 0

    def _in_value(self, c: str) -> Iterable[_Part]:
        if c.isspace():
            return ()
        self._state = "in_value"
        return self._in_in_value(c)

    def _in_in_value(self, c: str) -> Iterable[_Part]:
        nested = self._raw[:1] in ("{", "[") if self._raw else c in "{["
        string = self._raw[:1] == '"' if self._raw else c == '"'
        if not nested and not string and (c in ",}" or c.isspace()):
            parts = self._value_ends()
            self._state = "done" if c == "}" else "key"
            return parts
        self._raw += c
        if string:
            if len(self._raw) == 1:
                self._in_string = True
            elif self._string_ends(c):
                return self._value_ends()
            return ()
        streamed = self._arguments(c) if nested and self._key in _ARGUMENTS else ()
        if nested and self._closes(c):
            self._state = "key"
        return streamed

    def _closes(self, c: str) -> bool:
        """Whether a character ends an object or list."""
        if self._in_string:
            self._string_ends(c)
        elif c == '"':
            self._in_string = True
        elif c in "{[":
            self._depth += 1
        elif c in "}]":
            self._depth -= 1
            return self._depth == 0
        return False

    def _string_ends(self, c: str) -> bool:
        if self._escaped:
            self._escaped = False
        elif c == "\\":
            self._escaped = True
        elif c == '"':
            self._in_string = False
            return True
        return False

    def _value_ends(self) -> list[_Part]:
        self._state = "key"
        string = self._raw[:1] == '"'
        if self._key == "name" and string and not self.named:
            self.named, self.text = True, ""
            waiting, self._waiting = self._waiting, ""
            start: list[_Part] = [ToolCallStart(self._index, self._new_id(), _unquoted(self._raw))]
            return start + ([ToolCallArguments(self._index, waiting)] if waiting else [])
        if self._key in _ARGUMENTS:
            return self._arguments(_unquoted(self._raw) if string else "{}" if self._raw == "null" else self._raw)
        return []

    def _arguments(self, text: str) -> list[_Part]:
        self._any_arguments = self._any_arguments or bool(text)
        if not text or not self.named:
            self._waiting += text
            return []
        return [ToolCallArguments(self._index, text)]


def _unquoted(raw: str) -> str:
    """What a JSON string stands for; of one that is cut or wrong, what can be read."""
    for cut in range(len(raw), max(len(raw) - 7, 0), -1):
        body = raw[:cut] if cut == len(raw) and raw.endswith('"') and len(raw) > 1 else raw[:cut] + '"'
        try:
            made = json.loads(body, strict=False)
        except (ValueError, RecursionError):
            continue
        if isinstance(made, str):
            return made.encode("utf-8", "replace").decode()
    return raw.strip('"')


class ToolCallParser:
    """Takes tool calls out of one answer.

    Args:
        opening, closing: the marks.
        new_id: makes ids of calls.
        parallel: whether more than one call may come; else the answer is over after the first.
    """

    def __init__(self, opening: Mark, closing: Mark, new_id: Callable[[], str], *, parallel: bool = True) -> None:
        self._opening, self._closing, self._new_id, self._parallel = opening, closing, new_id, parallel
        self.calls = 0
        self.ended = False
        self._call: CallReader | None = None
        self._held = Held()
        self._blank = True  # nothing but white space since the start
        self._after_call = False

    def feed(self, item: Bit | Mark) -> list[_Part]:
        """Parts in what is new."""
        if self.ended:
            return []
        found: list[_Part] = []
        if isinstance(item, Mark):
            self._mark(item, found)
            return found
        self._held.add(item)
        while self._held.text and not self.ended and (self._in_call(found) if self._call is not None else self._in_text(found)):
            pass
        if not self._held.text and item.logprobs and not item.text and self._call is None:
            found += _content(self._held.take_all())
        return found

    def flush(self) -> list[_Part]:
        """What was held back, at the end of the answer."""
        found: list[_Part] = []
        if self._call is not None:
            self._end_call(found)
        found += _content(self._held.take_all())
        return found

    def _mark(self, mark: Mark, found: list[_Part]) -> None:
        if self._blank and self._held.text.isspace():
            self._held.take_all()
        if self._call is not None:
            self._end_call(found)
        elif not self.ended:
            found += _content(self._held.take_all())
        if mark == self._opening and not self.ended:
            self._begin_call()

    def _begin_call(self) -> None:
        self._call, self._blank, self._after_call = CallReader(self.calls, self._new_id), False, False

    def _end_call(self, found: list[_Part]) -> None:
        assert self._call is not None
        if self._call.named and not self._call.done and self._held.text and self._call.between:
            self._held.take_all()  # a mark that was not finished
        found += self._call.close()
        if self._call.named:
            self.calls += 1
            self.ended = not self._parallel
        self._call, self._after_call = None, True

    def _in_text(self, found: list[_Part]) -> bool:
        held, mark = self._held, self._opening
        if self._after_call:
            held.drop_leading(None)
            if not held.text:
                return False
            closing = self._closing
            if closing.id is None and closing.text.startswith(held.text) and held.text != closing.text:
                return False
            if closing.id is None and held.text.startswith(closing.text):
                held.take(len(closing.text))
                return True
            self._after_call = False
        if self._blank and held.text.isspace():
            return False
        at = held.text.find(mark.text) if mark.id is None else -1
        if at >= 0:
            before = held.take(at)
            if not (self._blank and not "".join(b.text for b in before).strip()):
                found += _content(before)
            held.take(len(mark.text))
            self._begin_call()
            return True
        keep = open_end(held.text, mark.text) if mark.id is None else 0
        free = len(held.text) - keep
        if self._blank and not held.text[:free].strip():
            return False
        if free:
            self._blank = False
            found += _content(held.take(free))
        return False

    def _in_call(self, found: list[_Part]) -> bool:
        """Reads held text as JSON, up to a mark that is only spelled or to the end of the object."""
        call, held = self._call, self._held
        assert call is not None
        at = 0
        while at < len(held.text) and not call.done:
            if self._closing.id is None and call.between and held.text[at] == "<":
                held.take(at)
                rest = held.text
                if rest.startswith(self._closing.text):
                    held.take(len(self._closing.text))
                    self._end_call(found)
                    return True
                if self._closing.text.startswith(rest):
                    return False
                at = 0
            found += call.feed(held.text[at])
            at += 1
        held.take(at)
        if call.done:
            self._end_call(found)
        return call.done


def _content(bits: Iterable[Bit]) -> list[_Part]:
    return [Content(b.text, b.logprobs) for b in bits]
