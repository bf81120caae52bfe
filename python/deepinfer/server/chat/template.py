"""Any model with a chat template: how a conversation becomes its prompt, and what its answers mean.

Owns: what a template is given, tools for templates that know none, which marks a model uses, whether the prompt ends within reasoning.
Never touches: rendering and encoding (`deepinfer.engine.chat_template`), parsing (`answer`), JSON of a protocol.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from deepinfer.engine.chat_template import ChatTemplate
from deepinfer.engine.detokenizer import Detokenizer
from deepinfer.engine.input_processor import PromptDict
from deepinfer.engine.stop_strings import StopStrings
from deepinfer.engine.tokenizer import Tokenizer
from deepinfer.sampling import SamplingParams
from deepinfer.server import fresh
from deepinfer.server.chat import tool_calls
from deepinfer.server.chat.answer import Answer, AnswerRules, MarkedParser
from deepinfer.server.chat.bits import Mark
from deepinfer.server.chat.constraints import constrained, reasoning_format
from deepinfer.server.chat.reasoning import ReasoningParser
from deepinfer.server.chat.tool_calls import ToolCallParser
from deepinfer.server.conversation import AnswerParser, Conversation, Rendered, Tool
from deepinfer.server.embedded import read_object
from deepinfer.server.errors import BadRequestError

_THOUGHTS = (("<think>", "</think>"), ("<seed:think>", "</seed:think>"), ("[THINK]", "[/THINK]"))
_SWITCHES = ("enable_thinking", "thinking")
_RESERVED = ("self", "messages", "tools", "add_generation_prompt", "continue_final_message")
_ANY_SCHEMA: dict[str, Any] = {"type": "object", "properties": {}}


def tool_json(tool: Tool) -> dict[str, Any]:
    """A tool as templates are given it: the form of chat completions."""
    return {
        "type": "function",
        "function": {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters) or _ANY_SCHEMA},
    }


def tools_as_text(tools: Iterable[Tool]) -> str:
    """What a system message says of tools where the template does not."""
    listed = "\n".join(json.dumps(tool_json(t)["function"], ensure_ascii=False) for t in tools)
    return (
        "You can call functions. Each line of <tools> describes one of them: its name, what it does, and its parameters as a JSON schema.\n"
        f"<tools>\n{listed}\n</tools>\n"
        "To call one, write\n"
        '<tool_call>\n{"name": "the name", "arguments": {"parameter": "value"}}\n</tool_call>\n'
        "and nothing after the last call. What a call gave comes back in <tool_response>."
    )


class TemplateBackend:
    """A :class:`~deepinfer.server.conversation.ChatBackend`.

    Args:
        tokenizer, template: of the model.
        chat_prompt: as of :class:`~deepinfer.engine.async_engine.AsyncLLM`.
        eos_ids: end an answer.
    """

    name = "template"

    def __init__(
        self, tokenizer: Tokenizer, template: ChatTemplate, chat_prompt: Callable[..., PromptDict], eos_ids: Sequence[int] = ()
    ) -> None:
        self._tokenizer, self._template, self._chat_prompt, self._eos = tokenizer, template, chat_prompt, frozenset(eos_ids)
        self._thoughts = self._thought_marks()
        self._calls = self._mark(tool_calls.OPENING), self._mark(tool_calls.CLOSING)

    def _mark(self, text: str) -> Mark:
        return Mark(text, self._tokenizer.control_tokens.get(text))

    def _thought_marks(self) -> tuple[Mark, Mark] | None:
        """The marks around reasoning: those that are tokens, else those that the template knows."""
        known = [(self._mark(a), self._mark(b)) for a, b in _THOUGHTS]
        as_tokens = [(a, b) for a, b in known if a.id is not None and b.id is not None]
        spelled = [(Mark(a.text), Mark(b.text)) for a, b in known if a.text in self._template.source and b.text in self._template.source]
        return next(iter((*as_tokens, *spelled)), None)

    @property
    def reasons(self) -> bool:
        """Whether answers may have reasoning in them."""
        return self._thoughts is not None

    def render(self, conversation: Conversation, params: SamplingParams) -> Rendered:
        """Prompt, sampling values and parser of a conversation.

        Raises:
            InvalidRequestError: the template refuses it, or it has images that the model does not take.
        """
        c = conversation
        calls = bool(c.tools) and c.tool_choice.mode != "none"
        messages, shown = self._messages(c, calls)
        prompt = self._chat_prompt(
            messages,
            add_generation_prompt=c.add_generation_prompt and not c.continue_final_message,
            continue_final_message=c.continue_final_message,
            tools=shown,
            **self._variables(c),
        )
        inside = self._ends_within_reasoning(c, prompt)
        rules = AnswerRules(self._tokenizer, params, self._eos, StopStrings(params.stop_strings) if params.stop_strings else None)
        opening, closing = self._calls

        def parser() -> AnswerParser:
            thoughts = tools = None
            if self._thoughts is not None:
                ending = (opening,) if calls and opening.id is not None else ()
                thoughts = ReasoningParser(*self._thoughts, inside=inside, ending=ending)
            if calls:
                tools = ToolCallParser(opening, closing, lambda: fresh.new_id("call_"), parallel=c.tool_choice.parallel)
            used = [*(self._thoughts or ()), *(self._calls if calls else ())]
            detokenizer = Detokenizer(
                self._tokenizer.table,
                skip_special_tokens=params.skip_special_tokens,
                spaces_between_special_tokens=params.spaces_between_special_tokens,
                prompt_ids=prompt["prompt_token_ids"],
            )
            marks = {m.id: m for m in used if m.id is not None}
            return Answer(rules, MarkedParser(detokenizer, marks, thoughts, tools))

        first = None
        if self._thoughts is not None and (inside or c.thinking is not False) and not (c.continue_final_message and not inside):
            first = reasoning_format(*self._thoughts, inside=inside)
        engine = constrained(rules.engine_params(), c.tools if calls else (), c.tool_choice, self._calls, first)
        return Rendered(prompt, engine, parser)

    def _messages(self, c: Conversation, calls: bool) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
        """The messages as the template takes them, and the tools that it is given itself."""
        knows_tools = "tools" in self._template.variables
        messages = [{**m, "role": "system"} if m.get("role") == "developer" else dict(m) for m in c.messages]
        for message in messages:
            if message.get("tool_calls"):
                message["tool_calls"] = [_with_read_arguments(call) for call in message["tool_calls"]]
        if knows_tools:
            return messages, [tool_json(t) for t in c.tools] if calls else None
        messages = [_as_plain(m) for m in messages]
        if calls:
            text = tools_as_text(c.tools)
            if messages and messages[0].get("role") == "system":
                messages[0]["content"] = _appended(messages[0].get("content"), text)
            else:
                messages.insert(0, {"role": "system", "content": text})
        return messages, None

    def _variables(self, c: Conversation) -> dict[str, Any]:
        values: dict[str, Any] = {}
        known = self._template.variables
        if c.thinking is not None:
            values |= {name: c.thinking for name in _SWITCHES if name in known}
        if c.effort is not None and "reasoning_effort" in known:
            values["reasoning_effort"] = c.effort
        for name in _RESERVED:
            if name in c.template_kwargs:
                raise BadRequestError(f"chat_template_kwargs must not have {name}; it is a field of its own", param="chat_template_kwargs")
        if not isinstance(c.template_kwargs.get("documents", []), list | None):
            raise BadRequestError("chat_template_kwargs.documents must be a list", param="chat_template_kwargs")
        return {**values, **c.template_kwargs}

    def _ends_within_reasoning(self, c: Conversation, prompt: PromptDict) -> bool:
        if self._thoughts is None:
            return False
        opening, closing = self._thoughts
        if c.continue_final_message:
            content = c.messages[-1].get("content")
            if not isinstance(content, str) or opening.text in self._tokenizer.special_token_texts:
                return False
            return content.rfind(opening.text) > content.rfind(closing.text)
        if not c.add_generation_prompt:
            return False
        if opening.id is not None:
            for token in reversed(prompt["prompt_token_ids"]):
                if token == opening.id:
                    return True
                if self._tokenizer.token_bytes(token).strip():
                    return False
            return False
        if not prompt["prompt"].rstrip().endswith(opening.text):
            return False
        # What it ends with may be the last message instead: look what the template writes behind another one.
        other = self._chat_prompt([{"role": "user", "content": "x"}], add_generation_prompt=True, **self._variables(c))
        return other["prompt"].rstrip().endswith(opening.text)


def _with_read_arguments(call: Mapping[str, Any]) -> dict[str, Any]:
    """A call whose arguments are an object, as templates expect them; what is no JSON object stays text."""
    function = dict(call.get("function") or {})
    arguments = function.get("arguments")
    if isinstance(arguments, str) and (read := read_object(arguments)) is not None:
        function["arguments"] = read
    return {**call, "function": function}


def _as_plain(message: dict[str, Any]) -> dict[str, Any]:
    """A message of or about tools for a template that knows only system, user and assistant."""
    if message.get("role") == "tool":
        content = message.get("content")
        text = content if isinstance(content, str) else "\n".join(p.get("text", "") for p in content or () if isinstance(p, Mapping))
        return {"role": "user", "content": f"<tool_response>\n{text}\n</tool_response>"}
    if not message.get("tool_calls"):
        return message
    functions = [{k: c["function"].get(k) for k in ("name", "arguments")} for c in message["tool_calls"]]
    calls = [f"{tool_calls.OPENING}\n{json.dumps(f, ensure_ascii=False)}\n{tool_calls.CLOSING}" for f in functions]
    rest = {k: v for k, v in message.items() if k not in ("tool_calls", "content")}
    return {**rest, "content": _appended(message.get("content"), "\n".join(calls), between="\n")}


def _appended(content: Any, text: str, between: str = "\n\n") -> Any:
    """More text at the end of a message's content, which may be in parts."""
    if not content:
        return text
    if isinstance(content, str):
        return content + between + text
    return [*content, {"type": "text", "text": text}]
