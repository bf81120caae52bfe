"""Random work for an engine under random settings, and the same work one request at a time on a plain engine.

``Play.of(seed)`` is for a small Llama; with ``WINDOWS`` it is for the toy of ``window_toy``, whose hits need windows that pages do not
hold: prompts have common beginnings, and snapshots are few, many or none. With ``STORED`` and ``STORED_WINDOWS`` engines have a KV store
that outlives them: a play has several lives, which share it.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

import window_toy
from deepinfer import LLM, RequestOutput, SamplingParams
from deepinfer.engine.engine import Engine
from deepinfer.engine.input_processor import PromptDict
from deepinfer.engine.request import EngineRequest
from deepinfer.errors import InvalidRequestError

FAULT = "injected fault"
PATIENCE = 60.0
"""Seconds without a step for which a machine may be busy with other things, before what is waited for counts as lost."""


@dataclass(frozen=True)
class Kind:
    """What plays of one model are made of.

    ``ids``: token ids of prompts, from and below. ``text``: whether the model has a tokenizer. ``common``: longest beginning that prompts
    share, besides what motifs give. ``windows``: the toy of ``window_toy``. ``stored``: engines have a KV store, and several lives.
    """

    max_len: int = 112
    ids: tuple[int, int] = (4, 300)
    eos: tuple[int, ...] = (2, 3)
    text: bool = True
    common: int = 0
    drafts: tuple[int, ...] = (1, 2, 4, 7)
    lengths: tuple[int, ...] = (1, 2, 15, 16, 17, 31, 33, 48, 64)
    windows: bool = False
    stored: bool = False


LLAMA = Kind()
WINDOWS = Kind(
    max_len=144,
    ids=(3, window_toy.VOCAB - 1),
    eos=(window_toy.VOCAB - 1,),
    text=False,
    common=90,
    drafts=(1, 2, window_toy.BACKTRACK),
    windows=True,
)
# Objects of a store are 128 tokens.
_STORED: dict[str, Any] = {"max_len": 352, "common": 290, "lengths": (40, 128, 129, 140, 255, 256, 257, 270, 300), "stored": True}
STORED = replace(LLAMA, **_STORED)
STORED_WINDOWS = replace(WINDOWS, **_STORED)


class Walk:
    """A grammar over a few ids: which ones may come depends on the newest id and on how many there are, the end now and then.

    ``ends_after``: no id at all is allowed behind so many, which is an end for even keys and a fault for odd ones. ``eos``: the ids that
    end it.
    """

    def __init__(self, key: int, ends_after: int | None, eos: tuple[int, ...] = LLAMA.eos) -> None:
        self._key, self._ends, self._eos = key, ends_after, eos
        self._tokens: list[int] = []

    @property
    def position(self) -> int:
        return len(self._tokens)

    @property
    def complete(self) -> bool:
        return self._key % 2 == 0 and self._ends is not None and len(self._tokens) >= self._ends

    def allowed(self) -> list[int]:
        n, last = len(self._tokens), self._tokens[-1] if self._tokens else self._key
        if self._ends is not None and n >= self._ends:
            return []
        step = (last * 7 + self._key) % 5
        some = [40 + (last + step * 3) % 6, 40 + n % 6] if step else [40 + (last + 1) % 6]
        return [*some, *self._eos] if n % 16 == 15 else some

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
    images: list[NDArray[np.uint8]] = field(default_factory=list)


@dataclass
class Play:
    """Settings, jobs, and what goes wrong; a function of the seed. ``refused``: errors of jobs that the engine did not take, by name.

    ``fault_at``: the method of the model that fails once in ``fault_every`` calls (0 = never).
    """

    seed: int
    settings: dict[str, Any]
    rates: tuple[float, float] | None
    jobs: list[Job] = field(default_factory=list)
    fault_every: int = 0
    fault_at: str = "forward"
    lives: int = 1
    refused: dict[str, InvalidRequestError] = field(default_factory=dict)

    @classmethod
    def of(cls, seed: int, kind: Kind = LLAMA) -> Play:
        rng = random.Random(seed)
        crowd = rng.random() < 0.3  # many that begin small and grow: somebody has to go
        block = rng.choice((16, 16, 16, 32, 64)) if not crowd else 16
        least = -(-kind.max_len // block)
        seqs = rng.choice((1, 2, 3, 5, 5, 8)) if not crowd else rng.choice((4, 5, 8))
        settings: dict[str, Any] = {
            "block_size": block,
            "num_kv_blocks": least + (rng.choice((1, 1, 1, 2, 3, 30)) if not crowd else 1),
            "max_model_len": kind.max_len,
            "max_num_seqs": seqs,
            "max_num_batched_tokens": seqs + rng.choice((0, 1, 7, 30, 60, 200)),
            "enable_prefix_caching": rng.random() < 0.7,
            "swap_space_gib": rng.choice((0, 0.000015, 0.00004, 0.01, 0.01)),
            "zero_overhead": rng.random() < 0.85,
        }
        if rng.random() < 0.75:
            settings |= {
                "speculative": "ngram",
                "num_draft_tokens": rng.choice(kind.drafts),
                "ngram_min": rng.choice((1, 1, 2)),
                "draft_budget": rng.choice((None, 1, 5, 64, 64)),
            }
        if kind.windows:
            settings |= {"load_format": "dummy", "state_snapshot_gib": rng.choice((None, 0, 0, 800 / 2**30, 3000 / 2**30))}
            settings["enable_prefix_caching"] = rng.random() < 0.85
        play = cls(seed, settings, rng.choice((None, (1e15, 1.0), (1e15, 1.0), (1.0, 1e15))))
        play.fault_every = rng.choice((0, 0, 0, 9, 25))
        motifs = [[rng.randrange(*kind.ids) for _ in range(rng.randint(1, 9))] for _ in range(3)]
        common = [rng.randrange(*kind.ids) for _ in range(kind.common)]
        play.jobs = [_job(rng, i, motifs, common, kind, crowd) for i in range(rng.randint(6 if crowd else 3, 12))]
        if kind.stored:
            play._store(rng, kind)
        return play

    def _store(self, rng: random.Random, kind: Kind) -> None:
        """Settings of a store, less where it is."""
        self.settings |= {
            "enable_prefix_caching": True,
            "kv_store_tenant": rng.choice(("", "team")),
            "kv_store_write": rng.choice(("on_finish", "write_through")),
            "kv_prefetch": rng.choice(("wait", "wait", "timeout", "best_effort")),
            "kv_prefetch_min_tokens": rng.choice((1, 128, 200)),
        }
        if kind.windows and rng.random() < 0.6:  # slices of states are kept where a block ends with an object
            self.settings |= {"block_size": 128, "num_kv_blocks": -(-kind.max_len // 128) + rng.choice((0, 1, 4))}
        self.lives = rng.randint(2, 3)

    def parts(self) -> list[Play]:
        """What each life does: of the jobs some, each behind as many steps of its own life."""
        return [replace(self, jobs=self.jobs[at :: self.lives]) for at in range(self.lives)]


def _job(rng: random.Random, i: int, motifs: list[list[int]], common: list[int], kind: Kind, crowd: bool) -> Job:
    most = kind.max_len
    lengths = (*kind.lengths, most - 1, most - 5, rng.randint(1, most - 1))
    length = rng.choice(lengths[: 6 if crowd else None])
    motif = rng.choice(motifs)
    parts = (0, len(common) // 2, len(common), len(common)) if kind.stored else (0, len(common) // 3, len(common))
    shared = common[: rng.choice(parts)]
    prompt = (shared + motif * length)[:length]
    if rng.random() < 0.4:
        prompt[-1] = rng.randrange(*kind.ids)
    room = most - length
    most = min(room, rng.choice((30, 60, 60, room) if crowd else (1, 1, 2, 3, 12, 30, 60, room)))
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
        values["logit_bias"] = {rng.choice(motif): 8.0, rng.randrange(*kind.ids): 9.0, 45: 7.0}
    if kind.text and rng.random() < 0.2:
        values["bad_words"] = ["th", "e", "st"]
    if kind.text and rng.random() < 0.3:
        values["stop"] = ["s", "the"]
        values["include_stop_str_in_output"] = rng.random() < 0.5
    if rng.random() < 0.3:
        values["stop_token_ids"] = [45, 50, 77, 120, 121, 122, 123] if kind.text else [7]
    if rng.random() < 0.25:
        values["min_tokens"] = min(most, rng.choice((1, 3, 20)))
    if rng.random() < 0.4:
        values["logprobs"] = rng.choice((0, 2, 5, -1))
    if rng.random() < 0.2:
        values["prompt_logprobs"] = rng.choice((0, 3))
    values["detokenize"] = kind.text
    values["ignore_eos"] = rng.random() < 0.6
    values["priority"] = rng.choice((0, 0, 1, -2))
    if rng.random() < 0.2:
        values["cache_salt"] = "other"
    grammar = None
    if rng.random() < 0.35:
        grammar = partial(Walk, rng.randrange(20), rng.choice((None, None, None, 9)), kind.eos)
    gone = rng.choice((0, 1, 2, 3, 8, 20)) if rng.random() < 0.2 else None
    return Job(
        f"r{i}",
        prompt,
        SamplingParams(**values),
        grammar,
        rng.choice(("final", "cumulative")),
        rng.choice((0, 0, 1, 2) if crowd else (0, 0, 1, 2, 5, 20)),
        gone,
    )


def prepared(llm: LLM, job: Job, params: SamplingParams, name: str) -> tuple[EngineRequest, str | None]:
    prompt: PromptDict = {"prompt_token_ids": job.prompt}
    if job.images:
        prompt["images"] = job.images
    request, text = llm._inputs.prepare(prompt, params, name, stream=job.mode != "final")
    return replace(request, grammar=job.grammar), text


def perform(llm: LLM, play: Play, limit: int = 6000) -> dict[str, RequestOutput]:
    """Plays it; last outputs by name. Aborted ones have finish reason "abort" with what they had. ``limit``: most steps."""
    engine = llm.engine
    if play.rates is not None:
        engine._rates.note = lambda *_: None  # type: ignore[method-assign]
        engine._core.set_rates(*play.rates)
    rng, whole = random.Random(play.seed + 1), getattr(engine.model, play.fault_at)
    if play.fault_every:

        def sometimes(*args: Any) -> Any:
            if rng.randrange(play.fault_every) == 0:
                raise RuntimeError(FAULT)
            return whole(*args)

        setattr(engine.model, play.fault_at, sometimes)
    waiting = sorted(play.jobs, key=lambda j: j.after)
    ends: dict[str, int] = {}
    found: dict[str, RequestOutput] = {}
    now, steps, until = 0, _steps(engine), time.monotonic() + PATIENCE
    first = steps
    try:
        while steps - first < limit and time.monotonic() < until:
            while waiting and (waiting[0].after <= now):
                job = waiting.pop(0)
                try:
                    llm._submit(*prepared(llm, job, job.params, job.name), job.mode)  # type: ignore[arg-type]
                except InvalidRequestError as error:
                    play.refused[job.name] = error
                    continue
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
            now, before, steps = now + 1, steps, _steps(engine)
            if steps > before:
                until = time.monotonic() + PATIENCE
            else:
                time.sleep(0.001)  # for what is waited for: room that a save holds, or what a fetch brings
    finally:
        setattr(engine.model, play.fault_at, whole)
    raise AssertionError(f"seed {play.seed}: not finished after {steps - first} steps, {now} turns; {engine.core_counts()['groups']}")


def _steps(engine: Engine) -> int:
    return engine.counters.steps + engine.counters.failed_steps


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
            if job.gone_after is None and job.name not in play.refused:
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
            asked = job.params.prompt_logprobs is not None
            if got.index == 0 and output.prompt_logprobs is not None and plain(output.prompt_logprobs) != plain(ref.prompt_logprobs):
                wrong.append(f"{where}: prompt logprobs differ")
            if got.index == 0 and asked and ref.prompt_logprobs is not None and output.prompt_logprobs is None:
                wrong.append(f"{where}: no prompt logprobs")
    return wrong


def leftovers(llm: LLM) -> list[str]:
    """What an engine with nothing to do still holds, once what it has been storing is stored."""
    engine, wrong = llm.engine, []
    # What a sequence's end leaves to be copied goes with the next step, whosever it is.
    request, text = llm._inputs.prepare([5], SamplingParams(max_tokens=1, detokenize=False), "last", stream=False)
    llm._submit(request, text, "final")
    while llm.has_unfinished_requests():
        llm.step()
    for _ in range(4):
        engine.step()
    # Last: the end of an answer that was stopped, and with it the save of what it completed, comes with a step.
    if engine._store is not None and not engine._store.settle(PATIENCE):
        wrong.append(f"after {PATIENCE:.0f} s something is still to be stored: {engine._store.counters.as_dict()}")
    for _ in range(4):
        engine.step()
    counts = engine.core_counts()
    for name, pool in [(f"group {i}", g) for i, g in enumerate(counts["groups"])] + [
        (n, counts[n])
        for n in ("slots", "host_blocks", "host_slots", "snapshots")  # type: ignore[literal-required]
    ]:
        if pool["held"] or pool["parked"]:
            wrong.append(f"{name}: {pool}")
    answers, grammars = engine._answers, engine._grammars
    if engine.has_unfinished() or answers.by_handle or answers.requests or grammars._matchers or grammars._errors or grammars._whole:
        wrong.append("requests are left")
    if (why := engine._core.check()) is not None:
        wrong.append(why)
    return wrong
