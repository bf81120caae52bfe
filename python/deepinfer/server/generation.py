"""From prompts to outputs on behalf of one call.

Owns: the order in which a request is checked, admitted and run; what is recorded of it. Never touches: JSON, the engine itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deepinfer.errors import GrammarBusyError, GrammarError, InvalidRequestError, StepFailedError
from deepinfer.outputs import RequestOutput
from deepinfer.sampling import SamplingParams
from deepinfer.server.errors import BadRequestError, as_api_error
from deepinfer.server.http.call import Call
from deepinfer.server.records import PromptRecord

if TYPE_CHECKING:
    from deepinfer.engine.async_engine.front import Prepared
    from deepinfer.engine.input_processor import Prompt

_PENDING = 4
"""Outputs of one call that wait for its handler, beyond which each prompt keeps its own as one."""


@dataclass(frozen=True, slots=True)
class Job:
    """One prompt of a call. ``index`` is its place among the call's prompts, ``at`` its path in the body, for errors."""

    prompt: Prompt
    params: SamplingParams
    index: int = 0
    at: str | None = None


async def generate(call: Call, jobs: Sequence[Job], stream: bool) -> AsyncGenerator[tuple[Job, RequestOutput]]:
    """Runs the prompts of a call in the engine.

    Args:
        stream: give what is new as it comes (outputs in delta mode); else one output per prompt, when it is complete.

    Closing the iterator, or cancelling whoever waits for it, aborts all of them.

    Raises (from the first step of the iterator, before anything reached the engine):
        ApiError: the server is full, draining or dead, or a tenant's limit is reached.
        BadRequestError: a prompt cannot be served; ``param`` says which.
    Raises (later):
        ApiError: a step failed, or the engine ended.
    """
    state = call.state
    state.check_open()
    with state.admission.admit(sum(job.params.n for job in jobs)) as take:
        prepared = []
        for job in jobs:
            prepared.append(await _prepare(call, job, stream, len(jobs) > 1))
            if len(jobs) > 1:
                await asyncio.sleep(0)  # others have their turn
        state.check_open()  # it took its time
        take(sum(len(p.request.prompt_ids) + p.request.max_new * p.request.params.n for p in prepared))
        call.answer_headers.update(call.tenant.pay(sum(len(p.request.prompt_ids) for p in prepared)))
        call.record.prompts = records = [PromptRecord(p.request.params, len(p.request.prompt_ids)) for p in prepared]
        try:
            async with contextlib.aclosing(_run(call, prepared)) as outputs:
                async for place, output in outputs:
                    _note(records[place], output)
                    if stream:
                        _note_gaps(call, records[place], output)
                    yield jobs[place], output
        finally:
            _count(call)


async def _prepare(call: Call, job: Job, stream: bool, several: bool) -> Prepared:
    params = call.tenant.params(job.params)
    name = f"{call.request_id}-{job.index}" if several else call.request_id
    try:
        # The suffix keeps apart requests whose clients chose the same id.
        return await call.state.llm.prepare(job.prompt, params, request_id=f"{name}#{id(call):x}", mode="delta" if stream else "final")
    except GrammarBusyError:
        raise
    except InvalidRequestError as e:
        error = as_api_error(e)
        where = f"prompt {job.index}: " if several else ""
        at = None if isinstance(e, GrammarError) else job.at  # the message says what of the form it is
        raise BadRequestError(where + error.message, param=at, code=error.code) from None


async def _run(call: Call, prepared: Sequence[Prepared]) -> AsyncGenerator[tuple[int, RequestOutput]]:
    """Outputs of all prompts as they come."""
    llm = call.state.llm
    if len(prepared) == 1:
        async with contextlib.aclosing(llm.run(prepared[0])) as outputs:
            async for output in outputs:
                yield 0, output
        return
    queue: asyncio.Queue[tuple[int, RequestOutput | BaseException | None]] = asyncio.Queue(_PENDING)

    async def pump(place: int) -> None:
        try:
            async with contextlib.aclosing(llm.run(prepared[place])) as outputs:
                async for output in outputs:
                    await queue.put((place, output))
        except Exception as e:
            await queue.put((place, e))
        else:
            await queue.put((place, None))

    pumps = [asyncio.create_task(pump(place)) for place in range(len(prepared))]
    try:
        running = len(pumps)
        while running:
            place, news = await queue.get()
            if isinstance(news, BaseException):
                raise news
            if news is None:
                running -= 1
            else:
                yield place, news
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


def _note(record: PromptRecord, output: RequestOutput) -> None:
    record.cached_tokens = output.num_cached_tokens
    record.metrics = output.metrics
    for answer in output.outputs:
        record.completion_tokens += len(answer.token_ids)
        if answer.finish_reason is not None:
            record.finish_reasons.append(answer.finish_reason)
        if answer.finish_reason == "error":
            raise StepFailedError(answer.error or "a step failed")


def _note_gaps(call: Call, record: PromptRecord, output: RequestOutput) -> None:
    now = time.monotonic()
    if not record.last_token and output.metrics.first_token_time:
        call.state.first_token(max(0.0, output.metrics.first_token_time - call.record.started))
    for answer in output.outputs:
        if answer.token_ids:
            if (before := record.last_token.get(answer.index)) is not None:
                call.state.gap(now - before, len(answer.token_ids))
            record.last_token[answer.index] = now


def _count(call: Call) -> None:
    used = call.tenant.usage
    used.requests += 1
    for record in call.record.prompts:
        used.prompt_tokens += record.prompt_tokens
        used.cached_tokens += record.cached_tokens
        used.completion_tokens += record.completion_tokens
    call.tenant.pay_answer(sum(record.completion_tokens for record in call.record.prompts))


async def complete(call: Call, jobs: Sequence[Job]) -> list[RequestOutput]:
    """The finished output of every prompt, in order; see :func:`generate`."""
    made: dict[int, RequestOutput] = {}
    async with contextlib.aclosing(generate(call, jobs, stream=False)) as outputs:
        async for job, output in outputs:
            made[job.index] = output
    return [made[job.index] for job in jobs]
