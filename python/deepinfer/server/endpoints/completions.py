"""`/v1/completions`: prompts as they are, no conversation around them.

Owns: this protocol's fields and its answers, whole or in pieces. Never touches: the engine (see `deepinfer.server.generation`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from deepinfer.outputs import CompletionOutput, RequestOutput
from deepinfer.sampling import SamplingParams
from deepinfer.server import fields, fresh, shapes
from deepinfer.server.errors import BadRequestError
from deepinfer.server.generation import Job, complete, generate
from deepinfer.server.http.call import Call, good_request_id

_REFUSED: dict[str, tuple[Any, ...]] = {"suffix": ("",), "use_beam_search": (False,)}


@dataclass(frozen=True, slots=True)
class Request:
    """A body, read.

    Attributes:
        echo: the prompt stands before each answer.
        nothing_new: ``max_tokens`` is 0; the one token that the engine makes all the same is left out.
        logprobs: most likely tokens shown at each position; ``None``: no log-probabilities.
        ids: token ids are shown as well.
    """

    model: str
    prompts: list[fields.Prompt]
    params: SamplingParams
    streaming: fields.Streaming
    echo: bool
    nothing_new: bool
    logprobs: int | None
    prompt_logprobs: bool
    ids: bool


def read(call: Call, body: Mapping[str, Any]) -> Request:
    """Reads a body.

    Raises:
        ApiError: a field is wrong or not served.
    """
    model = fields.check_model(call, body)
    fields.refuse(body, _REFUSED)
    values = fields.sampling_values(body)
    fields.check_best_of(body, values)
    echo = fields.typed(body, "echo", bool, False)
    nothing_new = echo and type(body.get("max_tokens")) is int and body["max_tokens"] == 0
    if nothing_new:
        values["max_tokens"] = 1
        values.pop("min_tokens", None)
    if (form := fields.form(body)) is not None:
        values["structured_outputs"] = form
    top = _count(body, "logprobs")
    wanted = _count(body, "prompt_logprobs")
    streaming = fields.streaming(body)
    if wanted is not None and streaming.on:
        raise BadRequestError("prompt_logprobs come with whole answers only; leave out stream", param="prompt_logprobs")
    if top is not None:
        values["logprobs"] = top
    if wanted is not None or (echo and top is not None):
        values["prompt_logprobs"] = -1 if -1 in (top, wanted) else max(top or 0, wanted or 0)
    params = fields.sampling_params(call, values)
    own_id = body.get("request_id")
    if own_id is not None:
        if not good_request_id(own_id):
            raise BadRequestError("request_id must be up to 128 letters, digits and ._:/+=@-", param="request_id")
        call.request_id = call.record.request_id = own_id
    return Request(
        model=model,
        prompts=fields.prompts(body.get("prompt")),
        params=params,
        streaming=streaming,
        echo=echo,
        nothing_new=nothing_new,
        logprobs=top,
        prompt_logprobs=wanted is not None,
        ids=fields.typed(body, "return_token_ids", bool, False),
    )


def _count(body: Mapping[str, Any], name: str) -> int | None:
    value = body.get(name)
    if value is False:
        return None  # as some clients say "none"
    if value is not None and type(value) is not int:
        raise BadRequestError(f"{name} must be an integer", param=name)
    return value


async def create(call: Call) -> None:
    """Answers one request."""
    body = await call.json()
    request = read(call, body)
    several = len(request.prompts) > 1
    jobs = [Job(p, request.params, i, f"prompt[{i}]" if several else "prompt") for i, p in enumerate(request.prompts)]
    writer = _Writer(call, request)
    if request.streaming.on:
        await writer.stream(jobs)
    else:
        await call.reply(200, writer.whole(await complete(call, jobs)))


class _Choice:
    """One answer as it is written."""

    def __init__(self, request: Request, index: int) -> None:
        self.index = index
        self.request = request
        self.begun = False
        self.logprobs = shapes.LegacyLogprobs(request.logprobs) if request.logprobs is not None else None
        self.tokens = 0

    def piece(self, call: Call, prompt: RequestOutput, answer: CompletionOutput) -> dict[str, Any]:
        """What is new of it, as a choice; ``prompt``: an output of its prompt that has the log-probabilities of that, if any has."""
        request, first = self.request, not self.begun
        self.begun = True
        ids = [] if request.nothing_new else answer.token_ids
        self.tokens += len(ids)
        text = "" if request.nothing_new else answer.text
        logprobs: dict[str, list[Any]] | None = None
        if self.logprobs is not None:
            parts = []
            if first and request.echo:
                parts += self._prompt(call, prompt)
            parts.append(self.logprobs.take(ids, answer.logprobs or ()))
            logprobs = {name: [x for part in parts for x in part[name]] for name in parts[0]}
        if first and request.echo:
            text = _prompt_text(call, prompt) + text
        reason = "length" if request.nothing_new and answer.finish_reason is not None else answer.finish_reason
        choice: dict[str, Any] = {
            "index": self.index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": reason,
            "stop_reason": None if request.nothing_new else answer.stop_reason,
        }
        if request.ids:
            choice["token_ids"] = ids
            if first:
                choice["prompt_token_ids"] = prompt.prompt_token_ids
        return choice

    def _prompt(self, call: Call, output: RequestOutput) -> list[dict[str, list[Any]]]:
        assert self.logprobs is not None and output.prompt_logprobs is not None
        ids = output.prompt_token_ids
        first = call.state.llm.get_tokenizer().token_text(ids[0])
        return [self.logprobs.first(first), self.logprobs.take(ids[1:], output.prompt_logprobs[1:])]


def _prompt_text(call: Call, output: RequestOutput) -> str:
    if output.prompt is not None:
        return output.prompt
    return call.state.llm.get_tokenizer().decode(output.prompt_token_ids, skip_special_tokens=False, spaces_between_special_tokens=False)


class _Writer:
    """The answers of one request."""

    def __init__(self, call: Call, request: Request) -> None:
        self.call, self.request = call, request
        self.head = {
            "id": f"cmpl-{call.request_id}",
            "object": "text_completion",
            "created": fresh.now(),
            "model": request.model,
        }
        n = request.params.n
        self.choices = [_Choice(request, i) for i in range(n * len(request.prompts))]
        self.prompt_tokens: dict[int, int] = {}
        self.first: dict[int, RequestOutput] = {}  # of each prompt, the output that says what there is to say of the prompt
        self.cached_tokens: dict[int, int] = {}

    def take(self, place: int, output: RequestOutput) -> list[dict[str, Any]]:
        """What an output brings, as choices."""
        self.prompt_tokens[place] = len(output.prompt_token_ids)
        self.cached_tokens[place] = output.num_cached_tokens
        first = self.first.setdefault(place, output)
        n = self.request.params.n
        return [self.choices[place * n + answer.index].piece(self.call, first, answer) for answer in output.outputs]

    def usage(self) -> dict[str, Any]:
        """Token counts so far."""
        made = sum(c.tokens for c in self.choices)
        return shapes.usage(sum(self.prompt_tokens.values()), made, sum(self.cached_tokens.values()))

    def whole(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        """The answer at once."""
        choices = []
        for place, output in enumerate(outputs):
            for choice in self.take(place, output):
                if self.request.prompt_logprobs and output.prompt_logprobs is not None:
                    choice["prompt_logprobs"] = shapes.prompt_logprobs(output.prompt_logprobs)
                choices.append(choice)
        return {**self.head, "choices": choices, "usage": self.usage()}

    async def stream(self, jobs: list[Job]) -> None:
        """The answer as it comes: a chunk for each answer with news, then the counts if they were asked for."""
        streaming = self.request.streaming
        events = self.call.events()
        async with contextlib.aclosing(generate(self.call, jobs, stream=True)) as outputs:
            async for job, output in outputs:
                for choice in self.take(job.index, output):
                    if not _says_something(choice):
                        continue
                    chunk = {**self.head, "choices": [choice]}
                    if streaming.usage:
                        chunk["usage"] = self.usage() if streaming.continuous else None
                    elif streaming.continuous:
                        chunk["usage"] = self.usage()
                    await events.send(chunk)
        if streaming.usage:
            await events.send({**self.head, "choices": [], "usage": self.usage()})
        await events.done()


def _says_something(choice: dict[str, Any]) -> bool:
    """Whether there is anything to send: text may be held back, as part of a character or of a stop string."""
    logprobs = choice["logprobs"]
    return bool(choice["text"] or choice["finish_reason"] or choice.get("token_ids") or (logprobs and logprobs["tokens"]))
