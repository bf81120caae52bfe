"""Random work for an engine under random settings, and the same work one request at a time on a plain engine."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepinfer import LLM, RequestOutput, SamplingParams
from deepinfer.engine.request import EngineRequest

MAX_LEN = 112
EOS = (2, 3)
FAULT = "injected fault"


class Walk:
    """A grammar over a few ids: which ones may come depends on the newest id and on how many there are, the end now and then.

    ``ends_after``: no id at all is allowed behind so many.
    """

    def __init__(self, key: int, ends_after: int | None) -> None:
        self._key, self._ends = key, ends_after
        self._tokens: list[int] = []

    @property
    def position(self) -> int:
        return len(self._tokens)

    def allowed(self) -> list[int]:
        n, last = len(self._tokens), self._tokens[-1] if self._tokens else self._key
        if self._ends is not None and n >= self._ends:
            return []
        step = (last * 7 + self._key) % 5
        some = [40 + (last + step * 3) % 6, 40 + n % 6] if step else [40 + (last + 1) % 6]
        return [*some, *EOS] if n % 16 == 15 else some

    def fill_mask(self, row: NDArray[np.int32]) -> None:
        bits = np.zeros(len(row) * 32, np.uint8)
        bits[self.allowed()] = 1
        row[:] = np.packbits(bits, bitorder="little").view(np.int32)

    def accept(self, token: int) -> bool:
        if token not in self.allowed():
            return False
        self._tokens.append(token)
        return True

    def rollback(self, count: int) -> None:
        assert count <= len(self._tokens)
        del self._tokens[len(self._tokens) - count :]


@dataclass
class Job:
    """One request, and what is done to it: ``after`` so many steps, ended ``gone_after`` more."""

    name: str
    prompt: list[int]
    params: SamplingParams
    grammar: Callable[[], Walk] | None
    mode: str
    after: int
    gone_after: int | None


@dataclass
class Play:
    """Settings, jobs, and what goes wrong; a function of the seed."""

    seed: int
    settings: dict[str, Any]
    rates: tuple[float, float] | None
    jobs: list[Job] = field(default_factory=list)
    fault_every: int = 0

    @classmethod
    def of(cls, seed: int) -> Play:
        rng = random.Random(seed)
        block = rng.choice((16, 16, 16, 32, 64))
        least = -(-MAX_LEN // block)
        seqs = rng.choice((1, 2, 3, 5, 5, 8))
        settings: dict[str, Any] = {
            "block_size": block,
            "num_kv_blocks": least + rng.choice((1, 1, 1, 2, 3, 30)),
            "max_model_len": MAX_LEN,
            "max_num_seqs": seqs,
            "max_num_batched_tokens": seqs + rng.choice((0, 1, 7, 30, 60, 200)),
            "enable_prefix_caching": rng.random() < 0.7,
            "swap_space_gib": rng.choice((0, 0.000015, 0.00004, 0.01, 0.01)),
            "zero_overhead": rng.random() < 0.85,
        }
        if rng.random() < 0.75:
            settings |= {
                "speculative": "ngram",
                "num_draft_tokens": rng.choice((1, 2, 4, 7)),
                "ngram_min": rng.choice((1, 1, 2)),
                "draft_budget": rng.choice((None, 1, 5, 64, 64)),
            }
        play = cls(seed, settings, rng.choice((None, (1e15, 1.0), (1e15, 1.0), (1.0, 1e15))))
        play.fault_every = rng.choice((0, 0, 0, 9, 25))
        motifs = [[rng.randrange(4, 300) for _ in range(rng.randint(1, 9))] for _ in range(3)]
        play.jobs = [_job(rng, i, motifs) for i in range(rng.randint(3, 12))]
        return play


def _job(rng: random.Random, i: int, motifs: list[list[int]]) -> Job:
    length = rng.choice((1, 2, 15, 16, 17, 31, 33, 48, 64, MAX_LEN - 1, MAX_LEN - 5, rng.randint(1, MAX_LEN - 1)))
    motif = rng.choice(motifs)
    prompt = (motif * length)[:length]
    if rng.random() < 0.4:
        prompt[-1] = rng.randrange(4, 300)
    room = MAX_LEN - length
    most = min(room, rng.choice((1, 1, 2, 3, 12, 30, 60, room)))
    drawn = rng.random() < 0.6
    values: dict[str, Any] = {"temperature": 0.0, "max_tokens": most, "seed": rng.randrange(1 << 40)}
    if drawn:
        values |= {
            "temperature": rng.choice((0.3, 1.0, 2.0)),
            "top_p": rng.choice((1.0, 0.8)),
            "top_k": rng.choice((0, 0, 5)),
            "min_p": rng.choice((0.0, 0.0, 0.1)),
            "n": rng.choice((1, 1, 1, 2, 3)),
        }
    if rng.random() < 0.3:
        values |= {
            "presence_penalty": rng.choice((0.0, 1.5)),
            "frequency_penalty": rng.choice((0.0, -1.0, 0.7)),
            "repetition_penalty": rng.choice((1.0, 1.4, 0.7)),
        }
    if rng.random() < 0.35:
        values["logit_bias"] = {rng.choice(motif): 8.0, rng.randrange(4, 300): 9.0, 45: 7.0}
    if rng.random() < 0.2:
        values["bad_words"] = ["th", "e", "st"]
    if rng.random() < 0.3:
        values["stop"] = ["s", "the"]
        values["include_stop_str_in_output"] = rng.random() < 0.5
    if rng.random() < 0.3:
        values["stop_token_ids"] = [45, 50, 77, 120, 121, 122, 123]
    if rng.random() < 0.25:
        values["min_tokens"] = min(most, rng.choice((1, 3, 20)))
    if rng.random() < 0.4:
        values["logprobs"] = rng.choice((0, 2, 5, -1))
    if rng.random() < 0.2:
        values["prompt_logprobs"] = rng.choice((0, 3))
    values["ignore_eos"] = rng.random() < 0.6
    values["priority"] = rng.choice((0, 0, 1, -2))
    if rng.random() < 0.2:
        values["cache_salt"] = "other"
    grammar = None
    if rng.random() < 0.35:
        grammar = partial(Walk, rng.randrange(20), rng.choice((None, None, None, 9)))
    gone = rng.choice((0, 1, 2, 3, 8, 20)) if rng.random() < 0.2 else None
    return Job(
        f"r{i}", prompt, SamplingParams(**values), grammar, rng.choice(("final", "cumulative")), rng.choice((0, 0, 1, 2, 5, 20)), gone
    )


def prepared(llm: LLM, job: Job, params: SamplingParams, name: str) -> tuple[EngineRequest, str | None]:
    request, text = llm._inputs.prepare({"prompt_token_ids": job.prompt}, params, name, stream=job.mode != "final")
    return replace(request, grammar=job.grammar), text


def perform(llm: LLM, play: Play, limit: int = 6000) -> dict[str, RequestOutput]:
    """Plays it; last outputs by name. Aborted ones have finish reason "abort" with what they had."""
    engine = llm.engine
    if play.rates is not None:
        engine._rates.note = lambda *_: None  # type: ignore[method-assign]
        engine._core.set_rates(*play.rates)
    rng, forward = random.Random(play.seed + 1), engine.model.forward
    if play.fault_every:

        def sometimes(*args: Any) -> Any:
            if rng.randrange(play.fault_every) == 0:
                raise RuntimeError(FAULT)
            return forward(*args)

        engine.model.forward = sometimes  # type: ignore[method-assign]
    waiting = sorted(play.jobs, key=lambda j: j.after)
    ends: dict[str, int] = {}
    found: dict[str, RequestOutput] = {}
    try:
        for now in range(limit):
            while waiting and (waiting[0].after <= now):
                job = waiting.pop(0)
                llm._submit(*prepared(llm, job, job.params, job.name), job.mode)  # type: ignore[arg-type]
                if job.gone_after is not None:
                    ends[job.name] = now + job.gone_after
            for name in [n for n, at in ends.items() if at <= now]:
                del ends[name]
                output = llm.abort(name)
                if output is not None:
                    found[name] = output
            for output in llm.step():
                found[output.request_id] = output
            if not waiting and not llm.has_unfinished_requests():
                return found
    finally:
        engine.model.forward = forward  # type: ignore[method-assign]
    raise AssertionError(f"seed {play.seed}: not finished after {limit} steps")


def alone(llm: LLM, job: Job) -> list[RequestOutput]:
    """Each answer of a job by itself on a plain engine; prompt log-probabilities hang on the first."""
    answers: list[RequestOutput] = []
    request, _ = prepared(llm, job, job.params, job.name)
    for index, seed in enumerate(request.seeds):
        params = job.params.clone(n=1, seed=seed, prompt_logprobs=None if index else job.params.prompt_logprobs)
        one, text = prepared(llm, job, params, job.name)
        llm._submit(one, text, "final")
        outputs: list[RequestOutput] = []
        while llm.has_unfinished_requests():
            outputs += llm.step()
        (output,) = outputs
        answers.append(output)
    return answers


def plain(values: Any) -> Any:
    """Log-probabilities as comparable bits."""
    if values is None:
        return None
    return [None if v is None else [(t, np.float32(e.logprob).tobytes(), e.rank) for t, e in v.items()] for v in values]


def differences(play: Play, found: dict[str, RequestOutput], want: dict[str, list[RequestOutput]]) -> list[str]:
    """What is not as it is alone. Aborted answers and those of failed steps must be a beginning of it."""
    wrong = []
    for job in play.jobs:
        output = found.get(job.name)
        if output is None:
            if job.gone_after is None:
                wrong.append(f"{job.name}: nothing came")
            continue
        for got, ref in zip(output.outputs, want[job.name], strict=True):
            expected, where = ref.outputs[0], f"{job.name}[{got.index}]"
            partly = got.finish_reason in ("abort", None) or FAULT in (got.error or "")
            n = len(got.token_ids)
            if partly:
                if list(got.token_ids) != list(expected.token_ids)[:n]:
                    wrong.append(f"{where}: {got.token_ids} does not begin {expected.token_ids}")
                continue
            for what in ("token_ids", "finish_reason", "stop_reason", "text", "error"):
                a, b = getattr(got, what), getattr(expected, what)
                if (list(a) if what == "token_ids" else a) != (list(b) if what == "token_ids" else b):
                    wrong.append(f"{where}: {what} {a!r}, alone {b!r}")
            if plain(got.logprobs) != plain(expected.logprobs):
                wrong.append(f"{where}: logprobs differ")
            if got.index == 0 and output.prompt_logprobs is not None and plain(output.prompt_logprobs) != plain(ref.prompt_logprobs):
                wrong.append(f"{where}: prompt logprobs differ")
            if got.index == 0 and ref.prompt_logprobs is not None and output.prompt_logprobs is None:
                wrong.append(f"{where}: no prompt logprobs")
    return wrong


def leftovers(llm: LLM) -> list[str]:
    """What an engine with nothing to do still holds."""
    engine, wrong = llm.engine, []
    for _ in range(4):
        engine.step()
    counts = engine.core_counts()
    for name, pool in [(f"group {i}", g) for i, g in enumerate(counts["groups"])] + [
        (n, counts[n])
        for n in ("slots", "host_blocks", "host_slots")  # type: ignore[literal-required]
    ]:
        if pool["held"] or pool["parked"]:
            wrong.append(f"{name}: {pool}")
    answers, grammars = engine._answers, engine._grammars
    if engine.has_unfinished() or answers.by_handle or answers.requests or grammars._matchers or grammars._errors:
        wrong.append("requests are left")
    if (why := engine._core.check()) is not None:
        wrong.append(why)
    return wrong
