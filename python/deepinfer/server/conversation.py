"""A conversation as every protocol's reader makes it and every protocol back end takes it.

Owns: the records between the two. Never touches: JSON of a protocol, templates, tokens.

Messages are in the form of chat completions, whatever protocol they came by: ``role`` (system, developer, user, assistant, tool),
``content`` (text, or parts as `deepinfer.engine.content_parts` reads them), and of an assistant ``reasoning_content``, ``tool_calls``
(``{"id", "type": "function", "function": {"name", "arguments"}}``, arguments as JSON text), of a tool ``tool_call_id``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from deepinfer.sampling import SamplingParams

if TYPE_CHECKING:
    from deepinfer.engine.input_processor import Prompt
    from deepinfer.outputs import CompletionOutput, PositionLogprobs

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may ask for. ``parameters`` is a JSON schema; ``strict``: arguments must keep to it."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    strict: bool = False


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """``mode``: ``auto``, ``none``, ``required``; with ``name`` exactly that tool. ``parallel``: more than one call."""

    mode: Literal["auto", "none", "required"] = "auto"
    name: str | None = None
    parallel: bool = True


@dataclass(frozen=True, slots=True)
class Conversation:
    """What to answer.

    Attributes:
        thinking: whether the model is to reason before its answer; ``None`` = the model's habit.
        effort: how much, if the client says so.
        continue_final_message: the answer goes on with the last message instead of beginning a turn.
        template_kwargs: further variables of a chat template.
    """

    messages: list[dict[str, Any]]
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = ToolChoice()
    thinking: bool | None = None
    effort: Effort | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One generated token: its id, its text's bytes, and the log-probabilities of its position (the token itself first)."""

    token_id: int
    data: bytes
    position: PositionLogprobs


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A piece of the model's reasoning; ``logprobs`` of the tokens that made it, where they were asked for."""

    text: str
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Content:
    """A piece of the answer."""

    text: str
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """The model asks for a tool; its arguments follow in pieces under the same ``index``."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """A piece of the arguments' JSON text."""

    index: int
    text: str


Piece = Reasoning | Content | ToolCallStart | ToolCallArguments


class AnswerParser(Protocol):
    """Takes one answer apart as it comes. Stop strings are its business, not the engine's: only it knows what is answer, what reasoning."""

    tokens: int
    """Tokens so far, up to the one that ended the answer: what usage counts."""
    reasoning_tokens: int
    """Tokens so far that were reasoning, marks included."""
    called_tools: bool
    """Whether a tool call was among the pieces."""
    finish_reason: str | None
    """Why the answer is over: the engine's reason, or "stop" by the parser's own rules; ``None`` while it goes on."""
    stop_reason: str | int | None
    """The stop string or stop id that ended it."""

    def push(self, output: CompletionOutput) -> list[Piece]:
        """Pieces in what is new of an answer (an output in delta mode, of one answer). The output that has a finish reason
        flushes what was held back. Nothing comes of what is pushed after the end."""

    @property
    def ended(self) -> bool:
        """The answer is over; where the engine goes on with it, it is to be told."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """A conversation ready for the engine; ``parser`` makes the parser of one answer."""

    prompt: Prompt
    params: SamplingParams
    parser: Callable[[], AnswerParser]


class ChatBackend(Protocol):
    """How one family of models is spoken to."""

    name: str

    def render(self, conversation: Conversation, params: SamplingParams) -> Rendered:
        """Prompt, sampling values (with what tools and reasoning need: stop ids, a structural tag) and parser of a conversation.
        May block for milliseconds: called outside of the event loop's thread for long conversations.

        Raises:
            ApiError, InvalidRequestError: the model cannot be asked this; the message says what to change.
        """
