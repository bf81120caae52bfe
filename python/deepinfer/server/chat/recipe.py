"""DeepSeek V4 and V4.1, through DeepSeek's own prompt format and answer parser (package ``deepseek-recipe``).

Owns: the way from a conversation to that package's records and from its events to pieces. Never touches: how prompts are laid out or marks
are read (the package's), sampling (it overrides what clients ask for, and we do not), HTTP.

The package is asked for as little as it decides alone: prompt, ids that no text of a client can forge, and what the tokens of an answer
mean. What it refuses or passes over (several answers, the role developer, null contents, penalties, biases, a required call while
reasoning) is served by us, around it.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NoReturn

from deepinfer.engine.content_parts import DataUrl
from deepinfer.engine.input_processor import PromptDict
from deepinfer.engine.stop_strings import StopStrings
from deepinfer.engine.tokenizer import Tokenizer
from deepinfer.errors import ConfigError
from deepinfer.sampling import SamplingParams
from deepinfer.server import fresh
from deepinfer.server.chat.answer import Answer, AnswerRules
from deepinfer.server.chat.bits import Mark
from deepinfer.server.chat.constraints import BREAKS, form_format, reasoning_format
from deepinfer.server.chat.dsml import DsmlFormats
from deepinfer.server.chat.template import tool_json
from deepinfer.server.conversation import (
    AnswerParser,
    Content,
    Conversation,
    Piece,
    Reasoning,
    Rendered,
    TokenLogprob,
    ToolCallArguments,
    ToolCallStart,
    ToolChoice,
)
from deepinfer.server.errors import BadRequestError
from deepinfer.structured.screen import screen
from deepinfer.structured_outputs import StructuredOutputs

Version = Literal["v4", "v4_1"]
VERSIONS: Mapping[str, Version] = {"DeepseekV4ForCausalLM": "v4", "DeepseekV41ForCausalLM": "v4_1"}
"""Which architectures are spoken to in this way."""

_MODEL = "model"
_MOST_IMAGE_BYTES = 1 << 28
_NUMBER = 3
"""Bytes of the number that stands for an image: no padding in base64."""
_NEEDED = ("Bos", "Eos", "ThinkingStart", "ThinkingEnd", "User", "Assistant", "Dsml")


def missing_tokens(tokenizer: Tokenizer, version: Version) -> list[str]:
    """Control tokens that the prompt format needs and a vocabulary lacks."""
    import deepseek_recipe as recipe

    names = (*_NEEDED, "System") if version == "v4_1" else _NEEDED
    texts = [getattr(recipe.SpecialToken, name).default_str() for name in names]
    known = set(tokenizer.table.added.values())
    return [t for t in texts if t not in known]


class RecipeBackend:
    """A :class:`~deepinfer.server.conversation.ChatBackend`. Slow to make (about a second): make one and keep it.

    Args:
        tokenizer: of the model.
        version: of the prompt format.
        eos_ids: end an answer.
        takes_images: whether the model does.

    Raises:
        ConfigError: the package is missing, or the vocabulary lacks a control token of the format.
    """

    name = "deepseek"
    reasons = True

    def __init__(self, tokenizer: Tokenizer, version: Version, eos_ids: Sequence[int] = (), *, takes_images: bool = False) -> None:
        try:
            import deepseek_recipe as recipe
        except ImportError:
            raise ConfigError("the DeepSeek chat format needs deepseek-recipe: pip install 'deepinfer[deepseek]'") from None
        missing = missing_tokens(tokenizer, version)
        if missing:
            raise ConfigError(
                f"the tokenizer has no control token {missing[0]}, which the DeepSeek chat format needs; use --chat-backend template"
            )
        self._recipe: Any = recipe
        self._tokenizer, self._eos, self._takes_images = tokenizer, frozenset(eos_ids), takes_images
        self._for_recipe = recipe.Tokenizer.from_str(tokenizer.backend.to_str())
        encoding = recipe.DeepseekV41Encoding() if version == "v4_1" else recipe.DeepseekV4Encoding()
        self._encoding = encoding.with_tokenizer(self._for_recipe)
        model = recipe.ModelVersion.DeepseekV41Flash if version == "v4_1" else recipe.ModelVersion.DeepseekV4Pro
        self._options = recipe.ConversionOptions().with_model_versions_by_name({_MODEL: model})
        added = {text: i for i, text in tokenizer.table.added.items()}
        self._calls = DsmlFormats(version, added[recipe.SpecialToken.Dsml.default_str()])
        self._thought_ids = tuple(added[getattr(recipe.SpecialToken, name).default_str()] for name in ("ThinkingStart", "ThinkingEnd"))

    def render(self, conversation: Conversation, params: SamplingParams) -> Rendered:
        """Prompt, sampling values and parser of a conversation.

        Raises:
            BadRequestError: the prompt format cannot say it.
        """
        c = conversation
        if not c.add_generation_prompt and not c.continue_final_message:
            raise BadRequestError(
                "this model's prompt always ends with the beginning of an answer; leave add_generation_prompt out",
                param="add_generation_prompt",
            )
        messages, files = self._messages(c)
        converted = self._converted(c, messages, params)
        made = converted.conversation
        ids = self._encoding.encode(made)
        prompt: PromptDict = {"prompt_token_ids": ids}
        images = [files[_number(source)] for source in self._encoding.render_conversation(made).image_sources]
        if images:
            prompt["images"] = images
        options = converted.parsing_options
        options.parse_json_output = False  # it would put blanks in place of text
        options.stop_sequences = []
        stage = options.thinking_initial_stage
        inside = stage is not None and stage.starts_in_reasoning()
        rules = AnswerRules(self._tokenizer, params, self._eos, StopStrings(params.stop_strings) if params.stop_strings else None)

        def parser() -> AnswerParser:
            generator = self._recipe.ChatCompletionRequest.chunk_generator(converted, "", _MODEL)
            processor = self._recipe.StreamProcessor(generator, options, self._for_recipe)
            return Answer(rules, RecipeParser(self._recipe, processor, self._thought_ids, inside=inside, parallel=c.tool_choice.parallel))

        return Rendered(prompt, self._constrained(c, rules.engine_params(), inside), parser)

    def _constrained(self, c: Conversation, params: SamplingParams, inside: bool) -> SamplingParams:
        """The sampling values with what tools and form ask of the answer."""
        calls = c.tools if c.tool_choice.mode != "none" else ()
        form = params.form
        if not calls and (form is None or not inside):
            return params
        parts: list[dict[str, Any]] = []
        if calls:
            choice = ToolChoice("required", parallel=c.tool_choice.parallel) if form is not None else c.tool_choice
            parts.append(self._calls.answer(c.tools, choice if c.tool_choice.name is None else c.tool_choice))
        if form is not None and c.tool_choice.mode != "required":
            parts.append(form_format(form))
        answer = parts[0] if len(parts) == 1 else {"type": "or", "elements": parts}
        if inside:
            opening, closing = (Mark(text, i) for text, i in zip(("<think>", "</think>"), self._thought_ids, strict=True))
            first = reasoning_format(opening, closing, inside=True)
            answer = {"type": "sequence", "elements": [first, *([BREAKS] if form is not None else []), answer]}
        tag = {"type": "structural_tag", "format": answer}
        return params.clone(structured_outputs=StructuredOutputs(structural_tag=tag, strict=form is not None and form.strict))

    def _converted(self, c: Conversation, messages: list[dict[str, Any]], params: SamplingParams) -> Any:
        body: dict[str, Any] = {"model": _MODEL, "messages": messages}
        if c.continue_final_message:
            if body["messages"][-1].get("role") != "assistant":
                raise BadRequestError("continue_final_message needs a last message of the assistant", param="messages")
            body["messages"][-1]["prefix"] = True
        thinking = c.thinking
        for name in ("thinking", "enable_thinking"):
            if isinstance(c.template_kwargs.get(name), bool):
                thinking = c.template_kwargs[name]
        if thinking is not None:
            body["thinking"] = {"type": "enabled" if thinking else "disabled"}
        if c.effort is not None and thinking is not False:
            body["reasoning_effort"] = c.effort
        if c.tools and c.tool_choice.mode != "none":
            body["tools"] = [tool_json(t) for t in c.tools]  # strict ones are held to by grammar, with every schema that it can hold to
        if params.logprobs is not None:
            body["logprobs"] = True
        form = params.form
        if form is not None and form.kind == "json":  # the prompt shows the schema, as the model was trained
            schema = json.loads(screen(form).source)
            if isinstance(schema, dict):
                body["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
        try:
            return self._recipe.ChatCompletionRequest(json.dumps(body)).convert(self._options)
        except self._recipe.ConversionError as e:
            _refuse(e)
        except ValueError as e:
            raise BadRequestError(f"the conversation cannot be put into this model's prompt: {e}", param="messages") from None

    def _messages(self, c: Conversation) -> tuple[list[dict[str, Any]], list[bytes]]:
        """The messages as the package takes them, and their image files: it is shown a number in place of each, since it knows fewer
        kinds of files and spellings of a URL than are served here."""
        messages = [_message(m) for m in c.messages]
        files: list[bytes] = []
        for place, message in enumerate(messages):
            if not isinstance(message.get("content"), list | tuple):
                continue
            parts = message["content"] = list(message["content"])
            for at, part in enumerate(parts):
                if part.get("type") != "image_url":
                    continue
                where, url = f"messages[{place}].content[{at}]", str(part.get("image_url", {}).get("url"))
                if not self._takes_images:
                    raise BadRequestError("this model takes no images; leave image parts out of the messages", param="messages")
                if url[:5].lower() != "data:":
                    raise BadRequestError("an image must be a data: URL; nothing is fetched", param=where)
                stand_in = base64.b64encode(len(files).to_bytes(_NUMBER, "big")).decode()
                files.append(DataUrl(where, url).decoded(_MOST_IMAGE_BYTES))
                parts[at] = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{stand_in}"}}
        return messages, files


def _refuse(error: Any) -> NoReturn:
    """The package's own words to the client."""
    try:
        message = json.loads(error.body)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = str(error)
    raise BadRequestError(message, param="messages") from None


def _number(source: Any) -> int:
    """Which of the images an image source of the package stands for."""
    return int.from_bytes(base64.b64decode(source.data_url.partition(",")[2]), "big")


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as the package takes it: no role developer, no null contents, images as data URLs only."""
    made = {
        k: v for k, v in message.items() if k in ("role", "content", "reasoning_content", "tool_calls", "tool_call_id") and v is not None
    }
    if made.get("role") == "developer":
        made["role"] = "system"
    if made.get("role") == "assistant":
        made.setdefault("content", "")
    if made.get("role") == "tool":
        made.setdefault("tool_call_id", "")
    return made


class RecipeParser:
    """A :class:`~deepinfer.server.chat.answer.TokenParser`.

    Args:
        recipe: the package.
        processor: of this answer.
        thought_ids: tokens that open and close reasoning.
        inside: the prompt ends within reasoning.
        parallel: whether more than one call may come.
        new_id: makes ids of calls.
    """

    def __init__(
        self,
        recipe: Any,
        processor: Any,
        thought_ids: Sequence[int],
        *,
        inside: bool,
        parallel: bool = True,
        new_id: Callable[[], str] = lambda: fresh.new_id("call_"),
    ) -> None:
        self._recipe, self._processor, self._new_id = recipe, processor, new_id
        self._open, self._close = thought_ids
        self._parallel = parallel
        self._calls = 0
        self._fed = 0
        self._logprobs: dict[int, TokenLogprob] = {}
        self.reasoning = inside
        self.ended = False
        self._pieces(processor.push(recipe.InferenceChunk.ready()))

    def feed(self, token_id: int, logprob: TokenLogprob | None) -> list[Piece]:
        """Pieces that became certain with one more token."""
        if self.ended:
            return []
        if token_id in (self._open, self._close):
            self.reasoning = token_id == self._open and self.reasoning
        told: list[tuple[float, list[Any]]] | None = None
        if logprob is not None:
            # The package says for each piece which log-probabilities belong to it. It is given their numbers, to find ours by.
            self._logprobs[self._fed] = logprob
            told = [(float(self._fed), [])]
            self._fed += 1
        return self._pieces(self._processor.push(self._recipe.InferenceChunk.tokens([token_id], told)))

    def flush(self) -> list[Piece]:
        """The rest, at the end of the answer."""
        if self._processor.finished:
            return []
        return self._pieces(self._processor.push(self._recipe.InferenceChunk.finish(self._recipe.InferenceFinishReason.Stop)))

    def _pieces(self, events: Sequence[Any]) -> list[Piece]:
        pieces: list[Piece] = []
        for event in events:
            for choice in json.loads(event.to_json())["choices"]:
                delta, logprobs = choice["delta"], choice.get("logprobs") or {}
                if delta.get("reasoning_content"):
                    pieces.append(Reasoning(delta["reasoning_content"], self._found(logprobs.get("reasoning_content"))))
                if delta.get("content"):
                    pieces.append(Content(delta["content"], self._found(logprobs.get("content"))))
                for call in delta.get("tool_calls") or ():
                    pieces += self._call(call)
        return pieces

    def _call(self, call: Mapping[str, Any]) -> list[Piece]:
        pieces: list[Piece] = []
        index, function = call["index"], call["function"]
        if self.ended or (index and not self._parallel):
            self.ended = True
            return []
        if function.get("name"):
            pieces.append(ToolCallStart(index, self._new_id(), function["name"]))
        if function.get("arguments"):
            pieces.append(ToolCallArguments(index, function["arguments"]))
        return pieces

    def _found(self, entries: Sequence[Mapping[str, Any]] | None) -> tuple[TokenLogprob, ...]:
        found = (self._logprobs.pop(round(e["logprob"]), None) for e in entries or ())
        return tuple(f for f in found if f is not None)
