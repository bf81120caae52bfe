"""From a list of messages to the text a model was trained on.

Owns: compiling chat templates in a sandbox, checking messages, and knowing which characters of the result came from a
message. Never touches: token ids (`Tokenizer.encode_rendered` uses what is known here), the engine.

How provenance is known: before rendering, the characters that control tokens are made of are replaced by stand-ins (code
points of the supplementary private-use plane that occur nowhere else) in everything a caller wrote. They are put back in
the result, and their places are the places that a caller wrote. A template that looks for such characters in a message
(to cut reasoning out, say) would take another branch, so the result is compared with that of an untouched rendering;
where they differ, fewer characters are replaced: those of special tokens alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from deepinfer.engine.content_parts import read_parts
from deepinfer.engine.tokenizer import Tokenizer
from deepinfer.engine.tokenizer_store import ChatTemplates
from deepinfer.errors import ConfigError, InvalidRequestError

Message = Mapping[str, Any]
_STAND_INS = range(0xF0000, 0xFFFFE)


class _Generation(jinja2.ext.Extension):
    """``{% generation %}`` marks an assistant's words for training; here its body is just rendered."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@dataclass(frozen=True)
class Rendered:
    """A rendered conversation; ``foreign`` as :meth:`Tokenizer.encode_rendered` takes it; ``images``: of its messages, in order."""

    text: str
    foreign: dict[int, bool] = field(default_factory=dict)
    images: list[Any] = field(default_factory=list)


class ChatTemplate:
    """The template(s) of one model.

    Args:
        source: template text, or texts by name ("default", "tool_use").
        tokenizer: gives the names of special tokens that a template may use, and the control tokens.

    Attributes:
        source: all of its text.
        variables: names of values that it reads from outside, such as ``tools`` or ``enable_thinking``.

    Raises:
        ConfigError: a template has a syntax error.
    """

    def __init__(self, source: ChatTemplates, tokenizer: Tokenizer) -> None:
        env = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"], autoescape=False
        )
        env.filters["tojson"] = _tojson
        env.globals["raise_exception"] = _raise
        env.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        sources = {"default": source} if isinstance(source, str) else dict(source)
        self._templates: dict[str, jinja2.Template] = {}
        self.source = "\n".join(sources.values())
        variables: set[str] = set()
        for name, text in sources.items():
            try:
                self._templates[name] = env.from_string(text)
                variables |= jinja2.meta.find_undeclared_variables(env.parse(text))
            except jinja2.TemplateSyntaxError as e:
                raise ConfigError(f"the chat template has a syntax error in line {e.lineno}: {e.message}") from e
        self.variables = frozenset(variables)
        self._special_tokens = dict(tokenizer.special_tokens)
        texts = tokenizer.special_token_texts
        every = _edges(tokenizer.control_tokens)
        special = (_edges(texts) - _edges(set(tokenizer.control_tokens) - texts)) or _edges(texts)
        self._alphabets = [a for a in dict.fromkeys(("".join(sorted(every)), "".join(sorted(special)))) if a]

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> Rendered:
        """Text of a conversation, with the places that its messages wrote.

        Args:
            messages: ``{"role": ..., "content": ...}`` each; content is text or a list of parts (see `content_parts`). A
                message with images is given to the template in parts, images as ``{"type": "image"}``.
            add_generation_prompt: end with the beginning of an assistant's turn.
            continue_final_message: leave the last message open, so that the model goes on with it.
            tools: function schemas, for templates that know them.
            documents: documents to answer from, for templates that know them.
            template_kwargs: further variables for the template.

        Raises:
            InvalidRequestError: the messages are not of this form, or the template refuses them; the message says why.
        """
        checked, images = _check_messages(messages)
        if continue_final_message:
            if add_generation_prompt:
                raise InvalidRequestError("continue_final_message=True needs add_generation_prompt=False: one continues, the other begins")
            if not isinstance(checked[-1].get("content"), str) or not checked[-1]["content"].strip():
                raise InvalidRequestError("continue_final_message=True needs a last message with text to continue")
        values: dict[str, Any] = {
            "messages": checked,
            "tools": list(tools) if tools else None,
            "documents": list(documents) if documents else None,
            **(template_kwargs or {}),
        }
        template = self._templates.get("tool_use") if tools else None
        template = template or self._templates.get("default") or next(iter(self._templates.values()))

        def run(given: dict[str, Any]) -> str:
            text = self._run(template, {**given, "add_generation_prompt": add_generation_prompt})
            return _cut_after(text, given["messages"][-1]["content"]) if continue_final_message else text

        return replace(self._with_provenance(run, values), images=images)

    def _with_provenance(self, run: Callable[[dict[str, Any]], str], values: dict[str, Any]) -> Rendered:
        strings = list(_strings_in(values))
        used = {c for s in strings for c in s}
        made = None
        for alphabet in self._alphabets:
            if used.isdisjoint(alphabet):
                continue
            strict, lenient = _stand_ins(alphabet, used)
            shadowed = {k: _shadow(v, strict, strict if k != "messages" else lenient) for k, v in values.items()}
            try:
                made = _restore(run(shadowed), strict, lenient)
            except InvalidRequestError:
                run(values)  # raises too unless the template objects to the stand-ins alone
                raise
            if made.text == run(values):
                return made
        return made or Rendered(run(values))  # where both differ, what is known to be safe

    def _run(self, template: jinja2.Template, values: dict[str, Any]) -> str:
        try:
            return template.render(**{**self._special_tokens, **values})
        except _RaisedByTemplateError as e:
            raise InvalidRequestError(f"the chat template refuses these messages: {e}") from None
        except jinja2.TemplateError as e:
            raise InvalidRequestError(f"the chat template cannot render these messages: {e}") from e
        except (TypeError, KeyError, IndexError, AttributeError, ValueError, ZeroDivisionError, OverflowError) as e:
            raise InvalidRequestError(f"the chat template cannot render these messages: {type(e).__name__}: {e}") from e


def _check_templates(tokenizer: Tokenizer) -> None:
    """Raises ConfigError unless what a tokenizer's files call its chat template is text, or texts by name."""
    found: object = tokenizer.chat_template
    named = list(found.items()) if isinstance(found, Mapping) else []
    if found and not isinstance(found, str) and not (named and all(isinstance(part, str) for pair in named for part in pair)):
        raise ConfigError(f"the chat template of {tokenizer.name!r} is no text ({type(found).__name__}); pass chat_template=<file or text>")


def load_chat_template(override: str | None, tokenizer: Tokenizer) -> ChatTemplate | None:
    """The template to use: ``override`` (a path or template text) if given, else the model's own; ``None`` if it has none.

    Raises:
        ConfigError: ``override`` is neither an existing file nor template text, or a template has a syntax error or is no text.
    """
    if override is None:
        _check_templates(tokenizer)
        return ChatTemplate(tokenizer.chat_template, tokenizer) if tokenizer.chat_template else None
    if "{" in override or "\n" in override:
        return ChatTemplate(override, tokenizer)
    path = Path(override)
    try:
        return ChatTemplate(path.read_text(encoding="utf-8"), tokenizer)
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"chat_template={override!r} is neither template text (no braces in it) nor a readable file: {e}") from e


NO_TEMPLATE = "this model has no chat template; pass chat_template=<path or Jinja text>, or use generate() with a prompt text"


class _RaisedByTemplateError(jinja2.TemplateError):
    """What ``raise_exception`` in a template raises."""


def _raise(message: str) -> NoReturn:
    raise _RaisedByTemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as model templates expect it: no HTML escapes, readable characters."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _check_messages(messages: Sequence[Message]) -> tuple[list[dict[str, Any]], list[Any]]:
    """Copies of the messages as a template is shown them, and their images."""
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes) or not messages:
        raise InvalidRequestError("messages must be a non-empty list of {'role': ..., 'content': ...}")
    checked: list[dict[str, Any]] = []
    images: list[Any] = []
    for place, message in enumerate(messages):
        where = f"message {place}"
        if not isinstance(message, Mapping):
            raise InvalidRequestError(f"{where} must be a mapping with 'role' and 'content', got {type(message).__name__}")
        if not isinstance(message.get("role"), str) or not message["role"]:
            raise InvalidRequestError(f"{where} needs a 'role' such as 'user', 'assistant' or 'system'")
        content = message.get("content")
        if content is None and message["role"] != "assistant":
            raise InvalidRequestError(f"{where} ({message['role']}) needs 'content'")
        if content is None and not any(message.get(k) for k in ("tool_calls", "reasoning_content")):
            raise InvalidRequestError(f"{where} (assistant) has neither 'content' nor 'tool_calls'")
        if isinstance(content, Sequence) and not isinstance(content, str):
            content, found = read_parts(content, where)
            images += found
        elif content is not None and not isinstance(content, str):
            raise InvalidRequestError(f"the 'content' of {where} must be text or a list of parts, got {type(content).__name__}")
        checked.append({**message, "content": content})
    return checked, images


def _cut_after(text: str, content: str) -> str:
    """The rendered text up to the end of the last message's content."""
    bare = content.strip()
    at = text.rfind(bare)
    if at < 0:
        raise InvalidRequestError("the chat template changes the last message, so it cannot be continued")
    end = at + len(bare)
    tail = content[len(content.rstrip()) :]
    return text[:end] + (tail if text.startswith(tail, end) else "")


def _edges(spellings: Iterable[str]) -> set[str]:
    """Characters without which no control token can be spelled: the outermost ones, and bars."""
    return {c for s in spellings for c in (s[0], s[-1], *(b for b in "|｜" if b in s)) if not c.isalnum() and not c.isspace() and c != "_"}


def _strings_in(value: Any) -> Iterable[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _strings_in(key)
            yield from _strings_in(inner)
    elif isinstance(value, Sequence):
        for inner in value:
            yield from _strings_in(inner)


def _stand_ins(alphabet: str, used: set[str]) -> tuple[dict[int, str], dict[int, str]]:
    """Two translation tables onto code points that nobody used: for a caller's words, and for an assistant's."""
    free = (chr(c) for c in _STAND_INS if chr(c) not in used)
    return {ord(c): next(free) for c in alphabet}, {ord(c): next(free) for c in alphabet}


def _shadow(value: Any, strict: dict[int, str], assistant: dict[int, str]) -> Any:
    if isinstance(value, str):
        return value.translate(strict)
    if isinstance(value, Mapping):
        table = assistant if value.get("role") == "assistant" else strict
        return {_shadow(k, strict, strict): _shadow(v, table, table) for k, v in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return [_shadow(v, strict, assistant) for v in value]
    return value


def _restore(text: str, strict: dict[int, str], lenient: dict[int, str]) -> Rendered:
    back = {s: (chr(c), True) for c, s in strict.items()} | {s: (chr(c), False) for c, s in lenient.items()}
    places = {p: back[c] for p, c in enumerate(text) if c in back}
    restored = text.translate({ord(s): c for s, (c, _) in back.items()})
    return Rendered(restored, {p: flag for p, (_, flag) in places.items()})
