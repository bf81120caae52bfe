"""Answers of conversations by script: a vocabulary with and without marks, and what parsers make of ids."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

import text_kit
from deepinfer.engine.request import EngineRequest, TokenLogprobs
from deepinfer.engine.tokenizer import Tokenizer
from deepinfer.outputs import CompletionOutput, FinishReason, Logprob, PositionLogprobs
from deepinfer.server.conversation import AnswerParser, Content, Piece, Reasoning, ToolCallArguments, ToolCallStart
from deepinfer.structured import bindings
from deepinfer.structured.compiler import Compiler
from deepinfer.structured.screen import MOST_CHOICES, MOST_DEPTH, screen
from deepinfer.structured_outputs import StructuredOutputs

MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
_DEEP = '{"items":' * MOST_DEPTH * 50 + "{}" + "}" * MOST_DEPTH * 50
MALFORMED: list[tuple[dict[str, Any], str]] = [
    ({"json": "{"}, "the JSON schema is no JSON"),
    ({"json": "[]"}, "a JSON schema is an object"),
    ({"json": "NaN"}, "the JSON schema is no JSON"),
    ({"json": _DEEP}, "the JSON schema is nested more than"),
    ({"json": '{"const": "\\ud800"}'}, "the JSON schema is not valid Unicode"),
    ({"json": {"minimum": 1 << 70}}, "the JSON schema has an integer that does not fit"),
    ({"json": {"not": {}}, "strict": True}, "strict was asked for"),
    ({"structural_tag": "x"}, "the structural tag is no JSON"),
    ({"structural_tag": "[1]"}, "a structural tag is"),
    ({"structural_tag": "null"}, "a structural tag is"),
    ({"structural_tag": {"type": "structural_tag", "format": "x"}}, "a structural tag is"),
    ({"structural_tag": {"format": {"type": "any_text"}}}, "a structural tag is"),
    ({"grammar": ""}, "the grammar is empty"),
    ({"choice": [str(i) for i in range(MOST_CHOICES + 1)]}, f"choice has {MOST_CHOICES + 1} texts"),
    ({"choice": ["\ud800"]}, "choice is not valid Unicode"),
]
"""Forms that nothing can be held to, and what is said of them, whatever stands beside the answer."""
TEMPLATE = (
    "{%- if tools %}{{ '<|im_start|>system\n' }}{% for t in tools %}{{ t | tojson }}\n{% endfor %}{{ '<|im_end|>\n' }}{% endif %}"
    "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{%- if m.reasoning_content %}{{ '<think>\n' + m.reasoning_content + '\n</think>\n\n' }}{% endif %}{{ m.content or '' }}"
    "{%- for c in m.tool_calls or [] %}{{ '\n<tool_call>\n' }}{{ c.function | tojson }}{{ '\n</tool_call>' }}{% endfor %}"
    "{{- '<|im_end|>\n' }}{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)


@cache
def vocabulary(*, marks: bool = True, template: str = TEMPLATE) -> Tokenizer:
    """Byte-level BPE; with ``marks`` those of reasoning and tool calls are tokens, as models that know them have them."""
    backend = Backend.from_str(text_kit.byte_level(600).backend.to_str())
    if not marks:
        without = text_kit.byte_level(600).backend
        data = json.loads(without.to_str())
        data["added_tokens"] = [t for t in data["added_tokens"] if t["content"] not in MARKS]
        backend = Backend.from_str(json.dumps(data))
    else:
        backend.add_tokens([AddedToken(m, special=False, normalized=False) for m in MARKS])
    return Tokenizer(
        backend, special_tokens={"eos_token": "<|im_end|>", "bos_token": "<|im_start|>"}, chat_template=template, name="chat-kit"
    )


def spelled(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids of a text in which no mark is a token."""
    return tokenizer.encode_plain(text)


def position(token: int, value: float = -0.5) -> PositionLogprobs:
    """Log-probabilities of one position."""
    return {token: Logprob(value, 1), 9: Logprob(-1.0, 2)} if token != 9 else {9: Logprob(value, 1)}


def outputs(
    ids: Sequence[int],
    cuts: Iterable[int] = (),
    *,
    index: int = 0,
    finish: FinishReason = "stop",
    stop_reason: str | int | None = None,
    logprobs: bool = False,
) -> list[CompletionOutput]:
    """An answer in delta mode, cut before the given places; the last output has the finish reason."""
    edges = [0, *sorted({c for c in cuts if 0 < c < len(ids)}), len(ids)]
    return [
        CompletionOutput(
            index,
            token_ids=list(ids[a:b]),
            logprobs=[position(i) for i in ids[a:b]] if logprobs else None,
            finish_reason=finish if b == len(ids) else None,
            stop_reason=stop_reason if b == len(ids) else None,
        )
        for a, b in pairwise(edges)
    ]


def taken(parser: AnswerParser, deltas: Iterable[CompletionOutput]) -> list[Piece]:
    """All pieces of an answer."""
    return [piece for delta in deltas for piece in parser.push(delta)]


def told(pieces: Iterable[Piece]) -> list[tuple[Any, ...]]:
    """Pieces in short, those that go on joined: ("reasoning", text), ("content", text), ("call", index, name, arguments)."""
    said: list[list[Any]] = []
    for piece in pieces:
        match piece:
            case Reasoning() | Content():
                kind = "reasoning" if isinstance(piece, Reasoning) else "content"
                if said and said[-1][0] == kind:
                    said[-1][1] += piece.text
                else:
                    said.append([kind, piece.text])
            case ToolCallStart():
                said.append(["call", piece.index, piece.name, ""])
            case ToolCallArguments():
                assert said[-1][:2] == ["call", piece.index]
                said[-1][3] += piece.text
    return [tuple(s) for s in said]


def all_cuts(length: int, most: int = 60) -> list[tuple[int, ...]]:
    """Ways of cutting: none, everywhere, each single place and some pairs."""
    singles: list[tuple[int, ...]] = [(i,) for i in range(1, length)]
    pairs = list(itertools.combinations(range(1, length), 2))[:: max(1, length * length // (2 * most))]
    return [(), tuple(range(1, length)), *singles[:most], *pairs[:most]]


def drawn(tokenizer: Tokenizer, text: str, end: int | None = 2) -> list[int]:
    """An answer as a model would draw it, its end included."""
    return [*tokenizer.encode(text, add_special_tokens=False), *(() if end is None else (end,))]


def answering(app: Any, *answers: Sequence[int], finish: str = "stop", cached: int = 4, logprobs: int = 2, at_once: bool = False) -> None:
    """Has an engine that follows a script give these answers to every request, token by token and by turns; of n answers the i-th is
    the i-th of them. Each token is read before the next one comes, unless they come ``at_once``."""

    tasks: set[asyncio.Task[None]] = set()

    def start(request: EngineRequest) -> None:
        task = asyncio.get_running_loop().create_task(feed(request))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    async def feed(request: EngineRequest) -> None:
        texts = [answers[i % len(answers)] for i in range(request.params.n)]
        for at in range(max(map(len, texts))):
            for index, ids in enumerate(texts):
                box = app.front._boxes.get(request.request_id)
                while box is not None and box._output is not None and not at_once:
                    await asyncio.sleep(0)  # until it was read
                if at < len(ids) and request.request_id in app.front._outputs:
                    one(request, ids, at, index)

    def one(request: EngineRequest, ids: Sequence[int], at: int, index: int) -> None:
        entries = [i for i in (ids[at], 300, 301, 302) if i != ids[at]][: max(logprobs - 1, 0)]
        values = np.array([-0.25, *(-1.5 - 0.5 * e for e in range(len(entries)))], np.float32)
        told = [TokenLogprobs(np.array([ids[at], *entries], np.int32), values, 1)] if request.params.logprobs is not None else None
        last = finish if at == len(ids) - 1 else None
        app.front.feed(request.request_id, [ids[at]], last, index=index, logprobs=told, cached_tokens=cached)

    app.front.on_submit = start


_COMPILED: dict[Any, Any] = {}
_INFOS: dict[str, Any] = {}


def compiled(kind: str, source: str, compiler: Compiler, vocabulary: Any, options: Sequence[tuple[str, Any]] = ()) -> Any:
    """A grammar, compiled once."""
    key, b = (vocabulary.fingerprint, kind, source, tuple(options)), bindings.load()
    if key not in _COMPILED:
        if vocabulary.fingerprint not in _INFOS:
            _INFOS[vocabulary.fingerprint] = vocabulary.info()
        data = compiler.compile(kind, source, dict(options)).data
        _COMPILED[key] = b.CompiledGrammar.deserialize_json(data.decode(), _INFOS[vocabulary.fingerprint])
    return _COMPILED[key]


def follows(form: StructuredOutputs, ids: list[int], compiler: Compiler, vocabulary: Any) -> str:
    """ "whole", "begun", or the place where a token is not let through."""
    job = screen(form)
    matcher = bindings.load().GrammarMatcher(compiled(job.kind, job.source, compiler, vocabulary, job.options))
    for place, token in enumerate(ids):
        row = np.full(-(-vocabulary.size // 32), -1, np.int32)
        matcher.fill_next_token_bitmask(row)
        if not row[token // 32] >> (token % 32) & 1:
            return f"no {place}"
        assert matcher.accept_token(token)
    return "whole" if matcher.is_completed() else "begun"
